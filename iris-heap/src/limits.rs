//! Operating-system limits that error messages mention.

use rustix::io::Errno;

use crate::system::Limit;

/// Whether an error means that the process or the system has run out of file descriptors or kernel
/// memory.
pub(crate) fn is_full(error: &std::io::Error) -> bool {
    let code = Errno::from_io_error(error);
    code.is_some_and(|c| [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM].contains(&c))
}

/// Text of a system error, with advice on what to do if there is any.
pub(crate) fn explain(error: &std::io::Error) -> String {
    use std::io::ErrorKind;
    let advice = match (Errno::from_io_error(error), error.kind()) {
        (Some(Errno::MFILE), _) => {
            return format!("{error}; the limit is {}: raise it with `ulimit -n`", open_files());
        }
        (Some(Errno::NFILE), _) => "; the system has too many open files: close some",
        (Some(Errno::PERM), _) => "; a policy of the system or of the container may forbid it",
        (_, ErrorKind::PermissionDenied) => "; see who owns it, and its permissions",
        (_, ErrorKind::OutOfMemory) => {
            let limit = Limit::AddressSpace.value().map_or(String::new(), |limit| {
                format!(", or raise the limit of this process's addresses, {limit} bytes, with `ulimit -v`")
            });
            return format!("{error}; free memory, or open a smaller heap{limit}");
        }
        (_, ErrorKind::StorageFull) => "; free space there",
        _ => "",
    };
    format!("{error}{advice}")
}

/// This process's limit of open files, as text.
pub(crate) fn open_files() -> String {
    Limit::OpenFiles.value().map_or("none".into(), |limit| limit.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_by_policy_is_not_one_by_permissions() {
        let text = |code: Errno| explain(&std::io::Error::from_raw_os_error(code.raw_os_error()));
        assert!(text(Errno::PERM).contains("a policy of the system or of the container"));
        assert!(text(Errno::ACCESS).contains("its permissions"));
    }

    /// Tests that each limit is the one that its shell command sets. The test runs itself with four
    /// different limits set, because limits that are not set all have the same value.
    #[test]
    fn limits_are_those_that_the_shell_sets() {
        const SHOW: &str = "HEAP_TEST_LIMITS";
        if std::env::var_os(SHOW).is_some() {
            let all = [Limit::OpenFiles, Limit::FileSize, Limit::AddressSpace, Limit::LockedMemory];
            println!("limits {:?}", all.map(Limit::value));
            return;
        }
        let text = "ulimit -n 123 && ulimit -f 40000 && ulimit -v 8000000 && ulimit -l 32 && exec \"$0\" \"$@\"";
        let mut shell = std::process::Command::new("/bin/sh");
        shell.args(["-c", text]).arg(std::env::current_exe().unwrap()).env(SHOW, "1");
        let name = "limits::tests::limits_are_those_that_the_shell_sets";
        let output = shell.args(["--exact", name, "--nocapture"]).output().unwrap();
        let shown = String::from_utf8_lossy(&output.stdout);
        // The shell counts files in blocks of 512 bytes, memory in KiB.
        let expected = [123, 40_000 * 512, 8_000_000 << 10, 32 << 10].map(Some::<u64>);
        assert!(shown.contains(&format!("limits {expected:?}")), "{shown}");
    }
}
