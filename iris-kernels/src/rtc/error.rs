use std::path::PathBuf;

/// What rtc functions return.
pub type Result<T> = std::result::Result<T, Error>;

/// What goes wrong between a source and its machine code.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The compiler's library is nowhere.
    #[error("{what} is not there; expected it as {}: install it, or name it by its variable (`iris doctor --verbose`)", looked.join(", "))]
    NotFound {
        /// Which library.
        what: &'static str,
        /// Every place that was looked at, in order, and what was wrong with it if it was there.
        looked: Vec<String>,
    },
    /// A kernel of an operator is not among those that the program carries with it, and cannot be compiled here.
    #[error(
        "{source_name} for {arch} ({options}) is not in {}, and cannot be compiled: {no_compiler}. Make the folder on a \
         machine with a compiler, with `iris kernels --arch {arch} --out FOLDER`, which leaves out kernels that are \
         traced, counted or held up by a test",
        folder.display()
    )]
    NotCarried {
        /// The source's name.
        source_name: String,
        /// The architecture.
        arch: String,
        /// Options that it would be compiled with.
        options: String,
        /// The folder of compiled kernels, which may not exist.
        folder: PathBuf,
        /// Why it cannot be compiled: the error of the compiler that is missing or too old.
        no_compiler: String,
    },
    /// A function of the library failed.
    #[error(
        "{function}: {name} ({code}), expected success; `iris doctor` says which compiler is there"
    )]
    Call {
        /// Its name.
        function: String,
        /// What it returned.
        code: i32,
        /// The library's name for that.
        name: String,
    },
    /// A source does not compile.
    #[error(
        "{source_name} for {arch} was expected to compile; mend what the compiler says:\n{log}"
    )]
    Compile {
        /// The source's name.
        source_name: String,
        /// The architecture.
        arch: String,
        /// The compiler's log.
        log: String,
    },
    /// The compiler is too old for an architecture: it would not say so, but end the process.
    #[error(
        "{compiler} does not know {arch}, expected one that does, and {instead}: install a later one"
    )]
    Architecture {
        /// The compiler, with its release.
        compiler: String,
        /// The architecture.
        arch: String,
        /// Why nothing else compiles for it.
        instead: String,
    },
    /// A file for the compiler cannot be written.
    #[error("{}, expected to be writable for the compiler: {why}; free space there, or set TMPDIR", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        why: String,
    },
    /// A text has a zero byte in it, which the compilers cannot take.
    #[error("{what} has a zero byte in it, expected none: take it out")]
    ZeroByte {
        /// Which text.
        what: String,
    },
    /// The cache folder cannot be used.
    #[error("cache of kernels {}: {why}; IRIS_CACHE names another folder", path.display())]
    Cache {
        /// The folder or file.
        path: PathBuf,
        /// What is wrong with it, and what was expected.
        why: String,
    },
}
