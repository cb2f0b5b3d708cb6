//! Memory that the host can still give to this process.

use std::fs::read_to_string;
use std::path::Path;

/// Available and total memory of the host in bytes; `None` if the system does not report it.
pub fn of_host() -> Option<(u64, u64)> {
    let info = read_to_string("/proc/meminfo").ok()?;
    let field = |name: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
    };
    Some((field("MemAvailable:")?, field("MemTotal:")?))
}

/// Available memory in bytes of the control group of this process, or of one above it, and the limit of
/// that group; `None` if none has a limit, and for version 1 of control groups.
pub fn of_group() -> Option<(u64, u64)> {
    let groups = read_to_string("/proc/self/cgroup").ok()?;
    // Only version 2 has a line of this form.
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    smallest_of_groups(Path::new("/sys/fs/cgroup"), Path::new(path))
}

/// [`of_group`] for the group `path` in the file system of groups at `root`.
fn smallest_of_groups(root: &Path, path: &Path) -> Option<(u64, u64)> {
    let group = |path: &Path| {
        let folder = root.join(path);
        let number =
            |file: &str| read_to_string(folder.join(file)).ok()?.trim().parse::<u64>().ok();
        // A group without a limit has the text `max` there, and the root group has no such file.
        let limit = number("memory.max")?;
        let parts = read_to_string(folder.join("memory.stat")).unwrap_or_default();
        // The system gives up these parts of the memory in use for new allocations.
        let reclaimable = parts.lines().filter_map(|line| {
            let (name, bytes) = line.split_once(' ')?;
            let is_one = ["inactive_file", "active_file", "slab_reclaimable"].contains(&name);
            bytes.parse::<u64>().ok().filter(|_| is_one)
        });
        let used = number("memory.current")?.saturating_sub(reclaimable.sum());
        Some((limit.saturating_sub(used), limit))
    };
    path.ancestors().filter_map(group).min()
}

/// Bytes of memory that this process can still get; `None` if the system does not report it.
pub fn available() -> Option<u64> {
    of_host().into_iter().chain(of_group()).map(|(free, _)| free).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_group_counts() {
        let root = tempfile::tempdir().unwrap();
        let pod = root.path().join("pod");
        std::fs::create_dir_all(pod.join("box/inner")).unwrap();
        let write = |file: &str, text: &str| std::fs::write(pod.join(file), text).unwrap();
        assert_eq!(smallest_of_groups(root.path(), Path::new("pod/box")), None);
        write("memory.max", "1000\n");
        write("memory.current", "700\n");
        write("memory.stat", "anon 500\ninactive_file 100\nactive_file 30\nslab_reclaimable 20\n");
        write("box/memory.max", "max\n");
        write("box/memory.current", "300\n");
        assert_eq!(smallest_of_groups(root.path(), Path::new("pod/box/inner")), Some((450, 1000)));
        write("box/memory.max", "350\n");
        assert_eq!(smallest_of_groups(root.path(), Path::new("pod/box/inner")), Some((50, 350)));
    }

    #[test]
    fn the_host_has_memory() {
        assert!(available().is_some_and(|bytes| bytes > 1 << 20));
    }
}
