//! Resources that a kernel needs of an AMD compute unit, as the compiler records them in the code
//! object.

use std::fmt;

/// Resources of one kernel in one build.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Resources {
    /// Name of the kernel's entry.
    pub kernel: String,
    /// Name of the source file, with the tile and element type of a GEMM.
    pub build: String,
    /// Number of vector registers, including those that accumulate matrix products.
    pub vgprs: u32,
    /// Number of scalar registers.
    pub sgprs: u32,
    /// Number of vector registers spilled to memory; expected: 0.
    pub vgpr_spills: u32,
    /// Number of scalar registers spilled to lanes of vector registers.
    pub sgpr_spills: u32,
    /// Shared memory of a workgroup in bytes.
    pub lds: u32,
    /// Private memory of each thread in bytes.
    pub scratch: u32,
    /// Size of the code in bytes, without the functions that it calls.
    pub code: u32,
    /// Number of waves that fit on a SIMD unit, as the compiler counts them; at most 8.
    pub waves: u32,
}

/// Reads the resources of every kernel from the compiler's assembly, which contains the metadata of
/// the code object.
pub(super) fn read(assembly: &str) -> Vec<Resources> {
    let Some((code, metadata)) = assembly.split_once("amdhsa.kernels:") else { return Vec::new() };
    let kernels = metadata.split("\n  - ").skip(1).map(|entry| {
        let text = |field: &str| {
            let line = entry.lines().find_map(|line| line.trim().strip_prefix(field));
            line.unwrap_or_default().trim().to_string()
        };
        let number = |field: &str| text(field).parse().unwrap_or(u32::MAX);
        let kernel = text(".name:");
        // The compiler's comments on a kernel follow its code, up to the next function.
        let own = code.split_once(&format!("\n{kernel}:")).map_or("", |(_, rest)| rest);
        let own = own.split("; -- Begin function").next().unwrap_or_default();
        let comment = |what: &str| {
            let line = own.lines().find_map(|line| line.trim().strip_prefix(what));
            line.and_then(|number| number.trim().parse().ok()).unwrap_or(u32::MAX)
        };
        Resources {
            build: String::new(),
            vgprs: number(".vgpr_count:"),
            sgprs: number(".sgpr_count:"),
            vgpr_spills: number(".vgpr_spill_count:"),
            sgpr_spills: number(".sgpr_spill_count:"),
            lds: number(".group_segment_fixed_size:"),
            scratch: number(".private_segment_fixed_size:"),
            code: comment("; codeLenInByte ="),
            waves: comment("; Occupancy:"),
            kernel,
        }
    });
    kernels.filter(|kernel| !kernel.kernel.is_empty()).collect()
}

/// Limit of private memory per thread in bytes, for registers saved by called functions. Faults
/// exceed it: a private copy of the kernel arguments needs 1456 bytes, sums in an array indexed by
/// a variable need 256.
const MOST_SCRATCH: u32 = 64;

impl Resources {
    /// Reason why the kernel is not acceptable: spills, or too much private memory. `None` if the
    /// kernel is acceptable.
    pub(super) fn wrong(&self) -> Option<String> {
        let Self { kernel, vgpr_spills, scratch, .. } = self;
        (*vgpr_spills != 0 || *scratch > MOST_SCRATCH).then(|| {
            format!("{kernel}: {vgpr_spills} vector registers spilled, {scratch} bytes of scratch")
        })
    }
}

impl fmt::Display for Resources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, build, vgprs, sgprs, vgpr_spills, sgpr_spills, .. } = self;
        let Self { lds, scratch, code, waves, .. } = self;
        write!(
            f,
            "{build:40} {kernel:20} vgpr {vgprs:3} spilled {vgpr_spills} sgpr {sgprs:3} spilled \
             {sgpr_spills:3} lds {lds:5} scratch {scratch:2} code {code:5} waves {waves}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASSEMBLY: &str = "\n; -- Begin function iris_a\niris_a: ; @iris_a\n\ts_endpgm\n\
        ; codeLenInByte = 120\n; Occupancy: 3\n; -- Begin function f\nf:\n; codeLenInByte = 8\n\
        \t.amdgpu_metadata\n---\namdhsa.kernels:\n  - .agpr_count:     0\n    .args:\n\
        \x20     - .offset:         0\n    .group_segment_fixed_size: 20480\n    .name:           iris_a\n\
        \x20   .private_segment_fixed_size: 1472\n    .sgpr_count:     106\n    .sgpr_spill_count: 5\n\
        \x20   .vgpr_count:     151\n    .vgpr_spill_count: 0\n";

    #[test]
    fn the_metadata_of_a_code_object_is_read() {
        let found = read(ASSEMBLY);
        let expected = Resources {
            kernel: "iris_a".into(),
            build: String::new(),
            vgprs: 151,
            sgprs: 106,
            vgpr_spills: 0,
            sgpr_spills: 5,
            lds: 20480,
            scratch: 1472,
            code: 120,
            waves: 3,
        };
        assert_eq!(found, [expected]);
        assert!(found[0].wrong().is_some_and(|wrong| wrong.contains("1472")), "{found:?}");
        assert_eq!(Resources { scratch: 16, ..found[0].clone() }.wrong(), None);
    }
}
