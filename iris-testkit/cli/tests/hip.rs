//! Tests of the HIP backend without an AMD device. The real runtime must report that there is no
//! device. The host side runs on a fake runtime (`hip/runtime.cpp`), whose devices are the host and
//! whose kernels are the device source compiled as host code. Passing tests say nothing about a
//! real device.
//!
//! This file is long because all tests read the log of the same runtime.

#![allow(unsafe_code, reason = "memory and streams that the test makes itself")]

use std::path::Path;
use std::process::{Command, ExitCode};

use iris_heap::{BackendKind, Error, ErrorKind, HeapOptions, SymmetricHeap, World};
use iris_testkit::fake_hip::{self as fake, Fake, failed};
use iris_testkit::harness::{self, Group, named};
use libloading::os::unix::Library;
use tempfile::TempDir;

/// Environment variable that makes this program a child process and names its test.
const CHILD: &str = "HIP_TEST_CHILD";

fn main() -> ExitCode {
    if let Ok(name) = std::env::var(CHILD) {
        match name.as_str() {
            "memory" => memory_and_streams_of_the_caller(),
            other => panic!("no child is called {other}"),
        }
        return ExitCode::SUCCESS;
    }
    let real = match BackendKind::Hip.device_count() {
        Ok(count) => {
            Some(format!("{count} devices are there, which `iris test --backend hip` is for"))
        }
        // A developer's machine may lack the runtime; the runtime's tests are then ignored. CI must
        // have it.
        Err(error @ Error::Library { .. }) if std::env::var("CI").as_deref() != Ok("true") => {
            Some(error.to_string())
        }
        Err(_) => None,
    };
    harness::run_together(vec![
        Group::new(
            real,
            named![
                the_real_runtime_says_that_there_is_no_device,
                a_run_says_so_before_it_starts_ranks
            ],
        ),
        Group::new(
            harness::no_program("g++"),
            named![
                ranks_that_are_threads_share_memory_by_peer_access,
                ranks_that_are_processes_share_memory_by_handles,
                worlds_of_three_five_and_eight_compute_what_they_should,
                shards_go_by_copy_engines_in_lines_where_they_have_gaps,
                products_leave_by_copy_engines_as_they_are_finished,
                a_release_before_6_has_other_numbers,
                streams_without_a_queue_of_their_own_are_told_of,
                a_plan_is_for_the_device_that_the_driver_describes,
                devices_without_peer_access_are_nodes_of_their_own,
                what_cannot_be_is_said,
                the_callers_device_memory_and_streams_stay_his,
                a_doctor_sees_the_devices,
                whole_products_are_the_librarys_where_it_is_there,
                a_library_that_is_of_no_use_is_left_out,
                every_op_is_timed_beside_the_libraries,
                what_comes_in_parts_is_added_by_the_library,
                a_library_that_refuses_is_quoted,
                without_libraries_ops_are_timed_alone,
                a_benchmark_that_was_cut_off_goes_on,
                a_call_is_timed_with_the_plan_of_more_rows,
                a_tuning_file_need_not_be_there_before,
            ],
        ),
    ])
}

fn the_real_runtime_says_that_there_is_no_device() {
    let error = BackendKind::Hip.devices().unwrap_err();
    assert!(error.to_string().starts_with("hipGetDeviceCount: hipErrorNoDevice (code 100)"));
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    // The runtime must be installed, because the test reads its version.
    assert!(BackendKind::Hip.driver_version().unwrap() >= 50_000_000);
    let opened = World::run_threads(1, |world| {
        let options = HeapOptions::new().backend(BackendKind::Hip);
        Ok::<_, Error>(SymmetricHeap::open(&world, options).unwrap_err().to_string())
    });
    assert!(opened.unwrap()[0].contains("hipErrorNoDevice"));
    let skipped = harness::no_backend(BackendKind::Hip).unwrap();
    assert!(skipped.contains("hipErrorNoDevice"), "{skipped}");
}

fn a_run_says_so_before_it_starts_ranks() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_iris"));
    let output = command.args(["run", "all-gather", "--backend", "hip"]).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    let last = error.lines().last().unwrap_or_default();
    assert!(last.starts_with("iris: hipGetDeviceCount: hipErrorNoDevice (code 100)"), "{error}");
    assert!(!error.contains("lost"), "no rank was started: {error}");
}

/// Runs `iris run` with these arguments, which must succeed; returns the log of runtime calls, and
/// stderr.
fn right(fake: &Fake, arguments: &str, set: &[(&str, &str)]) -> (String, String) {
    let words: Vec<&str> = ["run"].into_iter().chain(arguments.split(' ')).collect();
    let words = [&words[..], &["--backend", "hip", "--iters", "2", "--json"]].concat();
    let (output, calls) = fake.run(Path::new(env!("CARGO_BIN_EXE_iris")), &words, set);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{arguments}: {out}{said}");
    let result: serde_json::Value = serde_json::from_str(out.trim()).unwrap();
    assert_eq!((&result["ok"], &result["backend"]), (&true.into(), &"hip".into()), "{result}");
    (calls, said)
}

/// Arguments and results of the calls with this name.
fn calls_of<'a>(calls: &'a str, name: &str) -> Vec<&'a str> {
    let of = |line: &'a str| line.strip_prefix(name)?.strip_prefix(' ');
    calls.lines().filter_map(of).collect()
}

/// Number of launches of each of the kernels `names` in the log.
fn launches<const N: usize>(calls: &str, names: [&str; N]) -> [usize; N] {
    let launches = calls_of(calls, "hipModuleLaunchKernel");
    names.map(|name| launches.iter().filter(|call| call.starts_with(name)).count())
}

/// Numbers of copies between places of devices: contiguous copies of `bytes` bytes, 2D copies of
/// `bytes` bytes, and copies of 4-byte words.
fn copies(calls: &str, bytes: u32) -> [usize; 3] {
    let of = |name, bytes| {
        let all = calls_of(calls, name);
        all.iter().filter(|it| it.starts_with(&format!("{bytes} on"))).count()
    };
    [("hipMemcpyAsync", bytes), ("hipMemcpy2DAsync", bytes), ("hipMemcpyAsync", 4)]
        .map(|(name, bytes)| of(name, bytes))
}

/// Checks each stream that has a copy of exactly `bytes` bytes of data: a signal is queued after
/// that copy and after the record of an event. Returns the number of signals.
fn signals_behind_a_record(calls: &str, bytes: u32) -> usize {
    let ordered: Vec<(&str, &str)> =
        calls.lines().filter_map(|it| it.split_once(" on stream ")).collect();
    let is_data = |call: &str| {
        ["hipMemcpyAsync", "hipMemcpy2DAsync"].iter().any(|name| call == format!("{name} {bytes}"))
    };
    let mut streams: Vec<&str> =
        ordered.iter().filter(|(call, _)| is_data(call)).map(|&(_, stream)| stream).collect();
    streams.sort_unstable();
    streams.dedup();
    let of = |stream| ordered.iter().filter(move |it| it.1 == stream).map(|it| it.0);
    let mut signals = 0;
    for stream in streams {
        let all: Vec<&str> = of(stream).collect();
        for at in (0..all.len()).filter(|&at| all[at] == "hipMemcpyAsync 4") {
            signals += 1;
            let ahead = &all[at.saturating_sub(2)..at];
            let right = matches!(ahead, [data, "hipEventRecord"] if is_data(data));
            assert!(right, "{ahead:?} ahead of a signal: {all:?}");
        }
    }
    signals
}

/// Command-line option that writes a trace to a file in `folder`.
fn traced(folder: &TempDir) -> String {
    format!(" --trace {}", folder.path().join("trace.json").display())
}

fn ranks_that_are_threads_share_memory_by_peer_access() {
    let fake = Fake::of(7);
    let (calls, _) = right(fake, "all-gather --ranks 2 --threads-as-ranks --m 33 --n 65", &[]);
    assert_eq!(failed(&calls), [""; 0]);
    // Words that peers poll must be in uncached memory, and all other data in plain memory.
    let signals = calls_of(&calls, "hipExtMallocWithFlags");
    assert_eq!(signals.len(), 2, "{calls}");
    assert!(signals.iter().all(|call| call.contains("flags 3")), "{calls}");
    assert_eq!(calls_of(&calls, "hipMalloc").len(), 4, "{calls}");
    let peers = calls_of(&calls, "hipDeviceEnablePeerAccess");
    assert!(peers.contains(&"0 on 1 = 0") && peers.contains(&"1 on 0 = 0"), "{calls}");
    // Each stream must have a hardware queue of its own, on the rank's device.
    let streams = calls_of(&calls, "hipExtStreamCreateWithCUMask");
    assert!(streams.contains(&"1 on 0 = 0") && streams.contains(&"1 on 1 = 0"), "{calls}");
    // All allocated memory was freed.
    assert_eq!(calls_of(&calls, "hipFree").len(), 6, "{calls}");
    // Peers' memory must be read on a separate stream of its owner's device. The runtime itself
    // would use the null stream of that device, where the copy could be queued after a kernel that
    // waits for the reader.
    let (calls, _) = right(fake, "barrier --ranks 2 --threads-as-ranks", &[]);
    assert_eq!(failed(&calls), [""; 0]);
    let others = calls_of(&calls, "hipStreamCreateWithFlags");
    assert_eq!(others.len(), 2, "{calls}");
    let (calls, _) = right(
        fake,
        "all-gather --ranks 2 --threads-as-ranks --m 33 --n 65",
        &[("IRIS_HIP_DATA", "fine"), ("IRIS_HIP_SIGNAL", "plain")],
    );
    let data = calls_of(&calls, "hipExtMallocWithFlags");
    assert!(data.len() == 2 && data.iter().all(|call| call.contains("flags 1")), "{calls}");
}

fn ranks_that_are_processes_share_memory_by_handles() {
    let (calls, _) = right(Fake::of(7), "all-gather --ranks 3 --m 33 --n 65", &[]);
    assert_eq!(failed(&calls), [""; 0]);
    // Each rank opens two allocations (data and words) of each of two peers; the third rank uses
    // the first device again.
    assert_eq!(calls_of(&calls, "hipIpcOpenMemHandle").len(), 12, "{calls}");
    assert_eq!(calls_of(&calls, "hipIpcCloseMemHandle").len(), 12, "{calls}");
    // No rank frees memory before all processes that opened it have closed it.
    let closed = calls.rfind("hipIpcCloseMemHandle").unwrap();
    assert!(calls.find("hipFree").is_some_and(|freed| closed < freed), "{calls}");
    right(Fake::of(7), "barrier --ranks 2", &[]);
}

fn worlds_of_three_five_and_eight_compute_what_they_should() {
    let words = ["test", "--backend", "hip", "--ranks", "3,5,8", "--level", "smoke"];
    let program = Path::new(env!("CARGO_BIN_EXE_iris"));
    let (output, _) = Fake::of(7).run(program, &words, &[("FAKE_HIP_DEVICES", "8")]);
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{out}{}", String::from_utf8_lossy(&output.stderr));
    let worlds = out.lines().filter(|line| line.contains("ranks as threads")).count();
    assert_eq!((worlds, out.contains(" 0 failed, 0 skipped")), (3, true), "{out}");
}

fn shards_go_by_copy_engines_in_lines_where_they_have_gaps() {
    let line = "all-gather-matmul --variant copy_engine --ranks 2 --threads-as-ranks --m 40 --n 24";
    let folder = TempDir::new().expect("a folder");
    let trace = traced(&folder);
    let count = |k: u32, trace: &str| {
        let (calls, _) = right(Fake::of(7), &format!("{line} --k {k}{trace}"), &[]);
        assert_eq!(failed(&calls), [""; 0]);
        let [opened, pushed, gates, closed] =
            launches(&calls, ["iris_open", "iris_copies", "iris_gate", "iris_close"]);
        assert!(opened > 0 && [gates, closed] == [opened; 2], "{calls}");
        let waits = calls_of(&calls, "hipStreamWaitEvent").len();
        // Expected copies: rows (half of A), each followed by a copy of a signal word.
        let copied = copies(&calls, 20 * k * 4);
        assert_eq!(signals_behind_a_record(&calls, 20 * k * 4), copied[2]);
        (opened, pushed, copied, waits)
    };
    let (calls, pushed, copied, waits) = count(16, "");
    assert_eq!((pushed, copied), (0, [calls, 0, calls]));
    // Rows of 17 elements are not contiguous in the gathered matrix, so each row is a copy of its
    // own.
    let (lines, pushed, copied, _) = count(17, "");
    assert_eq!((pushed, copied), (0, [0, lines, lines]));
    // Copies must wait for the first kernel of their call, and the end of the call must wait for
    // the copies.
    assert!(waits >= 2 * calls, "{waits} waits in {calls} calls");
    // Copy engines are used in traced calls, too.
    let (calls, pushed, copied, _) = count(16, &trace);
    assert_eq!((pushed, copied), (0, [calls, 0, calls]));
}

fn products_leave_by_copy_engines_as_they_are_finished() {
    // For each operator: number of launches of `iris_sums` per call, and number of rounds of
    // copies, on each rank.
    let cases = [
        ("matmul-all-gather", 1, 1),
        ("matmul-reduce-scatter", 1, 1),
        // Two launches: one adds the partial sums, the other copies the other rank's part to C.
        ("matmul-all-reduce", 2, 2),
    ];
    for (op, sums, rounds) in cases {
        let line = format!("{op} --variant copy_engine --ranks 2 --threads-as-ranks --m 40 --k 16");
        let folder = TempDir::new().expect("a folder");
        let trace = traced(&folder);
        let count = |n: u32, trace: &str| {
            let (calls, _) = right(Fake::of(7), &format!("{line} --n {n}{trace}"), &[]);
            assert_eq!(failed(&calls), [""; 0]);
            let [opened, gates, summed, closed] =
                launches(&calls, ["iris_open", "iris_gate", "iris_sums", "iris_close"]);
            assert!(opened > 0 && closed == opened, "{calls}");
            assert_eq!([gates, summed], [rounds * opened, sums * opened], "{calls}");
            let pushed = launches(&calls, ["iris_copies", "iris_blocks", "iris_results"]);
            let waits = calls_of(&calls, "hipStreamWaitEvent").len();
            let copied = copies(&calls, 20 * n * 4);
            assert_eq!(signals_behind_a_record(&calls, 20 * n * 4), copied[2]);
            (opened, pushed.iter().sum::<usize>(), copied, waits)
        };
        let (calls, pushed, copied, waits) = count(24, "");
        let all = rounds * calls;
        assert_eq!((pushed, copied), (0, [all, 0, all]), "{op}");
        // Rows of 17 elements have gaps in the workspace, so each row is a copy of its own.
        let (lines, pushed, copied, _) = count(17, "");
        let all = rounds * lines;
        assert_eq!((pushed, copied), (0, [0, all, all]), "{op}");
        // Copies must wait for the data that they copy, and the end of the call must wait for the
        // last copy.
        assert!(waits >= (rounds + 1) * calls, "{op}: {waits} waits in {calls} calls");
        // Copy engines are used in traced calls, too.
        let (calls, pushed, copied, _) = count(24, &trace);
        let all = rounds * calls;
        assert_eq!((pushed, copied), (0, [all, 0, all]), "{op}");
    }
}

fn a_release_before_6_has_other_numbers() {
    // Release 5.4 refuses later flags and has no uncached memory; like older releases, the fake
    // does not report the clock's rate.
    let (calls, _) = right(Fake::of(5), "barrier --ranks 2", &[]);
    assert_eq!(failed(&calls), [""; 0]);
    let signals = calls_of(&calls, "hipExtMallocWithFlags");
    assert!(signals.len() == 2 && signals.iter().all(|call| call.contains("flags 1")), "{calls}");
}

fn streams_without_a_queue_of_their_own_are_told_of() {
    let line = "all-gather --ranks 2 --m 33 --n 65";
    let none = ("FAKE_HIP_NO_MASKS", "1");
    let (calls, said) = right(Fake::of(7), line, &[none]);
    assert!(!calls_of(&calls, "hipStreamCreateWithFlags").is_empty(), "{calls}");
    // The program itself makes sure that there are enough hardware queues, so it prints no warning.
    assert!(!said.contains("GPU_MAX_HW_QUEUES"), "{said}");
}

/// Tests a plan that is made before the heap: it asks the driver for the device. Also tests that
/// each plan logs once where its tuning data comes from.
fn a_plan_is_for_the_device_that_the_driver_describes() {
    let line = "all-gather --ranks 2 --threads-as-ranks --m 33 --n 65";
    let (_, said) = right(Fake::of(7), line, &[("IRIS_LOG", "info")]);
    let told = said.lines().filter(|line| line.contains("chosen by tuning data of an MI300X"));
    let told: Vec<_> = told.collect();
    assert_eq!(told.len(), 2, "{said}");
    let device = "hip (a fake of HIP, gfx942, 8 compute units)";
    assert!(told.iter().all(|line| line.contains(device)), "{said}");
    let words =
        "run matmul-reduce-scatter --variant epilogue --backend hip --ranks 2 --m 40 --n 24";
    let words: Vec<&str> = words.split(' ').collect();
    let (output, _) = Fake::of(7).run(Path::new(env!("CARGO_BIN_EXE_iris")), &words, &[]);
    let said = String::from_utf8_lossy(&output.stderr);
    let refused = format!("variant on {device} is epilogue, expected auto, push, unfused");
    assert!(!output.status.success() && said.contains(&refused), "{said}");
}

/// Tests four ranks on devices of which the first two and the last two have access: plans that are
/// made before the heap are for two nodes, and only rank 0 warns, once. The launcher of ranks that
/// are processes shows what they log only if they fail.
fn devices_without_peer_access_are_nodes_of_their_own() {
    let set = [
        ("FAKE_HIP_DEVICES", "4"),
        ("FAKE_HIP_UNITS", "10"),
        ("FAKE_HIP_NO_PEERS", "0-2,0-3,1-2,1-3"),
        ("HSA_NO_SCRATCH_RECLAIM", "1"),
        ("IRIS_LOG", "warn"),
    ];
    for (line, warnings) in [
        ("matmul-all-reduce --ranks 4 --m 33 --n 65 --threads-as-ranks", 1),
        ("all-gather --ranks 4 --m 33 --n 65", 0),
    ] {
        let (calls, said) = right(Fake::with_libraries(), line, &set);
        assert_eq!(failed(&calls), [""; 0]);
        assert!(calls.contains("ncclCommInitRankConfig"), "{calls}");
        let pairs =
            "(GPU 0 (rank 0) and GPU 2 (rank 2)), (GPU 0 (rank 0) and GPU 3 (rank 3)), (GPU 1";
        let warning = format!("no peer access between {pairs}");
        assert_eq!(said.matches(&warning).count(), warnings, "{said}");
        assert_eq!(said.matches("nodes=2 ranks_per_node=2").count(), warnings, "{said}");
    }
    let program = Path::new(env!("CARGO_BIN_EXE_iris"));
    let output = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let (output, _) = Fake::with_libraries().run(program, &words, &set);
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (code, out) = output("doctor --backend hip");
    let out = out.split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(code, Some(0), "{out}");
    for expected in ["a heap groups them into 2 nodes of 2", "HIP works"] {
        assert!(out.contains(expected), "{expected} in {out}");
    }
    let (code, out) = output("test --backend hip --ranks 4 --level quick --op all-gather");
    assert_eq!(code, Some(1), "{out}");
    assert_eq!(out.matches("run `iris test --nodes 2`").count(), 1, "{out}");
}

fn what_cannot_be_is_said() {
    let refused = |set: &[(&str, &str)], expected: &str| {
        let words = "run all-gather --backend hip --ranks 2 --threads-as-ranks --m 33 --n 65";
        let words: Vec<&str> = words.split(' ').collect();
        let program = Path::new(env!("CARGO_BIN_EXE_iris"));
        let (output, _) = Fake::of(7).run(program, &words, set);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(expected), "{set:?}: {said}");
    };
    refused(&[("FAKE_HIP_DEVICES", "0")], "hipGetDeviceCount: hipErrorNoDevice (code 100)");
    refused(&[("FAKE_HIP_WAVE", "32")], "its waves have 32 threads, and the kernels are for 64");
    // Nodes of one rank need RCCL, which is not in the folder of this fake.
    refused(&[("FAKE_HIP_NO_PEERS", "all")], "expected RCCL 2.18 or later");
    refused(&[("IRIS_HIP_SIGNAL", "cached")], "expected plain, fine or uncached");
}

fn the_callers_device_memory_and_streams_stay_his() {
    let own = std::env::current_exe().unwrap();
    let (output, calls) = Fake::of(7).run(&own, &[], &[(CHILD, "memory")]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{calls}");
    assert_eq!(failed(&calls), [""; 0]);
}

/// Tests memory and streams that a caller has made by loading the runtime itself.
fn memory_and_streams_of_the_caller() {
    type Number = unsafe extern "C" fn(*mut i32) -> u32;
    type Take = unsafe extern "C" fn(*mut u64, usize) -> u32;
    type Stream = unsafe extern "C" fn(*mut u64, u32) -> u32;
    // SAFETY: the backend has already loaded the same runtime, so loading it again runs no code.
    let library = unsafe { Library::new("libamdhip64.so.7") }.unwrap();
    // SAFETY: the types are those of the runtime's functions in its header.
    let (current, take, make) = unsafe {
        (
            *library.get::<Number>(b"hipGetDevice\0").unwrap(),
            *library.get::<Take>(b"hipMalloc\0").unwrap(),
            *library.get::<Stream>(b"hipStreamCreateWithFlags\0").unwrap(),
        )
    };
    let rank = move |world: World| {
        let now = || {
            let mut device = -1;
            // SAFETY: the function only writes to `device`, a local of the right type.
            assert_eq!(unsafe { current(&mut device) }, 0);
            device
        };
        let (mut memory, mut stream) = (0, 0);
        // SAFETY: the locals receive the results, on device 0, which is initially current.
        assert_eq!(unsafe { (take(&mut memory, 1 << 20), make(&mut stream, 1)) }, (0, 0));
        for device in [0, 1] {
            let options = HeapOptions::new().backend(BackendKind::Hip).device(device);
            let heap = SymmetricHeap::open(&world, options.data_bytes(8 << 20))?;
            // The data is larger than one piece of a copy, and not a whole number of pieces.
            let values: Vec<i32> = (0..100_003).collect();
            let slice = heap.alloc::<i32>(values.len())?;
            assert!(heap.read(slice)?.iter().all(|&value| value == 0), "new memory is cleared");
            heap.write(slice, &values)?;
            assert_eq!(heap.read(slice)?, values);
            // SAFETY: the stream lives as long as the process.
            let stream = unsafe { heap.stream_from_raw(stream) };
            let import = |len| {
                // SAFETY: the memory lives as long as the process, and nobody else uses it.
                unsafe { heap.import(memory as *mut i32, len) }
            };
            assert_eq!(import((1 << 18) + 1).unwrap_err().kind(), ErrorKind::Usage);
            if device == 0 {
                let (stream, imported) = (stream?, import(1000)?);
                heap.write_on(&stream, imported, &values[..1000])?;
                stream.sync()?;
                assert_eq!(heap.read(imported)?, values[..1000]);
                heap.free(imported)?;
            } else {
                let errors = [stream.unwrap_err(), import(1000).unwrap_err()];
                assert_eq!(errors.map(|error| error.kind()), [ErrorKind::Usage; 2]);
            }
            assert_eq!(now(), 0, "the thread's device is what it was");
            heap.close()?;
        }
        world.close()
    };
    World::run_threads(1, rank).unwrap();
}

fn a_doctor_sees_the_devices() {
    let program = Path::new(env!("CARGO_BIN_EXE_iris"));
    let (output, _) = Fake::of(7).run(program, &["doctor", "--backend", "hip", "--no-links"], &[]);
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{out}");
    for expected in [
        "HIP 7.2.53211",
        "device 1    a fake of HIP gfx942",
        "hiprtc of ROCm 7.2.53211",
        "RCCL        is not there, so `iris bench` compares no messages: install it, or set IRIS_RCCL",
        "hipBLASLt   is not there, so GEMMs are kernels of iris's own: install it, or set",
    ] {
        assert!(out.contains(expected), "{expected} in {out}");
    }
    let json = ["doctor", "--backend", "hip", "--no-links", "--json"];
    let (output, _) = Fake::of(7).run(program, &json, &[]);
    let object: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let expected = serde_json::json!([{"backend": "hip", "works": true, "why": null}]);
    assert_eq!(object["verdicts"], expected);
    let verbose = ["doctor", "--backend", "hip", "--no-links", "--verbose"];
    let (output, _) = Fake::with_libraries().run(program, &verbose, &[]);
    let out = String::from_utf8_lossy(&output.stdout);
    for (expected, file) in
        [("RCCL        2.27.7", "librccl.so.1"), ("hipBLASLt   1.2.2", "libhipblaslt.so.1")]
    {
        let mut lines = out.lines().skip_while(|line| !line.contains(expected));
        let found = lines.next().is_some() && lines.next().is_some_and(|line| line.ends_with(file));
        assert!(found, "{expected} in {out}");
    }
    let none = [("FAKE_BLASLT_NO_KERNELS", "1")];
    let (output, _) =
        Fake::with_libraries().run(program, &["doctor", "--backend", "hip", "--no-links"], &none);
    let out = String::from_utf8_lossy(&output.stdout);
    let cost = "cannot be used, so GEMMs are kernels of iris's own: hipBLASLt 1.2.2 has no";
    assert!(output.status.success() && out.contains(cost), "{out}");
    let none = [("FAKE_HIP_DEVICES", "0")];
    let (output, _) =
        Fake::of(7).run(program, &["doctor", "--backend", "hip", "--no-links"], &none);
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.code() == Some(1) && out.contains("no HIP: no device"), "{out}");
}

/// Name under which the fake library logs its matrix products.
const PRODUCT: &str = "hipblasLtMatmul";

fn whole_products_are_the_librarys_where_it_is_there() {
    let lines = [
        "matmul --m 33 --n 64 --k 48 --dtype bf16 --variant local",
        "matmul-all-reduce --m 33 --n 64 --k 48 --dtype bf16 --variant unfused",
        "matmul-all-reduce --m 33 --n 64 --k 48 --dtype bf16 --variant unfused_one_shot",
        "matmul-all-reduce --m 33 --n 64 --k 48 --dtype bf16 --variant unfused_ll",
        "matmul-reduce-scatter --m 33 --n 65 --k 47 --dtype bf16 --variant unfused",
        "matmul-all-gather --m 33 --n 64 --k 48 --dtype bf16 --variant unfused",
        "all-gather-matmul --m 33 --n 64 --k 48 --dtype bf16 --variant unfused",
        "all-gather-matmul --shard columns --m 32 --n 64 --k 48 --dtype bf16 --variant unfused",
        "all-gather-matmul --m 32 --n 64 --k 48 --dtype bf16 --variant copy_engine",
        "matmul-all-gather --m 32 --n 64 --k 48 --dtype bf16 --variant copy_engine",
        "matmul-reduce-scatter --m 33 --n 64 --k 48 --dtype bf16 --variant copy_engine",
        "matmul-all-reduce --m 33 --n 64 --k 48 --dtype bf16 --variant copy_engine",
    ];
    for line in lines {
        // Number of products: the variant decides whether a rank's GEMM is computed in parts or as
        // a whole.
        let parts = line.ends_with("copy_engine") && !line.starts_with("matmul-all-gather");
        let products = if parts { 8 } else { 4 };
        let line = format!("{line} --ranks 2 --threads-as-ranks --library vendor");
        let (calls, _) = right(Fake::with_libraries(), &line, &[]);
        assert_eq!(failed(&calls), [""; 0], "{line}");
        // Number of products on each rank's device: two calls for warm-up and comparison, and two
        // timed calls.
        let of = |device: usize| {
            let on = format!("on {device} = 0");
            calls_of(&calls, PRODUCT).iter().filter(|call| call.ends_with(&on)).count()
        };
        assert_eq!([of(0), of(1)], [products; 2], "{line}: {calls}");
    }
    // The library is also used if ranks are processes and the command names no library.
    let line = "matmul-all-reduce --m 33 --n 64 --k 48 --dtype bf16 --variant unfused --ranks 2";
    let (calls, _) = right(Fake::with_libraries(), line, &[]);
    assert_eq!((failed(&calls), calls_of(&calls, PRODUCT).len()), (vec![], 8));
    // The GEMM of iris is used if it is asked for, or if the library is missing.
    let ours = format!("{line} --library ours");
    let vendor = format!("{line} --library vendor");
    for (fake, line) in [(Fake::with_libraries(), ours), (Fake::of(7), vendor)] {
        let (calls, _) = right(fake, &line, &[]);
        assert_eq!(calls_of(&calls, PRODUCT), [""; 0]);
    }
}

fn a_library_that_is_of_no_use_is_left_out() {
    let fake = Fake::with_libraries();
    let line = "matmul-all-reduce --m 33 --n 64 --k 48 --dtype bf16 --variant unfused --ranks 2 \
                --library vendor --threads-as-ranks";
    let others = tempfile::tempdir().unwrap();
    let other = others.path().join("libhipblaslt.so.1");
    fake::compile("blaslt.cpp", &["-DFAKE_CUBLASLT"], &other);
    let [own, runtime] =
        ["libhipblaslt.so", "libamdhip64.so.7"].map(|name| others.path().join("own").join(name));
    std::fs::create_dir(own.parent().unwrap()).unwrap();
    fake::compile("runtime.cpp", &[], &runtime);
    let linked = ["-Wl,--no-as-needed".into(), format!("-Wl,{}", runtime.display())];
    fake::compile("blaslt.cpp", &linked.each_ref().map(|it: &String| it.as_str()), &own);
    let logs = ("IRIS_LOG", "debug");
    let cases = [
        // Library of ROCm 5, whose version number is lower than required.
        (("FAKE_BLASLT_VERSION", "300"), "hipBLASLt 0.3.0 is older than 0.6.0"),
        // Shared library that is not hipBLASLt.
        (("IRIS_HIPBLASLT", other.to_str().unwrap()), "it has no hipblasLtCreate"),
        // Library without kernels for the device.
        (("FAKE_BLASLT_NO_KERNELS", "1"), "hipBLASLt 1.2.2 has no algorithm for 33 x 64 x 24"),
        // Library that is linked with its own HIP runtime, as in Python's packages.
        (("IRIS_HIPBLASLT", own.to_str().unwrap()), "it loads a second HIP runtime"),
    ];
    for (set, why) in cases {
        let (calls, said) = right(fake, line, &[set, logs]);
        assert_eq!(calls_of(&calls, PRODUCT), [""; 0]);
        assert!(said.contains("the vendor's library is not used") && said.contains(why), "{said}");
    }
    // All ranks use the library or none does: here one rank has a K that the library does not
    // support, so no rank uses it.
    let line = line.replace("--k 48", "--k 26");
    let (calls, said) = right(fake, &line, &[logs]);
    assert_eq!(calls_of(&calls, PRODUCT), [""; 0]);
    assert!(said.contains("hipBLASLt 1.2.2 has no algorithm for 33 x 64 x 13"), "{said}");
}

/// Output and recorded lines of `iris bench` for these cases.
fn bench(fake: &Fake, cases: &str) -> (String, Vec<serde_json::Value>, String) {
    bench_with(fake, cases, &[])
}

/// Output and recorded lines of `iris bench`, with environment variables set.
fn bench_with(
    fake: &Fake,
    cases: &str,
    set: &[(&str, &str)],
) -> (String, Vec<serde_json::Value>, String) {
    let folder = tempfile::tempdir().unwrap();
    let [from, to] = ["cases.toml", "lines.json"].map(|name| folder.path().join(name));
    std::fs::write(&from, cases).unwrap();
    let words = ["bench", "--backend", "hip", "--cases", from.to_str().unwrap()];
    // No result depends on time, so the limit is large: a busy machine may need longer than the
    // default.
    let more = ["--windows", "--limit", "36000", "--json", to.to_str().unwrap()];
    let words = [&words[..], &more].concat();
    let (output, calls) = fake.run(Path::new(env!("CARGO_BIN_EXE_iris")), &words, set);
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{out}{}", String::from_utf8_lossy(&output.stderr));
    let lines = std::fs::read_to_string(to).unwrap();
    (out, lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect(), calls)
}

fn every_op_is_timed_beside_the_libraries() {
    let row = |op: &str, dtype: &str, rest: &str, shape: &str| {
        format!("[[row]]\nop = \"{op}\"\ndtype = \"{dtype}\"\n{rest}\nshapes = [{shape}]\n")
    };
    let messages = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"];
    let products = [
        "matmul",
        "matmul_all_reduce",
        "matmul_reduce_scatter",
        "matmul_all_gather",
        "all_gather_matmul",
    ];
    let mut cases = row("barrier", "f32", "", "[0, 0, 0]");
    cases.extend(messages.map(|op| row(op, "bf16", "", "[8, 64, 0]")));
    cases.extend(products.map(|op| row(op, "bf16", "", "[16, 64, 32]")));
    cases += &row("all_gather_matmul", "bf16", "columns = true", "[16, 64, 32]");
    // Baseline of the following cases: the op of iris without RMSNorm, followed by a separate
    // kernel.
    let normed = |variants: &str| format!("rms_norm = 1e-5\nvariants = [{variants}]");
    let [sums, products] = ["\"ll\", \"one_shot\", \"two_shot\"", "\"unfused\", \"unfused_ll\""];
    cases += &row("all_reduce", "bf16", &normed(sums), "[8, 64, 0]");
    cases += &row("matmul_all_reduce", "bf16", &normed(products), "[16, 64, 32]");
    // Messages of a mixture of experts.
    cases += &row("all_gather", "bf16", "list = [[\"i32\", 6], [\"f32\", 2]]", "[8, 64, 0]");
    cases += &row("reduce_scatter", "bf16", "combine = 3", "[8, 64, 0]");
    cases += &row("all_reduce", "f32", "combine = 3", "[8, 64, 0]");
    cases += &row("all_reduce", "bf16", "combine = 3\nrms_norm = 1e-5", "[8, 64, 0]");
    let (out, lines, calls) = bench(Fake::with_libraries(), &cases);
    assert!(
        out.starts_with("2 ranks on 2 x a fake of HIP; RCCL 2.27.7; hipBLASLt 1.2.2\n"),
        "{out}"
    );
    assert!(out.contains("18 shapes, 0 failed, 0 wrong"), "{out}");
    assert_eq!(failed(&calls), [""; 0]);
    // A window is opened and closed on each of two ranks for 13 shapes.
    let windows = ["ncclCommWindowRegister", "ncclCommWindowDeregister"];
    assert_eq!(windows.map(|call| calls_of(&calls, call).len()), [26; 2]);
    assert_eq!(lines.len(), 21);
    for line in &lines {
        let number = |name: &str| line[name].as_f64().unwrap_or_else(|| panic!("{name} of {line}"));
        assert!(
            number("us") > 0.0 && number("baseline_us") > 0.0 && number("ratio") > 0.0,
            "{line}"
        );
        let gains = !["all_to_all", "broadcast"].contains(&line["op"].as_str().unwrap());
        let windowed = gains && line["rms_norm"].is_null();
        assert_eq!(line["windowed_us"].as_f64().is_some(), windowed, "{line}");
        // Op and baseline must compute the same result; elements that were not written would be
        // NaN.
        assert!(number("rel_error") < 0.01, "{line}");
        let about =
            ["rccl", "hipblaslt", "clock", "device"].map(|name| line[name].as_str().unwrap());
        assert_eq!(about, ["2.27.7", "1.2.2", "host", "2 x a fake of HIP"]);
        assert!(line.get("nccl").is_none() && line.get("cublaslt").is_none(), "{line}");
    }
}

fn a_call_is_timed_with_the_plan_of_more_rows() {
    let cases = "[[row]]\nop = \"matmul_all_reduce\"\nvariants = [\"unfused\", \"two_shot\"]\n\
                 larger_plan = 32\nshapes = [[16, 64, 32], [32, 64, 32]]\n";
    let (out, lines, _) = bench(Fake::with_libraries(), cases);
    assert!(out.contains("2 shapes, 0 failed, 0 wrong"), "{out}");
    // The first variant is timed so, if the call has fewer rows than the plan.
    let timed = |line: &serde_json::Value| (line["larger_plan"].as_u64(), line["m"].as_u64());
    let [first, rest @ ..] = &lines[..] else { panic!("no line: {out}") };
    assert_eq!((timed(first), lines.len()), ((Some(32), Some(16)), 4));
    let number = |name: &str| first[name].as_f64().unwrap_or_else(|| panic!("{name} of {first}"));
    assert!(number("larger_plan_us") > 0.0 && number("larger_plan_ratio") > 0.0, "{first}");
    assert!(number("rel_error") < 0.01, "{first}");
    for line in rest {
        assert!(line["larger_plan"].is_null() && line["larger_plan_us"].is_null(), "{line}");
    }
}

fn what_comes_in_parts_is_added_by_the_library() {
    let products = ["matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_gather"];
    let case = |op: &str| {
        format!(
            "[[row]]\nop = \"{op}\"\nvariants = [\"copy_engine\"]\ntile = [4, 64]\n\
             shapes = [[16, 64, 32]]\n"
        )
    };
    for op in products {
        let (out, lines, calls) = bench(Fake::with_libraries(), &case(op));
        assert!(out.contains("1 shapes, 0 failed, 0 wrong"), "{out}");
        assert_eq!(failed(&calls), [""; 0]);
        assert!(lines[0]["rel_error"].as_f64().unwrap() < 0.01, "{lines:?}");
        let all = calls_of(&calls, PRODUCT);
        let [opened, sums] = launches(&calls, ["iris_open", "iris_sums"]);
        let adding = all.iter().filter(|call| call.contains("and C")).count();
        // Each call has two parts of eight rows, and the GEMM adds the other rank's rows to the
        // rows that a rank owns.
        assert_eq!(adding, if op == "matmul_all_gather" { 0 } else { 2 * opened }, "{op}");
        assert!(opened > 0 && all.len() >= 2 * opened, "{op}: {calls}");
        // The GEMM library has already added everything, so `iris_sums` only copies.
        let taken = if op == "matmul_reduce_scatter" { 0 } else { 2 * opened };
        assert_eq!(sums, taken, "{op}");
    }
}

fn a_library_that_refuses_is_quoted() {
    let case = |op: &str, shape: &str| format!("[[row]]\nop = \"{op}\"\nshapes = [{shape}]\n");
    let refuses = ("FAKE_RCCL_REFUSES", "1");
    let note = |set: &[(&str, &str)], case: &str| {
        let (_, lines, _) = bench_with(Fake::with_libraries(), case, set);
        lines[0].get("note").map(|note| note.as_str().unwrap().to_owned())
    };
    let gather = case("all_gather", "[8, 64, 0]");
    let said = note(&[refuses], &gather).unwrap();
    assert_eq!(
        said,
        "no baseline: ncclGetUniqueId: unhandled system error: scratch memory is reclaimed; \
         HSA_NO_SCRATCH_RECLAIM is not set, and RCCL refuses some devices without it: set it to 1 \
         (code 2), expected success; `iris doctor` says which library is there"
    );
    assert_eq!(note(&[refuses, ("HSA_NO_SCRATCH_RECLAIM", "1")], &gather), None);
    // An error of one library is reported as such, and not as two missing libraries.
    let others = ("IRIS_HIPBLASLT", "/nowhere/libhipblaslt.so");
    assert_eq!(note(&[refuses, others], &gather), Some(said));
    // A hipBLASLt without kernels for the device must not end the benchmark.
    let none = ("FAKE_BLASLT_NO_KERNELS", "1");
    let said = note(&[none], &case("matmul", "[16, 64, 32]")).unwrap();
    assert!(
        said.contains("no baseline: hipBLASLt 1.2.2 has no algorithm for 16 x 64 x 32"),
        "{said}"
    );
}

fn without_libraries_ops_are_timed_alone() {
    let cases = "[[row]]\nop = \"barrier\"\ndtype = \"f32\"\nshapes = [[0, 0, 0]]\n\
                 [[row]]\nop = \"all_gather\"\nshapes = [[8, 64, 0]]\n";
    let (out, lines, _) = bench(Fake::of(7), cases);
    // Each missing library is reported once.
    let missing = ["RCCL none: RCCL (librccl.so) is not there", "hipBLASLt none: hipBLASLt (lib"];
    for missing in missing {
        assert_eq!(out.matches(missing).count(), 1, "{out}");
    }
    assert!(!out.contains("no baseline") && out.contains("2 shapes, 0 failed, 0 wrong"), "{out}");
    for line in lines {
        assert!(line["us"].as_f64().unwrap() > 0.0, "{line}");
        assert!(line.get("ratio").is_none() && line.get("rel_error").is_none(), "{line}");
    }
}

fn a_benchmark_that_was_cut_off_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let [cases, file] = ["cases.toml", "lines.jsonl"].map(|name| folder.path().join(name));
    let row = |rest: &str| format!("[[row]]\nop = \"all_reduce\"\nshapes = [[8, 64, 0]]\n{rest}\n");
    let rows =
        [row("variants = [\"ll\", \"one_shot\"]"), row("rms_norm = 1e-5"), row("layers = 4")];
    std::fs::write(&cases, rows.concat()).unwrap();
    let run = |commit: &str, more: &[&str]| {
        let [cases, file] = [&cases, &file].map(|path| path.to_str().unwrap());
        let words = ["bench", "--backend", "hip", "--cases", cases, "--json", file];
        let words = [&words[..], &["--limit", "36000"], more].concat();
        let iris = Path::new(env!("CARGO_BIN_EXE_iris"));
        // A fault in an exit handler of a library must not make the benchmark fail.
        let set = [("IRIS_COMMIT", commit), ("FAKE_RCCL_ABORTS_AT_EXIT", "1")];
        let (output, _) = Fake::with_libraries().run(iris, &words, &set);
        let [out, error] = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap());
        assert!(output.status.success(), "{out}{error}");
        let lines = std::fs::read_to_string(file).unwrap();
        (lines.lines().map(str::to_owned).collect::<Vec<_>>(), error)
    };
    let (all, _) = run("a", &[]);
    assert_eq!(all.len(), 4);
    // For each set of lines that a run has left: number of shapes that are measured by the next.
    let wrong = all[2].replace("\"rel_error\":0", "\"rel_error\":7");
    for (left, shapes, added) in [
        (&all[..], 0, 0),
        (&all[..3], 1, 1),
        (&all[1..], 1, 2),
        (&[all[3].clone()], 2, 3),
        (&[wrong, all[3].clone()], 2, 3),
        (&[], 3, 4),
    ] {
        std::fs::write(&file, left.iter().map(|line| format!("{line}\n")).collect::<String>())
            .unwrap();
        let (lines, said) = run("a", &["--resume"]);
        assert!(said.contains(&format!("{shapes} of 3 shapes are left")), "{said}");
        assert_eq!(lines.len(), left.len() + added, "{lines:?}");
        assert!(lines.starts_with(left), "{lines:?}");
    }
    let (lines, said) = run("b", &["--resume"]);
    assert!(said.contains("3 of 3 shapes are left") && lines.len() == 8, "{said}");
    std::fs::write(&file, "no JSON").unwrap();
    let words = ["bench", "--backend", "hip", "--resume", "--json", file.to_str().unwrap()];
    let iris = Path::new(env!("CARGO_BIN_EXE_iris"));
    let (output, _) = Fake::with_libraries().run(iris, &words, &[]);
    let error = String::from_utf8_lossy(&output.stderr);
    let named = error.contains("lines.jsonl") && error.contains("a JSON object per line");
    assert!(output.status.code() == Some(2) && named, "{error}");
}

fn a_tuning_file_need_not_be_there_before() {
    let folder = tempfile::tempdir().unwrap();
    let [cases, file] = ["cases.toml", "tuned.toml"].map(|name| folder.path().join(name));
    // No tuning rows are made for weighted parts, so the second row is left out.
    let [plain, parts] = ["all_to_all\"", "all_reduce\"\ncombine = 3"]
        .map(|op| format!("[[row]]\nop = \"{op}\nshapes = [[8, 64, 0]]\n"));
    std::fs::write(&cases, plain + &parts).unwrap();
    let words = ["tune", "--backend", "hip", "--limit", "36000", "--cases"];
    let words = [&words[..], &[cases.to_str().unwrap()]].concat();
    let set = [("IRIS_TUNING", file.to_str().unwrap())];
    // The second run replaces the file of the first.
    for _ in 0..2 {
        let iris = Path::new(env!("CARGO_BIN_EXE_iris"));
        let (output, _) = Fake::of(7).run(iris, &words, &set);
        let out = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{out}{}", String::from_utf8_lossy(&output.stderr));
        assert!(out.contains("1 shapes with 2 ranks: ") && file.exists(), "{out}");
    }
}
