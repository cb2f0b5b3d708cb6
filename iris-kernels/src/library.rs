//! A product of whole matrices that is asked for: whose it is, and of what.

use iris_heap::{BackendKind, DType};

use crate::target::library_workspace;

/// Whose product of whole matrices is used, where operands fit it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Library {
    /// Ours where it was measured to be faster than what the vendor's library chooses at once, else the
    /// vendor's, else ours.
    #[default]
    Auto,
    /// The vendor's where its library is there, else ours.
    Vendor,
    /// Ours.
    Ours,
    /// Nobody's: the kernels that operators are fused with multiply.
    None,
}

impl Library {
    /// All of them.
    pub const ALL: [Library; 4] = [Library::Auto, Library::Vendor, Library::Ours, Library::None];
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

/// A product of whole matrices that is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Whole {
    /// Whose.
    pub library: Library,
    /// On what.
    pub backend: BackendKind,
    /// Most rows, columns, depth.
    pub shape: [usize; 3],
    /// Rows of the largest of the calls that are done in this way, which may be fewer.
    pub rows: usize,
    /// Type of A and B.
    pub dtype: DType,
    /// Type of C, or of the partial.
    pub output: DType,
    /// Rows and columns of a tile of our kernel, for calls that do not fit the library.
    pub tile: (u32, u32),
    /// Rows and columns that have a signal, if it stores what others own to them itself, where there is a build
    /// for it.
    pub signalled: Option<[u32; 2]>,
    /// Whether a GEMM of ours may wait for the parts of A that engines bring, where there is a build for it.
    pub gated: bool,
    /// Whether a GEMM of ours may do the message of few rows, where there is a build for it.
    pub exchanges: bool,
}

impl Whole {
    /// Bytes of workspace of the library, which come first: behind them lie the [`Areas`](crate::program::Areas) of
    /// the program.
    pub fn library_bytes(&self) -> u64 {
        match self.library {
            Library::Auto | Library::Vendor => library_workspace(self.backend).unwrap_or(0),
            Library::Ours | Library::None => 0,
        }
    }
}
