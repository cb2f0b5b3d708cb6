//! clang as an external program, for AMD's architectures. It compiles kernels ahead of time on a
//! machine without ROCm, and is used if hiprtc is missing or too old for the device.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Error, KernelSource, Result};

/// Program clang on this machine, with its version.
#[derive(Debug)]
pub(super) struct Clang {
    program: PathBuf,
    pub(super) version: (i32, i32),
}

/// Names of clang programs in the order in which they are tried. The first is the version for which
/// this project's checks of compiled code are written, the last is the clang of ROCm.
const NAMES: [&str; 5] = ["clang-19", "clang-20", "clang-21", "clang", "/opt/rocm/llvm/bin/clang"];

impl Clang {
    /// Finds the first clang, in the order of [`NAMES`], that can compile for AMD's devices.
    pub(super) fn find() -> Result<Self> {
        let mut looked = Vec::new();
        for name in NAMES {
            let output = |argument: &str| {
                let mut command = Command::new(name);
                let output = command.arg(argument).stdin(Stdio::null()).output();
                output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
            };
            match output("--version").and_then(|version| Ok((version, output("-print-targets")?))) {
                Err(error) => looked.push(format!("{name} ({error})")),
                Ok((version, targets)) => match version_of(&version) {
                    Some(version) if targets.contains("amdgcn") => {
                        return Ok(Self { program: name.into(), version });
                    }
                    _ => looked.push(format!("{name} (it has no target amdgcn)")),
                },
            }
        }
        Err(Error::NotFound { what: "clang for AMD's architectures", looked })
    }

    /// Takes this program for clang.
    #[cfg(test)]
    pub(super) fn at(program: &str) -> Self {
        Self { program: program.into(), version: (0, 0) }
    }

    pub(super) fn program(&self) -> &Path {
        &self.program
    }

    /// Compiles a source, which may include `headers`, into a code object.
    pub(super) fn compile(
        &self,
        source: KernelSource<'_>,
        headers: &[KernelSource<'_>],
        options: &[String],
        arch: &str,
    ) -> Result<Vec<u8>> {
        let folder = Folder::new()?;
        for text in headers.iter().chain([&source]) {
            folder.write(text)?;
        }
        let made = folder.0.join("code.o");
        let mut command = Command::new(&self.program);
        command.args(["-x", "hip", "-nogpuinc", "-nogpulib", "--cuda-device-only"]);
        // Without this option, clang bundles the output for several architectures by an extra
        // program that some installations do not have.
        command.arg("--no-gpu-bundle-output").args(options).arg("-I").arg(&folder.0);
        command.arg("-o").arg(&made).arg(folder.0.join(source.name)).stdin(Stdio::null());
        let failed = |log: String| Error::Compile {
            source_name: source.name.into(),
            arch: arch.into(),
            log: format!("{}: {log}", self.program.display()),
        };
        let output = command.output().map_err(|error| failed(error.to_string()))?;
        if !output.status.success() {
            return Err(failed(String::from_utf8_lossy(&output.stderr).trim_end().into()));
        }
        fs::read(&made).map_err(|error| failed(error.to_string()))
    }
}

/// Parses major and minor version from `clang version 19.1.7 (...)`, with any vendor's text before
/// it.
fn version_of(text: &str) -> Option<(i32, i32)> {
    let number = text.split_once("clang version ")?.1;
    let mut parts = number.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Temporary folder with access for this user only, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Self> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        loop {
            let number = COUNT.fetch_add(1, Ordering::Relaxed);
            let name = format!("iris-clang-{}-{number}", std::process::id());
            let path = std::env::temp_dir().join(name);
            match fs::DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Self(path)),
                // The folder was left by a killed process with this id, or belongs to another user,
                // so this process must not remove it.
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(wrong(&path, &error)),
            }
        }
    }

    fn write(&self, text: &KernelSource<'_>) -> Result<()> {
        let file = self.0.join(text.name);
        let folder = file.parent().unwrap_or(&self.0);
        let written = fs::create_dir_all(folder).and_then(|()| fs::write(&file, text.text));
        written.map_err(|error| wrong(&file, &error))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn wrong(path: &Path, error: &std::io::Error) -> Error {
    Error::File { path: path.into(), why: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_whoever_built_it() {
        let debian = "Debian clang version 19.1.7 (3~deb12u1)\nTarget: x86_64";
        let amd = "AMD clang version 17.0.0 (https://github.com/RadeonOpenCompute/llvm-project)";
        assert_eq!(version_of(debian), Some((19, 1)));
        assert_eq!(version_of(amd), Some((17, 0)));
        assert_eq!(version_of("gcc 12"), None);
    }

    #[test]
    fn a_folder_that_is_there_already_stays() {
        let path = |number| {
            std::env::temp_dir().join(format!("iris-clang-{}-{number}", std::process::id()))
        };
        let there: Vec<_> =
            (0..64).filter(|&number| fs::create_dir(path(number)).is_ok()).collect();
        let folder = Folder::new().expect("room");
        assert!(there.iter().all(|&number| path(number) != folder.0));
        for number in there {
            fs::remove_dir(path(number)).expect("another program's folder is gone");
        }
    }

    #[test]
    fn a_folder_goes_with_whoever_made_it() {
        let folder = Folder::new().expect("room");
        let path = folder.0.clone();
        folder.write(&KernelSource { name: "iris/a.h", text: "x" }).expect("room");
        assert_eq!(fs::read_to_string(path.join("iris/a.h")).expect("written"), "x");
        drop(folder);
        assert!(!path.exists());
    }
}
