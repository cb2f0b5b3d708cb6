#[cfg(test)]
mod texts;

use std::path::PathBuf;

/// Result of the run-time compilation functions.
pub type Result<T> = std::result::Result<T, Error>;

/// Error of compiling device source, or of keeping the compiled code.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The compiler library was not found.
    #[error(
        "{what} is not there; expected it as {}: install it, or name it by its variable (`iris doctor --verbose`)",
        places(looked)
    )]
    NotFound {
        /// Name of the compiler library that was searched.
        what: &'static str,
        /// Places that were searched, in order, each with the reason why the library there was not
        /// used.
        looked: Vec<String>,
    },
    /// A kernel of an operator is neither shipped with the program nor can it be compiled here.
    #[error(
        "{source_name} for {arch} ({options}) is not in {}, and cannot be compiled: {no_compiler}. Make the folder on a \
         machine with a compiler, with `iris kernels --arch {arch} --out FOLDER`, which leaves out kernels that are \
         traced, counted or held up by a test",
        folder.display()
    )]
    NotCarried {
        /// Name of the source file.
        source_name: String,
        /// Architecture for which the kernel is needed.
        arch: String,
        /// Options for compiling the kernel.
        options: String,
        /// Folder of compiled kernels, which may not exist.
        folder: PathBuf,
        /// Reason why the kernel cannot be compiled: the error for the missing or outdated
        /// compiler.
        no_compiler: String,
    },
    /// A function of the compiler library failed.
    #[error(
        "{function}: {name} (code {code}), expected success; `iris doctor` says which compiler is there"
    )]
    Call {
        /// Name of the function.
        function: String,
        /// Error code that the function returned.
        code: i32,
        /// Name that the library gives the error code.
        name: String,
    },
    /// A source does not compile.
    #[error(
        "{source_name} for {arch} was expected to compile; mend what the compiler says:\n{log}"
    )]
    Compile {
        /// Name of the source file.
        source_name: String,
        /// Architecture for which the source was compiled.
        arch: String,
        /// Text of the compiler's log.
        log: String,
    },
    /// The compiler is too old for an architecture. It was not called, because it would abort the
    /// process.
    #[error(
        "{compiler} does not support {arch}, expected one that does, and {instead}: install a later one"
    )]
    Architecture {
        /// Name of the compiler, with its release.
        compiler: String,
        /// Architecture that the compiler does not support.
        arch: String,
        /// Reason why no other compiler was used instead.
        instead: String,
    },
    /// A file for the compiler cannot be written.
    #[error("{}, expected to be writable for the compiler: {why}; free space there, or set TMPDIR", path.display())]
    File {
        /// Path of the file or folder.
        path: PathBuf,
        /// Error of the operating system.
        why: String,
    },
    /// A text contains a zero byte, which the compilers do not accept.
    #[error("{what} contains a zero byte, expected none: take it out")]
    ZeroByte {
        /// Name of the text that contains the zero byte.
        what: String,
    },
    /// The cache folder cannot be used.
    #[error("cache of kernels {}: {why}: correct that, or name another folder (IRIS_CACHE, or --out of `iris kernels`)", path.display())]
    Cache {
        /// Path of the folder or file.
        path: PathBuf,
        /// Description of the problem, and of what was expected.
        why: String,
    },
}

/// Formats the places that were searched for a library, for an error text: only the last two, which
/// are names given to the system's loader, and the number of all places.
pub(crate) fn places(looked: &[String]) -> String {
    let last = looked[looked.len().saturating_sub(2)..].join(" or ");
    if looked.len() > 2 { format!("{last} (places searched: {})", looked.len()) } else { last }
}
