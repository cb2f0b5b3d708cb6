//! Request for a whole-matrix GEMM: its shape, types, and the preferred library.

use iris_heap::{BackendKind, DType};
use serde::{Deserialize, Serialize};

use crate::target::library_workspace;

/// Choice of the implementation of whole-matrix GEMMs. Operands that no whole-matrix GEMM supports
/// are multiplied by the tile GEMM (the product of the fused kernels), whatever the choice.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Library {
    /// The built-in GEMM for shapes for which it was measured to be faster than the vendor's
    /// library. For other shapes the vendor's library, or the built-in GEMM if there is no vendor's
    /// library.
    #[default]
    Auto,
    /// The vendor's library if it is installed, otherwise the built-in GEMM.
    Vendor,
    /// The built-in GEMM, for every shape that it supports.
    Ours,
    /// No whole-matrix GEMM: operators use their own tile GEMM.
    None,
}

impl Library {
    /// All choices, in the order of the enum.
    pub const ALL: [Library; 4] = [Library::Auto, Library::Vendor, Library::Ours, Library::None];

    /// Whether the built-in GEMM may be fused with messages.
    pub fn may_fuse(self) -> bool {
        matches!(self, Library::Auto | Library::Ours)
    }
}

impl std::fmt::Display for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Library::Auto => "auto",
            Library::Vendor => "vendor",
            Library::Ours => "ours",
            Library::None => "none",
        })
    }
}

impl std::str::FromStr for Library {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let known = Self::ALL.into_iter().find(|library| library.to_string() == text);
        known.ok_or_else(|| format!("library is {text:?}, expected auto, vendor, ours or none"))
    }
}

/// Products for which the vendor's library was seen to have the bits of the built-in products in every row,
/// for every number of rows, both storage orders of B, with and without a bias, if it has no workspace and
/// so does not split K; and products that were compared in vain.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VendorBits {
    /// Name and version of the library.
    pub library: String,
    /// Name and architecture of the device, such as `NVIDIA H200 sm_90`: the library chooses its
    /// algorithms by the device.
    pub device: String,
    /// Element type of A, B and C.
    pub dtype: DType,
    /// Largest number of rows that was compared.
    pub rows: usize,
    /// N and K of each product.
    pub shapes: Vec<[usize; 2]>,
    /// N and K of products that were compared and have other bits.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other: Vec<[usize; 2]>,
    /// Origin of the row: device, commit, date.
    pub provenance: String,
}

impl VendorBits {
    /// Whether both rows are of the same library, device and type.
    pub fn is_of(&self, other: &VendorBits) -> bool {
        let of = |it: &VendorBits| (it.library.clone(), it.device.clone(), it.dtype);
        of(self) == of(other)
    }

    /// Removes the products that `newer`, a row of the same library, device and type, has.
    pub fn without(mut self, newer: &VendorBits) -> VendorBits {
        if self.is_of(newer) {
            let is_newer = |it: &[usize; 2]| newer.shapes.contains(it) || newer.other.contains(it);
            self.shapes.retain(|it| !is_newer(it));
            self.other.retain(|it| !is_newer(it));
        }
        self
    }
}

/// Request for a whole-matrix GEMM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GemmRequest {
    /// Implementation that is preferred.
    pub library: Library,
    /// Kind of device on which the GEMM runs.
    pub backend: BackendKind,
    /// Maximum values of m, n and k, for which the GEMM is prepared.
    pub shape: [usize; 3],
    /// Number of rows of the largest call that uses this GEMM. It may be smaller than the maximum m
    /// in `shape`.
    pub rows: usize,
    /// Element type of A and B.
    pub dtype: DType,
    /// Element type of C, or of the partial that is sent to other ranks.
    pub output: DType,
    /// Rows and columns of a tile of the tile GEMM, which multiplies if the library cannot do the
    /// call.
    pub tile: (u32, u32),
    /// Rows and columns of C per signal, for a GEMM that stores each tile to the rank that owns it;
    /// `None` for a GEMM that stores all tiles locally.
    pub signalled: Option<[u32; 2]>,
    /// Whether the built-in GEMM may wait, while it runs, for parts of A that copy engines deliver.
    /// It does so only if there is a build for it.
    pub gated: bool,
    /// Whether the built-in GEMM may also exchange the message of a call with few rows, in the same
    /// launch. It does so only if there is a build for it.
    pub exchanges: bool,
    /// Whether the bits of a row of C must not depend on the other rows of its call. The vendor's
    /// library is then used only for products in `vendor_bits`, and parts of ranks are added in the order
    /// of ranks.
    pub batch_invariant: bool,
    /// Products for which the library may be used where bits must not depend on the other rows.
    pub vendor_bits: &'static [VendorBits],
    /// Number of ranges of K whose products a whole-matrix GEMM adds in the order of K
    /// ([`crate::gemm::k_parts`]); 1 for one sum over all of K.
    pub k_parts: u32,
    /// Whether a kernel of the user that waits for the operator may occupy part of the device.
    pub beside: bool,
}

impl GemmRequest {
    /// Returns the number of bytes of workspace that the vendor's library needs. These bytes come
    /// first in the workspace, before the program's [`Areas`](crate::program::Areas).
    pub fn library_bytes(&self) -> u64 {
        match self.library {
            Library::Auto | Library::Vendor if !self.batch_invariant => {
                library_workspace(self.backend).unwrap_or(0)
            }
            _ => 0,
        }
    }
}
