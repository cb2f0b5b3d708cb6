//! Products of vendors' libraries, for where nothing is fused into a product.
//!
//! **Problem.** A library's product is tuned for every shape there is, and is the bar for ours. Where
//! the library is installed, a product with nothing in it to fuse should be its product.
//!
//! **Solution.** The library is looked for when it is first needed, and its functions are called by
//! name: [`Blas`]. It is asked for an algorithm when a product is prepared, by its heuristic and under
//! a stated workspace; nothing is timed. The first call of a problem describes it to the library; each later
//! call only enqueues, allocates nothing and may be captured in a graph, as the first may be.
//!
//! **Running.** A [`Product`] is of one [`Problem`]. [`Prepared`] has the algorithms of an operator
//! whose rows, layouts and alignment change from call to call. To a product may be added a bias, which is
//! a row, and an addend, which is a matrix like the result.
//!
//! cuBLASLt and hipBLASLt have the same functions, each under its own names and with its own numbers:
//! one code calls both, and a [`Dialect`] has the names and numbers.
//!
//! **Limits.** GELU is left to our kernels: the library's is the
//! approximation by tanh, and ours is by erf. So is a result that is stored column by column. hipBLASLt has
//! never been called on a device, but by tests over a library of our own with its interface.

mod blas;
mod dialect;
mod prepared;
mod problem;

use std::path::{Path, PathBuf};

use iris_heap::BackendKind;

use crate::rtc::search;

pub use blas::{Algorithm, Blas, Multiplier, Product};
pub use dialect::Dialect;
pub use prepared::Prepared;
pub use problem::{Addresses, Layout, Problem};

/// What goes wrong with a vendor's library of products.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The library is nowhere.
    #[error("{what} is not there; expected it as {}: install it, or name it by its variable (`iris doctor --verbose`)", looked.join(", "))]
    NotFound {
        /// Which library.
        what: &'static str,
        /// Every place that was looked at, in order, and what was wrong with it if it was there.
        looked: Vec<String>,
    },
    /// There is none for this kind of device.
    #[error("no library of products is called on {kind}, expected cuda or hip: use Library::None")]
    None {
        /// Which kind.
        kind: BackendKind,
    },
    /// The library is of a release whose numbers are not known here.
    #[error(
        "{library} is older than expected, {oldest}: install a later one, or use Library::Ours"
    )]
    TooOld {
        /// The library and its version.
        library: String,
        /// The oldest version.
        oldest: String,
    },
    /// A function of the library failed.
    #[error(
        "{function}: {name} ({code}), expected success; `iris doctor` says which library is there"
    )]
    Call {
        /// Its name.
        function: String,
        /// What it returned.
        code: i32,
        /// The library's name for that.
        name: String,
    },
    /// The library multiplies no such matrices.
    #[error(
        "{library} has no algorithm for {problem}, expected one: use Library::Ours or a variant that multiplies itself"
    )]
    NoAlgorithm {
        /// The library and its version.
        library: String,
        /// What was asked of it.
        problem: String,
    },
}

/// What functions of vendors' libraries return.
pub type Result<T> = std::result::Result<T, Error>;

/// The functions of a C library that are called, by name; what all names of the library begin with is given
/// when it is loaded. The struct keeps the library.
#[macro_export]
#[doc(hidden)]
macro_rules! __library {
    ($table:ident, $($name:ident($($arg:ty),* $(,)?) -> $ret:ty;)*) => {
        /// The functions, as the vendor's header declares them.
        #[allow(non_snake_case)]
        pub(super) struct $table {
            $($name: unsafe extern "C" fn($($arg),*) -> $ret,)*
            /// Never called: keeps the functions.
            _library: libloading::Library,
        }

        impl $table {
            #[allow(non_snake_case)]
            pub(super) fn of(
                library: libloading::Library,
                prefix: &str,
            ) -> ::std::result::Result<$table, String> {
                $(
                    let name = format!("{prefix}{}", stringify!($name));
                    // SAFETY: the type is that of the vendor's header.
                    let symbol = unsafe {
                        library.get::<unsafe extern "C" fn($($arg),*) -> $ret>(name.as_bytes())
                    };
                    let $name = *symbol.map_err(|why| format!("it has no {name}: {why}"))?;
                )*
                Ok($table { $($name,)* _library: library })
            }
        }
    };
}
#[doc(hidden)]
pub use __library as library;

/// What opens first of a library whose files are named `name`, a version behind it:
/// where `variable` says, else in `folders`, else as `bare` where the loader looks.
///
/// # Errors
/// [`Error::NotFound`] says where it was looked for.
pub fn find<T>(
    (what, variable): (&'static str, &str),
    folders: &[PathBuf],
    (name, bare): (&str, &[&str]),
    open: impl Fn(&Path) -> std::result::Result<T, String>,
) -> Result<T> {
    search::first(variable, folders, bare, |file| file.starts_with(name), open)
        .map_err(|looked| Error::NotFound { what, looked })
}

/// The folders of CUDA's toolkits, and of `wheels` among Python's packages.
pub fn cuda_folders(wheels: &[&str]) -> Vec<PathBuf> {
    search::cuda_folders(wheels)
}

/// The folder of the HIP runtime that this process has loaded, if it has: libraries beside it use it.
pub fn hip_folders() -> Vec<PathBuf> {
    search::loaded(HIP_RUNTIME).iter().filter_map(|file| Some(file.parent()?.into())).collect()
}

/// What the name of HIP's runtime begins with.
const HIP_RUNTIME: &str = "libamdhip64.so";

/// Loads a library of a vendor's.
///
/// # Errors
/// Why it does not load; or that it brings a HIP runtime of its own, as Python's packages do, for which the
/// streams and the memory of the one that is loaded already are nothing.
#[allow(unsafe_code, reason = "a library is loaded")]
pub fn open(file: &Path) -> std::result::Result<libloading::Library, String> {
    let before = search::loaded(HIP_RUNTIME);
    // SAFETY: the vendor's library is made to be loaded by any program.
    let library = unsafe { libloading::Library::new(file) }.map_err(|error| error.to_string())?;
    let mut more = search::loaded(HIP_RUNTIME).into_iter();
    match more.find(|runtime| !before.is_empty() && !before.contains(runtime)) {
        Some(other) => Err(format!("it brings a HIP runtime of its own, {}", other.display())),
        None => Ok(library),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_says_where_it_was_looked_for() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("libnothing.so.1");
        std::fs::write(&file, "no library").expect("room");
        let names = ("nothing (libnothing.so)", "IRIS_NO_SUCH_VARIABLE");
        let open = |_: &Path| Err::<(), _>("it does not open".to_string());
        let folders = [folder.path().to_path_buf()];
        let error = find(names, &folders, ("libnothing.so", &["libnothing.so"]), open);
        let text = error.expect_err("there is none").to_string();
        assert!(text.starts_with("nothing (libnothing.so) is not there"), "{text}");
        assert!(text.contains(&format!("{} (it does not open)", file.display())), "{text}");
        assert!(text.ends_with("libnothing.so (it does not open)"), "{text}");
    }
}
