//! What is asked of a product of whole matrices: whose it is, of what, and what a call keeps.

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

/// Lines of what is kept begin at multiples of so many elements.
const KEPT_LINE: usize = 8;

/// What a call keeps in its workspace behind the library's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kept {
    /// Nothing.
    Nothing,
    /// This rank's partial, which a message sends.
    Partial,
    /// A, which a message gathers from all ranks.
    Gathered,
    /// The rows of C of all ranks, as they come.
    Rows,
    /// This rank's partial, and of its rows what so many ranks send.
    Blocks {
        /// How many.
        ranks: usize,
    },
    /// The same, and the sums of all ranks, as they come.
    Sums {
        /// How many.
        ranks: usize,
        /// Type of C.
        output: DType,
    },
}

impl Whole {
    /// Bytes of workspace of the library, which come first: behind them lies what is kept.
    pub fn library_bytes(&self) -> u64 {
        match self.library {
            Library::Auto | Library::Vendor => library_workspace(self.backend).unwrap_or(0),
            Library::Ours | Library::None => 0,
        }
    }

    /// Bytes that a call needs: the workspace of the library, and what is kept behind it.
    pub fn memory(&self, kept: Kept) -> u64 {
        let [m, n, k] = self.shape;
        let matrix = |rows: usize, cols, dtype: DType| {
            ((Self::line(cols) * dtype.size()) as u64).saturating_mul(rows as u64)
        };
        // Of each rank as much as the largest part.
        let blocks = |ranks: usize| m.saturating_add(m.div_ceil(ranks) * ranks);
        let kept = match kept {
            Kept::Nothing => 0,
            Kept::Partial | Kept::Rows => matrix(m, n, self.output),
            Kept::Gathered => matrix(m, k, self.dtype),
            Kept::Blocks { ranks } => matrix(blocks(ranks), n, self.output),
            Kept::Sums { ranks, output } => {
                matrix(blocks(ranks), n, self.output).saturating_add(matrix(m, n, output))
            }
        };
        self.library_bytes().saturating_add(kept)
    }

    /// Elements from one line of what is kept to the next: whole vectors.
    pub fn line(len: usize) -> usize {
        len.next_multiple_of(KEPT_LINE)
    }
}
