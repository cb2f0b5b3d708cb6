//! Table of the `IRIS_*` environment variables of all crates, [`VARIABLES`], and the settings that
//! this crate reads from them.

mod unknown;

use std::env::VarError;
use std::time::Duration;

use crate::error::{Error, Result};

pub use unknown::{Unknown, tell_unknown, unknown};

/// Largest number of workgroup threads per rank.
pub const MAX_THREADS: usize = 4096;

/// Description of one environment variable.
#[derive(Clone, Copy, Debug)]
pub struct Variable {
    /// Name of the environment variable.
    pub name: &'static str,
    /// Meaning of the variable, its values and its default.
    pub doc: &'static str,
    /// Whether the value must be equal on all ranks; checked when a heap is opened.
    pub agreed: bool,
}

/// Defines [`VARIABLES`] and the table in its documentation.
macro_rules! variables {
    ($($name:ident, agreed: $agreed:literal, $doc:literal;)*) => {
        /// All variables that iris reads. A set variable `IRIS_*` that is not listed causes a warning.
        ///
        /// | variable | must be equal on all ranks | meaning, values and default |
        /// | --- | --- | --- |
        $(#[doc = concat!("| `", stringify!($name), "` | ", $agreed, " | ", $doc, " |")])*
        pub const VARIABLES: &[Variable] =
            &[$(Variable { name: stringify!($name), doc: $doc, agreed: $agreed }),*];
    };
}

variables! {
    IRIS_DEADLINE, agreed: true,
        "factor on every deadline: 600 s for a peer to enter, 30 s for progress after that, 720 s for host \
            collectives; default 1, at most 1e6";
    IRIS_RENDEZVOUS, agreed: true,
        "absolute path of a private folder (mode 0700) where the processes of this job meet; default: a folder of \
            the user's in the temporary folder, with a name made from the launcher's job id, \
            MASTER_PORT, or the process that started the ranks";
    IRIS_PORT, agreed: false,
        "port of the host of rank 0 at which ranks on several hosts meet, 1 to 65535; default: MASTER_PORT + 1, \
            else one made from the launcher's job id (MPICH and ranks started by hand have none)";
    IRIS_SECRET_FILE, agreed: false,
        "file (mode 0600) with the secret by which ranks on several hosts recognise each other, the same for all \
            ranks; `iris secret FILE` makes one; default none, where all ranks are of one user on one host and meet \
            at a loopback address";
    IRIS_TRUST_NETWORK, agreed: false,
        "1: ranks on several hosts meet without a secret, on a network that nobody else reaches; default 0";
    IRIS_NETWORK_GBIT, agreed: true,
        "line rate in Gbit/s of the network port that each rank has, by which calls over several hosts are cut \
            into blocks, 1 to 100000; default 400";
    IRIS_NODE, agreed: false,
        "name of the node that this rank is on, in place of its host's identity, for tests that play several \
            nodes on one host; default: found out";
    IRIS_THREADS, agreed: false,
        "number of a rank's threads for workgroups of CPU kernels; default: cores / ranks of the host, at least 1";
    IRIS_CACHE, agreed: false,
        "cache folder for compiled device kernels; default: iris in the user's cache folder";
    IRIS_TUNING, agreed: false,
        "tuning file written by `iris tune`, or off; default: the file for this device, driver and number of \
            ranks in the folder of IRIS_CACHE, if it exists";
    IRIS_NVRTC, agreed: false,
        "path of NVIDIA's run-time compiler library NVRTC, or of its folder; default: the usual places are \
            searched";
    IRIS_NCCL, agreed: false,
        "path of the NCCL library, or of its folder, which moves data between nodes of GPUs and is a benchmark's \
            baseline; default: the usual places are searched";
    IRIS_CUBLASLT, agreed: false,
        "path of the cuBLASLt library, or of its folder; default: the usual places are searched";
    IRIS_RCCL, agreed: false,
        "path of the RCCL library, like IRIS_NCCL";
    IRIS_HIPBLASLT, agreed: false,
        "path of the hipBLASLt library, like IRIS_CUBLASLT";
    IRIS_HIPRTC, agreed: false,
        "path of AMD's run-time compiler library hiprtc, like IRIS_NVRTC";
    IRIS_HIP_DATA, agreed: true,
        "caching of matrices and messages on AMD devices: plain, fine or uncached; default plain";
    IRIS_HIP_SIGNAL, agreed: true,
        "caching of words that peers poll on AMD devices: plain, fine or uncached; default uncached, or fine if \
            the device has no uncached memory";
    IRIS_DELAY, agreed: false,
        "maximum random delay before signals and waits of kernels, in microseconds (at most 1000 on a GPU), for \
            stress tests; default: no delay";
    IRIS_TEST_LEVEL, agreed: false,
        "extent of the tests: smoke, quick, normal or full; default normal";
    IRIS_TEST_BACKEND, agreed: false,
        "backend of the long tests: cpu or cuda; default cpu";
    IRIS_COMMIT, agreed: false,
        "commit id that `iris bench` records with its results; default: asked from git";
    IRIS_LOG, agreed: false,
        "log level of the programs: error, warn, info, debug or trace; default warn";
}

/// Settings of a world, read from the environment or set by the program.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Settings {
    /// Factor on every deadline (`IRIS_DEADLINE`), above 0 and at most 1e6; opening a world fails
    /// with any other value.
    pub deadline: f64,
    /// Longest wait of a kernel for a peer to enter the same call, 600 s by default. Set it above
    /// the longest time that a rank may spend between calls; a rank that hangs between calls is
    /// reported after this time.
    pub work: Duration,
    /// Longest wait of a kernel after all peers have entered the call, 30 s by default; a rank that
    /// hangs within a call is reported after this time.
    pub step: Duration,
    /// Longest wait for all ranks to meet, 720 s by default.
    pub meeting: Duration,
    /// Number of workgroup threads per rank (`IRIS_THREADS`); `None` derives it from the number of
    /// cores.
    pub threads: Option<usize>,
    /// Line rate in Gbit/s of each rank's network port (`IRIS_NETWORK_GBIT`). Plans over several
    /// nodes choose from it the number of blocks into which a call is split.
    pub network_gbit: u32,
}

impl Default for Settings {
    fn default() -> Self {
        let [work, step, meeting] = [600, 30, 720].map(Duration::from_secs);
        Settings { deadline: 1.0, work, step, meeting, threads: None, network_gbit: 400 }
    }
}

impl Settings {
    /// Reads the settings from the environment.
    ///
    /// # Errors
    /// [`Error::Env`] for a value that is not a number in its variable's range.
    pub fn from_env() -> Result<Settings> {
        tell_unknown();
        let mut settings = Settings::default();
        if let Some(text) = read("IRIS_DEADLINE")? {
            settings.deadline = match text.parse::<f64>() {
                Ok(v) if is_factor(v) => v,
                _ => return Err(wrong("IRIS_DEADLINE", &text, FACTOR)),
            };
        }
        if let Some(text) = read("IRIS_THREADS")? {
            settings.threads = match text.parse::<usize>() {
                Ok(v) if (1..=MAX_THREADS).contains(&v) => Some(v),
                _ => {
                    let expected = format!("a number from 1 to {MAX_THREADS}");
                    return Err(wrong("IRIS_THREADS", &text, &expected));
                }
            };
        }
        if let Some(text) = read("IRIS_NETWORK_GBIT")? {
            settings.network_gbit = match text.parse() {
                Ok(v @ 1..=100_000) => v,
                _ => return Err(wrong("IRIS_NETWORK_GBIT", &text, "a number from 1 to 100000")),
            };
        }
        // CPU kernels read this variable themselves but cannot report an invalid value, so it is
        // checked here.
        if let Some(text) = read("IRIS_DELAY")?
            && !text.parse().is_ok_and(|us: u64| us <= MOST_DELAY)
        {
            return Err(wrong("IRIS_DELAY", &text, "a number of microseconds, at most 1000000"));
        }
        Ok(settings)
    }

    /// Checks that a world can be made with these settings.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a factor that is not above 0 and at most 1e6, or a wait that is not
    /// above 0 and at most 1e6 s.
    pub fn check(&self) -> Result<()> {
        if !is_factor(self.deadline) {
            return Err(Error::invalid("factor on deadlines", self.deadline, FACTOR));
        }
        for (name, wait) in [("work", self.work), ("step", self.step), ("meeting", self.meeting)] {
            if wait.is_zero() || wait > LONGEST {
                let what = format!("longest wait `{name}` of settings");
                return Err(Error::invalid(what, format!("{wait:?}"), "above 0, at most 1e6 s"));
            }
        }
        Ok(())
    }

    /// Returns these settings if a world can be made with them.
    pub(crate) fn checked(self) -> Result<Settings> {
        self.check().map(|()| self)
    }

    /// Sets the factor on every deadline, above 0 and at most 1e6; 2 doubles all waiting times.
    pub fn deadline(mut self, factor: f64) -> Settings {
        self.deadline = factor;
        self
    }

    /// Sets the longest wait for a peer to enter a call. In a server whose ranks wait for requests
    /// outside of calls, seconds suffice; if ranks wait for requests within a call, set hours.
    pub fn work(mut self, wait: Duration) -> Settings {
        self.work = wait;
        self
    }

    /// Sets the longest wait of a kernel after all peers have entered the call.
    pub fn step(mut self, wait: Duration) -> Settings {
        self.step = wait;
        self
    }

    /// Sets the longest wait for all ranks to meet.
    pub fn meeting(mut self, wait: Duration) -> Settings {
        self.meeting = wait;
        self
    }

    /// Sets the number of workgroup threads per rank on the CPU, for heaps that do not set it.
    pub fn threads(mut self, threads: usize) -> Settings {
        self.threads = Some(threads);
        self
    }

    /// Deadline of a kernel's wait for a peer to enter the same call.
    pub fn entry_deadline(&self) -> Duration {
        self.scaled(self.work)
    }

    /// Deadline of each wait in a kernel except the wait for a peer's entry.
    pub fn progress_deadline(&self) -> Duration {
        self.scaled(self.step)
    }

    /// Deadline of a host collective's wait for the other ranks, 720 s by default. This deadline is
    /// longer than [`Settings::entry_deadline`] plus [`Settings::progress_deadline`]. So if a rank
    /// skips a call, the other ranks' kernels give up first and name that rank, before the host
    /// reports the waiting ranks as absent.
    pub fn host_deadline(&self) -> Duration {
        self.scaled((self.work + self.step) * 8 / 7)
    }

    /// Deadline of the meeting of all ranks.
    pub fn meeting_deadline(&self) -> Duration {
        self.scaled(self.meeting)
    }

    /// Scales a wait by the deadline factor, which is clamped to 0..=[`MOST`]. The clamp keeps the
    /// result finite: at most 23 years for the default meeting deadline. NaN gives zero.
    fn scaled(&self, wait: Duration) -> Duration {
        let seconds = wait.as_secs_f64() * self.deadline.clamp(0.0, MOST);
        let most = Settings::default().meeting.mul_f64(MOST);
        Duration::try_from_secs_f64(seconds).unwrap_or_default().min(most)
    }
}

/// Largest value of `IRIS_DELAY`, in microseconds.
const MOST_DELAY: u64 = 1_000_000;
/// Largest factor by which deadlines may be multiplied.
const MOST: f64 = 1e6;
/// Longest wait that settings may have, before the factor.
const LONGEST: Duration = Duration::from_secs(1_000_000);
const FACTOR: &str = "a factor above 0, at most 1e6";

fn is_factor(value: f64) -> bool {
    value > 0.0 && value <= MOST
}

/// Variables with [`Variable::agreed`], each with its value, for comparison between ranks.
pub(crate) fn agreed() -> Vec<(&'static str, String)> {
    VARIABLES
        .iter()
        .filter(|v| v.agreed)
        .map(|v| {
            let value = std::env::var_os(v.name);
            let text = value.map_or("(not set)".into(), |t| t.to_string_lossy().into_owned());
            (v.name, text)
        })
        .collect()
}

/// Value of the environment variable `name`; `None` if it is unset or empty.
pub(crate) fn read(name: &str) -> Result<Option<String>> {
    /// Maximum length of a value in bytes: the longest path that the system opens. Values that are
    /// no paths are shorter.
    const LONGEST: usize = 4095;
    match std::env::var(name) {
        Ok(text) if text.is_empty() => Ok(None),
        Ok(text) if text.len() > LONGEST => {
            Err(wrong(name, &text, &format!("at most {LONGEST} bytes")))
        }
        Ok(text) => Ok(Some(text)),
        Err(VarError::NotPresent) => Ok(None),
        Err(VarError::NotUnicode(raw)) => Err(wrong(name, &raw.to_string_lossy(), "UTF-8")),
    }
}

pub(crate) fn wrong(variable: &str, value: &str, expected: &str) -> Error {
    Error::Env { variable: variable.into(), value: value.into(), expected: expected.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_scale() {
        let s = Settings::default().deadline(0.01);
        assert_eq!(s.entry_deadline(), Duration::from_secs(6));
        assert_eq!(s.progress_deadline(), Duration::from_millis(300));
        let longest = Settings::default().deadline(MOST).host_deadline();
        for (factor, wait) in [
            (f64::NAN, Duration::ZERO),
            (-1.0, Duration::ZERO),
            (f64::NEG_INFINITY, Duration::ZERO),
            (3e16, longest),
            (f64::INFINITY, longest),
        ] {
            let settings = Settings::default().deadline(factor);
            assert_eq!(settings.host_deadline(), wait, "{factor}");
            let error = settings.check().unwrap_err().to_string();
            assert!(
                error.contains(&factor.to_string()) && error.contains("at most 1e6"),
                "{error}"
            );
        }
        Settings::default().deadline(MOST).check().unwrap();
        assert!(std::time::Instant::now().checked_add(longest).is_some());
    }

    /// Tests that each kind of wait has its own deadline.
    #[test]
    fn deadlines_are_set_by_kind() {
        let [work, step, meeting] = [7, 5, 3].map(Duration::from_secs);
        let s = Settings::default().work(work).step(step).meeting(meeting).deadline(2.0);
        assert_eq!(s.entry_deadline(), 2 * work);
        assert_eq!(s.progress_deadline(), 2 * step);
        assert_eq!(s.meeting_deadline(), 2 * meeting);
        assert!(s.host_deadline() > 2 * (work + step));
        s.check().unwrap();
        for wait in [Duration::ZERO, LONGEST + Duration::from_secs(1)] {
            let all = [s.clone().work(wait), s.clone().step(wait), s.clone().meeting(wait)];
            for (settings, name) in all.into_iter().zip(["work", "step", "meeting"]) {
                let error = settings.check().unwrap_err().to_string();
                assert!(error.contains(name) && error.contains(&format!("{wait:?}")), "{error}");
            }
        }
    }

    /// Tests that the host's deadline is longer than a kernel's wait for entry followed by a wait
    /// for progress.
    #[test]
    fn the_host_waits_longer_than_kernels() {
        for factor in [0.001, 1.0, MOST] {
            let s = Settings::default().deadline(factor);
            let kernels = s.entry_deadline() + s.progress_deadline();
            assert!(s.host_deadline() > kernels.mul_f64(1.1), "{factor}");
        }
    }
}
