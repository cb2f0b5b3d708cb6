//! Origin of a measurement: the machine, the commit and the day.

use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use iris_heap::BackendKind;
use serde_json::json;

/// Description of the host, for a record: CPU model and number of cores.
pub(super) fn device() -> serde_json::Value {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = info.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let model = field("model name").unwrap_or_else(|| std::env::consts::ARCH.into());
    json!({"cpu": model, "family": field("cpu family"), "model": field("model"), "cores": cores})
}

/// Text that says where a measurement comes from: device, commit (`given`, or the one that git
/// reports) and date.
pub(crate) fn provenance(backend: BackendKind, given: Option<String>) -> String {
    let gpu = match backend {
        kind if kind.traits().host_threads => None,
        kind => kind.devices().ok().and_then(|all| all.into_iter().next()),
    };
    let machine = gpu.map(|device| device.name).unwrap_or_else(|| {
        let host = device();
        format!("{}, {} cores", host["cpu"].as_str().unwrap_or_default(), host["cores"])
    });
    let commit = given.unwrap_or_else(commit);
    let short = commit.get(..8).unwrap_or(&commit);
    let changed = if commit.ends_with('+') { "+" } else { "" };
    format!("{machine}; {short}{changed}; {}", date(SystemTime::now()))
}

/// Commit of the repository in the working folder, with `+` if files are changed; `unknown` without
/// git.
pub(super) fn commit() -> String {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
        output.status.success().then_some(text)
    };
    let Some(commit) = git(&["rev-parse", "HEAD"]) else { return "unknown".into() };
    let changes = git(&["status", "--porcelain", "--untracked-files=no"]);
    if changes.is_some_and(|text| text.is_empty()) { commit } else { format!("{commit}+") }
}

/// Date of `time` in UTC, as YYYY-MM-DD.
pub(crate) fn date(time: SystemTime) -> String {
    let days = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / 86400) as i64;
    // Converts days since 1970 to year, month and day by Howard Hinnant's algorithm
    // civil_from_days.
    let z = days + 719_468;
    let era = z / 146_097;
    let day_of_era = z % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn days_have_names() {
        let at = |seconds| date(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01");
        assert_eq!(at(951_782_400), "2000-02-29");
        assert_eq!(at(4_107_542_399), "2100-02-28");
        assert_eq!(at(4_107_542_400), "2100-03-01");
    }
}
