//! Device source embedded in the crate: headers that any kernel may include, and the kernels of the
//! ops.

use std::sync::OnceLock;

use iris_heap::fnv;

macro_rules! embed {
    ($($kind:ident: $($name:literal),* $(,)?);*) => {
        &[$($(Text {
            name: $name,
            text: include_str!(concat!("../kernels/", $name)),
            kind: SourceKind::$kind,
        },)*)*]
    };
}

/// Kind of a source, which determines its compile-time parameters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SourceKind {
    /// Header, not compiled by itself.
    Header,
    /// Barrier kernel, which has one workgroup.
    Barrier,
    /// Kernel that copies or normalises a rank's own rows. It is built so that two workgroups fit
    /// on a multiprocessor.
    Local,
    /// Kernels that only exchange data between ranks. They have no GEMM, so they are compiled
    /// without element type and tile size.
    Message,
    /// Tile GEMM with or without a message, compiled for one element type and tile size.
    TileGemm,
    /// Kernel of a whole-matrix GEMM, see `crate::gemm`.
    WholeGemm,
}

/// Source file that is embedded in the crate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Text {
    /// Name: the path in `#include` for a header, the file name for a kernel.
    pub name: &'static str,
    /// Text of the embedded file.
    pub text: &'static str,
    /// Kind of the source.
    pub kind: SourceKind,
}

impl Text {
    /// Text of this source with `kernel` as its only kernel. The other kernels become empty lines, so that
    /// the compiler's messages show the line numbers of the file.
    pub(crate) fn only(&self, kernel: &str) -> String {
        const BEGIN: &str = "\nIRIS_KERNEL ";
        const END: &str = "\n}\n";
        let mut pieces = self.text.split(BEGIN);
        let mut text = pieces.next().unwrap_or_default().to_string();
        for piece in pieces {
            let kept = piece.split('(').next() == Some(kernel);
            let end = if kept { 0 } else { piece.find(END).map_or(0, |at| at + END.len() - 1) };
            text.push_str(if kept { BEGIN } else { "\n" });
            text.extend(piece[..end].chars().filter(|&c| c == '\n'));
            text.push_str(&piece[end..]);
        }
        text
    }
}

/// Headers that kernels include, such as `#include "iris/sync.h"`, in the order of their layers:
/// each header includes only earlier ones.
pub const HEADERS: &[Text] = embed![Header:
    "iris/port_cuda.h",
    "iris/port_hip.h",
    "iris/port_device.h",
    "iris/port_host.h",
    "iris/port.h",
    "iris/copy.h",
    "iris/sym.h",
    "iris/call.h",
    "iris/fault.h",
    "iris/memory.h",
    "iris/channel.h",
    "iris/wait.h",
    "iris/barrier.h",
    "iris/entry.h",
    "iris/epoch.h",
    "iris/ll.h",
    "iris/lock.h",
    "iris/tile_flags.h",
    "iris/trace.h",
    "iris/workgroup.h",
    "iris/sync.h",
    "iris/schedule.h",
    "iris/flow/launch.h",
    "iris/flow/accumulate.h",
    "iris/flow/copied.h",
    "iris/flow/deliver.h",
    "iris/flow/gather.h",
    "iris/flow/ll.h",
    "iris/flow/reduce.h",
    "iris/flow.h",
    "iris/tiles.h",
    "iris/dtype.h",
    "iris/args.h",
    "iris/view.h",
    "iris/gemm_config.h",
    "iris/gemm/sm80_ptx.h",
    "iris/gemm/sm90_ptx.h",
    "iris/gemm/sm90_wgmma.h",
    "iris/gemm/fma.h",
    "iris/gemm/cdna3.h",
    "iris/gemm/sm80.h",
    "iris/gemm/sm90_lines.h",
    "iris/gemm/sm90.h",
    "iris/gemm/product.h",
    "iris/gemm/core.h",
    "iris/gemm/whole.h",
    "iris/body/epilogue.h",
    "iris/body/norm.h",
    "iris/body/partial.h",
    "iris/gemm/producer.h",
    "iris/body/accumulate.h",
    "iris/body/sums.h",
    "iris/body/deliver.h",
    "iris/body/gather.h",
    "iris/body/combine.h",
    "iris/body/ll.h",
    "iris/body/ll_list.h",
    "iris/body/reduce.h",
];

/// Sources of kernels: one file per operator, and files with kernels that operators share.
pub const KERNELS: &[Text] = embed![
    Barrier: "barrier.cu";
    Local: "copy.cu";
    Message:
    "all_gather.cu",
    "all_reduce.cu",
    "all_reduce_norm.cu",
    "all_to_all.cu",
    "broadcast.cu",
    "copied.cu",
    "reduce_scatter.cu";
    TileGemm:
    "all_gather_matmul.cu",
    "matmul.cu",
    "matmul_all_gather.cu",
    "matmul_all_reduce.cu",
    "matmul_reduce_scatter.cu"
];

/// Sources of whole-matrix GEMMs, see `crate::gemm`. All sources except the first one contain
/// communication.
pub const GEMMS: &[Text] = embed![WholeGemm:
    "gemm_sm90.cu",
    "gemm_sm90_gather.cu",
    "gemm_sm90_scatter.cu",
    "gemm_sm90_exchange.cu",
    "gemm_sm90_one_shot.cu",
];

/// Hash of all sources, which ranks compare. Ranks whose kernels come from different sources cannot
/// make an operator together.
pub fn hash() -> u128 {
    static HASH: OnceLock<u128> = OnceLock::new();
    *HASH.get_or_init(|| hash_of(HEADERS.iter().chain(KERNELS).chain(GEMMS)))
}

fn hash_of<'a>(texts: impl Iterator<Item = &'a Text>) -> u128 {
    let parts: Vec<_> = texts.flat_map(|it| [it.name.as_bytes(), it.text.as_bytes()]).collect();
    fnv(&parts)
}

/// Returns the kernel source of an operator by the operator's name, for example
/// `matmul_all_reduce`; `None` if no such file is embedded.
pub fn kernel(op: &str) -> Option<Text> {
    KERNELS.iter().copied().find(|text| text.name.strip_suffix(".cu") == Some(op))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_embedded() {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");
        let mut files = Vec::new();
        for folder in ["", "iris/", "iris/body/", "iris/flow/", "iris/gemm/"] {
            for entry in std::fs::read_dir(format!("{root}/{folder}")).expect("kernels/") {
                let name = entry.expect("entry").file_name().into_string().expect("utf-8");
                if name.ends_with(".h") || name.ends_with(".cu") {
                    files.push(format!("{folder}{name}"));
                }
            }
        }
        let mut embedded: Vec<_> =
            HEADERS.iter().chain(KERNELS).chain(GEMMS).map(|text| text.name.to_string()).collect();
        files.sort();
        embedded.sort();
        assert_eq!(files, embedded);
    }

    #[test]
    fn another_source_is_another_hash() {
        let other = Text { text: "// Another.", ..KERNELS[0] };
        let changed = hash_of(HEADERS.iter().chain([&other]).chain(&KERNELS[1..]).chain(GEMMS));
        assert_ne!(changed, hash());
    }

    #[test]
    fn kernels_are_found_by_op() {
        assert!(
            kernel("matmul_all_reduce").is_some_and(|text| text.text.contains("iris_two_shot"))
        );
        assert_eq!(kernel("matmul_all_reduce.cu"), None);
    }

    #[test]
    fn a_kernel_is_alone_with_what_stands_between_kernels() {
        let is_code = |line: &&str| !line.is_empty() && *line != "}" && !line.starts_with("    ");
        for source in KERNELS {
            let kernels: Vec<_> =
                source.text.lines().filter(|line| line.starts_with("IRIS_KERNEL ")).collect();
            assert!(!kernels.is_empty(), "{}", source.name);
            for kernel in &kernels {
                let name = kernel["IRIS_KERNEL ".len()..].split('(').next().expect("a name");
                let alone = source.only(name);
                assert_eq!(alone.lines().count(), source.text.lines().count(), "{name}");
                let all = source.text.lines().filter(is_code);
                let expected: Vec<_> =
                    all.filter(|it| it == kernel || !kernels.contains(it)).collect();
                assert_eq!(alone.lines().filter(is_code).collect::<Vec<_>>(), expected, "{name}");
                let body = &source.text[source.text.find(kernel).expect("the kernel")..];
                let body = &body[..body.find("\n}\n").expect("its end")];
                assert!(alone.contains(body), "{name}");
            }
        }
        let gemm = GEMMS[0];
        assert_eq!(gemm.only("iris_gemm"), gemm.text);
    }
}
