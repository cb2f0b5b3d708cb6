//! Tests of the waits that `iris stress` removes on GPUs. The tests run the same headers in host
//! code, with real threads and the same delays at the same places. Without a wait, a few calls must
//! produce a wrong value; with the wait in place, the delay alone must do no harm.
//!
//! A delay must be long enough for the other threads to do the wrong thing meanwhile, which takes
//! longer on a busy machine. If a removed wait causes no wrong value, the test tries again with a
//! longer delay, so timing decides no result.

use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use iris_kernels::build::Hold;
use iris_sync::{Access, Channel, LINE_WORDS, Shape};
use iris_testkit::harness::{self, Group, named};
use iris_testkit::stress::WAITS;
use tempfile::TempDir;

fn main() -> ExitCode {
    harness::run(vec![Group::new(
        harness::no_program("g++"),
        named![each_wait_that_is_left_out_shows_and_the_delay_alone_does_not],
    )])
}

/// Name of the program in held.cpp that produces wrong values if the wait on `access` is missing.
fn subject(access: Access) -> &'static str {
    match access {
        Access::CreditLoad => "broadcast",
        Access::EntryLoad => "all_gather",
        Access::SignalLoad => "one_shot",
        Access::DoneLoad => "pull",
        Access::BarrierLoad => "gather",
        Access::VersionLoad => "message",
        Access::LockTake => "spinlock",
        Access::FlagLoad => "staged",
        Access::LlLoad => "exchange",
        other => panic!("{} is no wait", other.name()),
    }
}

/// Name of the program in held.cpp, access whose wait is removed, and place of the delay.
type Held = (&'static str, Access, Hold);

/// Additional waits, in the same form as `MORE_WAITS` of `iris stress`: waits for signals before
/// data of copy engines or of other GEMM workgroups is read.
const SIGNALS: [Held; 3] = [
    ("copied", Access::SignalLoad, Hold::Entered),
    ("copied_beside", Access::SignalLoad, Hold::Entered),
    ("stored", Access::SignalLoad, Hold::Entered),
];

/// Program held.cpp, compiled for the host.
struct Host {
    program: PathBuf,
    _folder: TempDir,
}

impl Host {
    fn new() -> Self {
        let root = env!("CARGO_MANIFEST_DIR");
        let folder = tempfile::tempdir().expect("a temporary folder");
        let program = folder.path().join("held");
        let sources = [format!("-I{root}/cxx"), format!("{root}/tests/held/held.cpp")];
        harness::compile_for_host(["-std=c++20".into()].into_iter().chain(sources), &program);
        Self { program, _folder: folder }
    }

    /// Runs the program with four calls of two ranks, and returns its report, such as `0 wrong`.
    fn run(&self, (subject, access, place): Held, without: bool, ns: u32) -> String {
        let shape =
            Shape { size: 2, tiles: 2, flags: 4, locks: true, pairs: 2, ..Shape::default() };
        let (channel, words) = Channel::lay_out(shape, 0, LINE_WORDS, LINE_WORDS);
        let without = if without { access as i32 } else { -1 };
        let numbers = [place as u32, ns, 4, LINE_WORDS + words.signal, LINE_WORDS + words.device];
        let fields: &[u32] = bytemuck::cast_slice(std::slice::from_ref(&channel));
        let mut child = Command::new(&self.program)
            .args([subject, &without.to_string()])
            .args(numbers.iter().chain(fields).map(u32::to_string))
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let begun = Instant::now();
        while child.try_wait().expect("a child").is_none() {
            if begun.elapsed() > Duration::from_secs(120) {
                child.kill().expect("a child");
                panic!("{subject} at {place:?} does not end");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let output = child.wait_with_output().expect("its output");
        assert!(output.status.success(), "{}", output.status);
        String::from_utf8(output.stdout).expect("text").trim().to_owned()
    }
}

fn each_wait_that_is_left_out_shows_and_the_delay_alone_does_not() {
    const MS: u32 = 1_000_000;
    let host = Host::new();
    let waits = WAITS.map(|(access, _, place)| (subject(access), access, place));
    for held @ (what, access, place) in waits.into_iter().chain(SIGNALS) {
        let name = format!("{} of {what}", access.name());
        assert_eq!(host.run(held, false, 2 * MS), "0 wrong", "{name}: with the wait");
        let tries = [2 * MS, 20 * MS, 200 * MS];
        let found = tries.iter().find_map(|&ns| {
            let report = host.run(held, true, ns);
            (!report.starts_with("0 wrong")).then_some((ns / MS, report))
        });
        let (ms, report) = found.unwrap_or_else(|| panic!("without {name} nothing is wrong"));
        println!("without {name}, held {place:?} for {ms} ms: {report}");
    }
}
