use std::path::PathBuf;

/// Result of the run-time compilation functions.
pub type Result<T> = std::result::Result<T, Error>;

/// Error of a compilation of device source.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The compiler library was not found.
    #[error("{what} is not there; looked for it as {}", looked.join(", "))]
    NotFound {
        /// Name of the library.
        what: &'static str,
        /// Places that were searched, in order, each with its problem if the library was there.
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
        /// Name of the source.
        source_name: String,
        /// Architecture.
        arch: String,
        /// Options for compiling it.
        options: String,
        /// Folder of compiled kernels, which may not exist.
        folder: PathBuf,
        /// Reason why it cannot be compiled: the error of the missing or outdated compiler.
        no_compiler: String,
    },
    /// A function of the compiler library failed.
    #[error("{function}: {name} ({code})")]
    Call {
        /// Name of the function.
        function: String,
        /// Code that it returned.
        code: i32,
        /// The library's name of the code.
        name: String,
    },
    /// A source does not compile.
    #[error("{source_name} for {arch} does not compile:\n{log}")]
    Compile {
        /// Name of the source.
        source_name: String,
        /// Architecture.
        arch: String,
        /// Log of the compiler.
        log: String,
    },
    /// The compiler is too old for an architecture; calling it anyway would abort the process.
    #[error("{compiler} does not know {arch}, and {instead}")]
    Architecture {
        /// Compiler, with its release.
        compiler: String,
        /// Architecture.
        arch: String,
        /// Reason why no other compiler was used.
        instead: String,
    },
    /// A file for the compiler cannot be written.
    #[error("{}, for the compiler: {why}", path.display())]
    File {
        /// Path of the file or folder.
        path: PathBuf,
        /// The system's error.
        why: String,
    },
    /// A text contains a zero byte, which the compilers do not accept.
    #[error("{what} has a zero byte in it")]
    ZeroByte {
        /// Name of the text.
        what: String,
    },
    /// The cache folder cannot be used.
    #[error("cache of kernels {}: {why}", path.display())]
    Cache {
        /// Path of the folder or file.
        path: PathBuf,
        /// Description of the problem, and of what was expected.
        why: String,
    },
}
