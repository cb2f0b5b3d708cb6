//! The rules of device source: what may be written only in the headers made for it.

use super::Finding;
use super::tree::Tree;

/// Where device source lies.
const KERNELS: &str = "iris-kernels/kernels/";

/// Identifiers that belong into few files.
struct Confined {
    what: &'static str,
    /// A word that ends in `*` stands for every identifier that begins so.
    words: &'static [&'static str],
    may: fn(&str) -> bool,
    place: &'static str,
}

const RULES: &[Confined] = &[
    Confined {
        what: "a vendor's macro or function",
        words: &[
            "__CUDA_ARCH*",
            "__CUDACC*",
            "__HIP*",
            "__AMDGCN*",
            "__gfx*",
            "__hip_*",
            "__nv_*",
            "__nvvm_*",
            "__builtin_amdgcn_*",
        ],
        may: |path| is_port(path) || is_mma(path),
        place: "iris/port*.h and iris/mma*.h",
    },
    Confined {
        // The scope of an access is in the type of its word; these would go around it.
        what: "a raw atomic, fence or assembly",
        words: &[
            "asm",
            "__asm",
            "__asm__",
            "volatile",
            "__volatile__",
            "__atomic*",
            "__sync_*",
            "__scoped_atomic*",
            "__c11_atomic*",
            "__threadfence*",
            "__ldg",
            "__ldcg",
            "__ldcv",
            "__stcg",
            "__stwt",
            "__nontemporal*",
            "atomic",
            "atomic_ref",
            "atomic_thread_fence",
            "atomicAdd*",
            "atomicAnd*",
            "atomicCAS*",
            "atomicDec*",
            "atomicExch*",
            "atomicInc*",
            "atomicMax*",
            "atomicMin*",
            "atomicOr*",
            "atomicSub*",
            "atomicXor*",
        ],
        may: |path| is_port(path) || is_mma(path),
        place: "iris/port*.h and iris/mma*.h",
    },
    Confined {
        // A kernel calls the protocols (enter, credit, push_signal, wait_tile, finish), which a
        // model has checked; a word of symmetric memory it touches itself would be checked by
        // nobody. Every operation that iris/sym.h gives SymWord is listed here.
        what: "an operation on a SymWord",
        words: &[
            "sym_load",
            "sym_store",
            "sym_add",
            "sym_exchange",
            "sym_compare_exchange",
            "sym_and",
            "sym_or",
            "sym_xor",
            "sym_min",
            "sym_max",
            "sym_fence",
            "sym_wait",
        ],
        may: |path| path.starts_with("iris/") && path.ends_with(".h"),
        place: "iris/*.h",
    },
];

fn is_port(path: &str) -> bool {
    path.starts_with("iris/port") && path.ends_with(".h")
}

fn is_mma(path: &str) -> bool {
    path.starts_with("iris/mma") && path.ends_with(".h")
}

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.files().iter().filter(|file| file.is_device()) {
        let Some(path) = file.path.strip_prefix(KERNELS) else { continue };
        let rules: Vec<_> = RULES.iter().filter(|rule| !(rule.may)(path)).collect();
        for (line, word) in file.identifiers() {
            let broken = rules.iter().filter(|rule| rule.words.iter().any(|it| is(it, &word)));
            findings.extend(broken.map(|rule| {
                let message = format!("{word}: {} belongs into {}", rule.what, rule.place);
                Finding::new(&file.path, line, message)
            }));
        }
    }
    findings
}

fn is(listed: &str, word: &str) -> bool {
    match listed.strip_suffix('*') {
        Some(beginning) => word.starts_with(beginning),
        None => listed == word,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::found;

    /// The lines found where a device source of this path holds this text.
    fn lines(path: &str, text: &str) -> Vec<String> {
        let path = format!("{KERNELS}{path}");
        let found = found(check, &[(&path, text)]);
        found.iter().map(|it| it.replace(&format!("{path}:"), "")).collect()
    }

    const VENDOR: &str =
        "#ifdef __CUDA_ARCH__\n#elif defined(__HIPCC_RTC__)\n__nv_bfloat16 x;\n#endif";
    const RAW: &str =
        "// volatile\nasm(\"\");\natomicAdd_system(p, 1);\n__threadfence();\n__hip_atomic_load(p);";

    #[test]
    fn vendors_stay_in_the_port() {
        assert_eq!(lines("all_reduce.cu", VENDOR), ["1", "2", "3"]);
        assert_eq!(lines("iris/tile.h", VENDOR), ["1", "2", "3"]);
        assert!(lines("iris/port.h", VENDOR).is_empty());
        assert!(lines("iris/port_cuda.h", VENDOR).is_empty());
        assert!(!lines("port_cuda.h", VENDOR).is_empty());
        assert!(lines("iris/mma_sm90.h", VENDOR).is_empty());
    }

    #[test]
    fn raw_atomics_stay_in_the_port() {
        // The last line is a vendor's function besides.
        assert_eq!(lines("iris/sync.h", RAW), ["2", "3", "4", "5"]);
        assert_eq!(lines("mma_sm90.h", RAW), ["2", "3", "4", "5"]);
        assert!(lines("iris/port.h", RAW).is_empty());
        assert!(lines("iris/mma.h", RAW).is_empty());
    }

    #[test]
    fn a_kernel_touches_no_symmetric_word_itself() {
        let text = "void f() {\n  sym_store(word, 1);\n}";
        assert_eq!(lines("all_reduce.cu", text), ["2"]);
        assert_eq!(lines("helper.h", text), ["2"]);
        assert!(lines("iris/sync.h", text).is_empty());
    }

    #[test]
    fn names_that_only_look_alike_pass() {
        let text = "int asmx; int atomics; int sym_loader; my_volatile(); \"asm\"; // __nv_x";
        assert!(lines("all_reduce.cu", text).is_empty());
    }
}
