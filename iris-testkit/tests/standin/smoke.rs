//! Smoke test of the enqueue logs, which CI runs: logs must match the calls and be the same in
//! every run.

use anyhow::Result;
use iris_heap::{BackendKind, DType, World, abi::abort};
use iris_kernels::{args::OpArgs, rtc, source};
use iris_ops::comm::{Comm, Options};
use iris_ops::{Device, Op};
use iris_testkit::suite::{Case, Options as CaseOptions};

use crate::calls::{Calls, Captured, heap};
use crate::cases::{Call, Extent, Planned, all};
use crate::library::{Machine, Standin, refuse_products};
use crate::logs::{captures, of_case, title};

/// Finds the case with the title `wanted`.
fn case(machine: &Machine, wanted: &str) -> Planned {
    let mut all = all(machine.backend(), Extent::Few).into_iter();
    all.find(|planned| title(planned) == wanted).unwrap_or_else(|| panic!("no case {wanted}"))
}

/// Runs `rank` on each of two ranks, with the operator and the calls of the case titled `wanted`.
fn on_two<T: Send>(
    machine: &Machine,
    wanted: &str,
    rank: impl Fn(&Calls<'_>, &Standin) -> Result<T> + Sync,
) -> Vec<T> {
    on_two_of(machine, &case(machine, wanted), rank)
}

/// Runs `rank` on each of two ranks, with the operator and the calls of a case.
fn on_two_of<T: Send>(
    machine: &Machine,
    planned: &Planned,
    rank: impl Fn(&Calls<'_>, &Standin) -> Result<T> + Sync,
) -> Vec<T> {
    let all = World::run_threads(2, |world| -> Result<T> {
        let standin = Standin::get(machine.backend());
        standin.rank(world.rank());
        let heap = heap(&world, machine, planned)?;
        rank(&Calls::new(planned, &heap)?, standin)
    });
    all.unwrap()
}

/// Short form of each log line: its function and kernel; for a copy, its function and the memory
/// that it writes.
fn steps(log: &str) -> Vec<String> {
    let step = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let what = words.get(2).map_or("", |it| it.split('+').next().unwrap_or_default());
        format!("{} {} {what}", words[0], words[1])
    };
    log.lines().map(step).collect()
}

/// Value of the field `name` in the first launch of `kernel` in the log.
fn field<'a>(log: &'a str, kernel: &str, name: &str) -> Option<&'a str> {
    let line = log.lines().find(|line| line.split(' ').nth(2) == Some(kernel));
    let line = line.unwrap_or_else(|| panic!("no launch of {kernel} in {log}"));
    line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
}

/// Tests that the stand-in compiler's image has the parameter layout that the host uses.
fn parameters_lie_as_the_host_has_them(machine: &Machine) {
    let vendor = rtc::Vendor::of(&format!("sm_{}", machine.arch));
    let source = source::kernel("copied").unwrap().into();
    let options = rtc::Options::new().define("IRIS_THREADS", 512);
    let image = rtc::compile(vendor, source, &options, "sm_90a").unwrap();
    let image = String::from_utf8_lossy(&image).into_owned();
    let has = |line: &str| assert!(image.lines().any(|it| it == line), "{line} in {image}");
    has(&format!("type OpArgs {}", size_of::<OpArgs>()));
    for (name, at, kind, bytes) in [
        ("heap.data", std::mem::offset_of!(OpArgs, heap) + 8, "u64", 8),
        ("c.rows", std::mem::offset_of!(OpArgs, c) + 16, "u32", 4),
        ("epsilon", std::mem::offset_of!(OpArgs, epsilon), "float", 4),
        ("sources", std::mem::offset_of!(OpArgs, sources), "u32", 4),
    ] {
        let count = if name == "heap.data" { 64 } else { 1 };
        has(&format!("field {name} {kind} {at} {bytes} {count}"));
    }
    has("kernel iris_gate OpArgs args u32 source u64 first u32 parts");
    has("options IRIS_THREADS=512");
}

/// Tests the log of a call that gathers A by copy engines: each step must be on its stream and have
/// its offsets.
fn a_call_is_logged_step_by_step(machine: &Machine) {
    const CASE: &str = "all_gather_matmul copy_engine 8192x3584 bf16 plain";
    let logs = on_two(machine, CASE, |calls, standin| {
        let stream = calls.heap().stream()?;
        let way = &calls.planned().calls[0];
        calls.run(way, 16, &stream)?;
        standin.take();
        calls.run(way, 16, &stream)?;
        Ok(standin.take())
    });
    for (rank, log) in logs.iter().enumerate() {
        let peer = 1 - rank;
        let expected = [
            "cuLaunchKernelEx s0 iris_open",
            "cuEventRecord s0 e0",
            "cuStreamWaitEvent s1 e0",
            &format!("cuMemcpyAsync s1 {peer}.0"),
            &format!("cuMemcpyAsync s1 {peer}.1"),
            "cuEventRecord s1 e1",
            "cuLaunchKernelEx s0 iris_gemm",
            "cuLaunchKernelEx s0 iris_gate",
            "cuLaunchKernelEx s0 iris_gemm",
            "cuStreamWaitEvent s0 e1",
            "cuLaunchKernel s0 iris_close",
        ];
        assert_eq!(steps(log), expected, "{log}");
        let gate = |name| field(log, "iris_gate", name);
        assert_eq!(
            [gate("m"), gate("k"), gate("a.rows")],
            [Some("16"), Some("0"), Some("8")].map(|it| it.filter(|it| *it != "0"))
        );
        assert_eq!(gate("source"), (peer > 0).then_some("1"));
        assert_eq!(gate("parts"), Some("1"));
        assert_eq!(gate("heap.data[1]"), Some("1.0+0x0"));
        // Tensor maps as the log shows them: B is row-major, in boxes of 64 columns; types and
        // swizzles have the driver's numbers.
        let a = field(log, "iris_gemm", "a").unwrap();
        assert!(a.starts_with(&format!("map({rank}.0+0x")) && a.ends_with("type9/0/3/3/0)"), "{a}");
    }
}

/// Tests that a GEMM that stores to peers is launched for the rows of a call, and not for those of
/// the plan: with the build and the grid of a plan for 256 rows, in one wave.
fn a_call_of_few_rows_has_the_launch_of_its_own_plan(machine: &Machine) {
    let launched = |most| {
        let options =
            CaseOptions::new(most, 8192, 3584).dtype(DType::BF16).backend(BackendKind::Cuda);
        let case = Case::new(Op::MatmulAllReduce, "epilogue", options);
        let calls = vec![Call { what: String::new(), case: case.clone(), bias: DType::BF16 }];
        let planned = Planned { what: String::new(), case, calls };
        on_two_of(machine, &planned, |calls, standin| {
            let stream = calls.heap().stream()?;
            standin.take();
            calls.run(&planned.calls[0], 256, &stream)?;
            let log = standin.take();
            let line = log.lines().find(|line| line.contains(" iris_gemm_scatter "));
            let line = line.unwrap_or_else(|| panic!("no GEMM stores to peers: {log}"));
            // Build and grid come before the parameters, whose addresses depend on the plan.
            Ok(line.split(" |").next().unwrap().to_owned())
        })
    };
    let [large, own] = [8192, 256].map(launched);
    assert_eq!(large, own);
    // Two owners have one row of 64 tiles each, and the device has 132 multiprocessors.
    for word in ["IRIS_GEMM_CLUSTER=1", "IRIS_GEMM_WIDTH=128", " 128x384 "] {
        assert!(own[0].contains(word), "{word} in {}", own[0]);
    }
}

/// Tests that a product that cuBLASLt refuses when it is enqueued is done by the built-in
/// whole-matrix GEMM, and not by the tile GEMM.
fn a_product_that_the_library_refuses_is_done_by_our_gemm(machine: &Machine) {
    let options = CaseOptions::new(8192, 8192, 3584).dtype(DType::BF16).backend(BackendKind::Cuda);
    let case = Case::new(Op::Matmul, "auto", options);
    let calls = vec![Call { what: String::new(), case: case.clone(), bias: DType::BF16 }];
    let planned = Planned { what: String::new(), case, calls };
    let called = |refused| {
        refuse_products(refused);
        let logs = on_two_of(machine, &planned, |calls, standin| {
            let stream = calls.heap().stream()?;
            standin.take();
            calls.run(&planned.calls[0], 512, &stream)?;
            Ok(steps(&standin.take()))
        });
        refuse_products(0);
        logs.into_iter().map(|log| log.join("\n")).collect::<Vec<_>>()
    };
    for log in called(0) {
        assert!(log.starts_with("Matmul s0"), "{log}");
    }
    for log in called(512) {
        assert_eq!(log, "cuLaunchKernelEx s0 iris_gemm");
    }
}

/// Tests captures: a stream that a captured call uses must join the capture, and a refused call
/// must not end the capture.
fn captures_are_kept(machine: &Machine) {
    const CASE: &str = "all_reduce two_shot 8192x0 bf16 plain";
    on_two(machine, CASE, |calls, standin| {
        let heap = calls.heap();
        let (way, other) = (&calls.planned().calls[0], heap.stream()?);
        let captured = Captured::new(heap, machine)?;
        calls.run(way, 16, &other)?;
        standin.take();
        calls.run(way, 16, &other)?;
        let eager = standin.take();
        let ended = captured.capture(|stream| {
            calls.run(way, 16, stream).unwrap();
            let refused = stream.sync().unwrap_err().to_string();
            assert!(refused.contains("captured"), "{refused}");
            assert!(heap.check().is_ok());
        });
        assert_eq!(ended, Ok(()));
        let log = captures(&standin.take());
        assert!(log.starts_with(&eager) && !eager.is_empty(), "{log} begins with {eager}");
        let fork = |joins: bool| {
            captured.capture(|stream| {
                other.wait(&stream.record().unwrap()).unwrap();
                calls.run(way, 16, &other).unwrap();
                if joins {
                    stream.wait(&other.record().unwrap()).unwrap();
                }
            })
        };
        assert_eq!(fork(false), Err(904));
        assert_eq!(fork(true), Ok(()));
        // Two captures in progress at once: calls of each are ordered on its own stream. On a second
        // stream a call cannot be ordered behind the last one of its capture, and is refused.
        let apart = Captured::new(heap, machine)?;
        let ended = captured.capture(|stream| {
            calls.run(way, 16, stream).unwrap();
            assert_eq!(apart.capture(|stream| calls.run(way, 16, stream).unwrap()), Ok(()));
            calls.run(way, 16, stream).unwrap();
            assert_eq!(apart.capture(|stream| calls.run(way, 16, stream).unwrap()), Ok(()));
            other.wait(&stream.record().unwrap()).unwrap();
            let error = format!("{:#}", calls.run(way, 16, &other).unwrap_err());
            assert!(error.contains("an op of another capture was issued since"), "{error}");
        });
        // The graph must be discarded, as after any refused call.
        assert_eq!(ended, Err(901));
        // An event that was recorded before the capture is not part of the graph, so waiting for it
        // breaks the capture.
        let before = other.record()?;
        let ended = captured.capture(|stream| {
            let error = stream.wait(&before).unwrap_err().to_string();
            assert!(error.contains("STREAM_CAPTURE_ISOLATION"), "{error}");
        });
        assert_eq!(ended, Err(901));
        Ok(())
    });
}

/// Tests that a peer that is lost after the last call does not make a `sync` fail, and that another
/// abort does.
fn a_loss_after_the_last_call_harms_no_result(machine: &Machine) {
    const CASE: &str = "all_reduce two_shot 8192x0 bf16 plain";
    for (lost, harms) in [(true, false), (false, true)] {
        on_two(machine, CASE, |calls, _| {
            let (heap, stream) = (calls.heap(), calls.heap().stream()?);
            calls.run(&calls.planned().calls[0], 16, &stream)?;
            let peer = 1 - heap.local_rank() as i32;
            let code = if lost { abort::PEER_LOST + peer } else { abort::USER };
            heap.control().set_host_abort(code);
            assert_eq!(stream.sync().is_err(), harms, "{code}");
            assert!(heap.check().is_err(), "{code}");
            Ok(())
        });
    }
}

/// Tests that a communicator whose close is refused in a capture stays open on all ranks.
fn a_communicator_is_not_closed_in_a_capture(machine: &Machine) {
    World::run_threads(2, |world| -> Result<()> {
        let standin = Standin::get(machine.backend());
        standin.rank(world.rank());
        let options = Options::new().max_bytes(4096);
        let comm = Comm::from_world(machine.backend(), &world, &options)?;
        let captured = world.rank() == 0;
        if captured {
            standin.begin_capture(comm.stream().raw_handle());
        }
        let error = format!("{:#}", comm.close().unwrap_err());
        assert!(error.contains(if captured { "captured" } else { "rank 0" }), "{error}");
        if captured {
            assert_eq!(standin.end_capture(comm.stream().raw_handle()), Ok(()));
        }
        comm.barrier()?;
        comm.close()?;
        Ok(world.close()?)
    })
    .unwrap();
}

/// Tests that exactly the call fails that a test asks to fail, once.
fn a_call_fails_on_request(machine: &Machine) {
    const CASE: &str = "matmul_all_reduce two_shot 8192x3584 bf16 plain";
    on_two(machine, CASE, |calls, standin| {
        let stream = calls.heap().stream()?;
        let way = &calls.planned().calls[0];
        calls.run(way, 16, &stream)?;
        standin.take();
        for (function, number) in [("", 1), ("cuLaunchKernelEx", 1)] {
            standin.fail(function, number);
            let error = format!("{:#}", calls.run(way, 16, &stream).unwrap_err());
            let expected = "cuLaunchKernelEx of iris_two_shot: 64 groups of 256 threads: \
                            CUDA_ERROR_LAUNCH_FAILED (code 719)";
            assert!(error.contains(expected), "{error}");
            assert_eq!(standin.failed().as_deref(), Some("cuLaunchKernelEx"));
            assert!(standin.take().starts_with("FAILED cuLaunchKernelEx s0 iris_two_shot "));
        }
        standin.fail("cuEventRecord", 1);
        calls.run(way, 16, &stream)?;
        assert_eq!((standin.failed(), steps(&standin.take()).len()), (None, 1));
        Ok(())
    });
}

/// Tests every operator and variant: two runs have the same log, without host addresses or invalid
/// parameters.
fn logs_are_the_same_in_every_run(machine: &Machine) {
    let mut launched = Vec::new();
    let mut cases = all(machine.backend(), Extent::Few);
    // Only small cases run on backends other than CUDA, because HIP clears new memory, which is
    // slow.
    let is_small = |planned: &Planned| planned.case.options.n < 8192;
    cases.retain(|planned| machine.backend() == BackendKind::Cuda || is_small(planned));
    for planned in cases {
        let [first, second] = [(); 2].map(|()| of_case(&planned, machine, 2).unwrap());
        assert_eq!(first, second, "{}", title(&planned));
        for log in &first {
            for odd in ["NO MAP", "FAILED", "ends with", "=host", "does not compile"] {
                assert!(!log.contains(odd), "{odd} in {}: {log}", title(&planned));
            }
        }
        if first[0].contains("Launch") {
            launched.push((planned.case.op, planned.case.variant.clone()));
        }
    }
    let device = Device::of_rank(machine.backend(), 0).unwrap();
    for op in Op::ALL {
        for variant in op.variants_on(device) {
            let one = (op, variant.name().to_owned());
            assert!(launched.contains(&one), "nothing is launched by {one:?}");
        }
    }
}

/// Runs the smoke test with the stand-ins of one machine; called in a child process.
pub(crate) fn run(machine: &Machine) {
    if machine.backend() == BackendKind::Cuda && machine.arch == "90" && !machine.library {
        parameters_lie_as_the_host_has_them(machine);
        a_call_is_logged_step_by_step(machine);
        a_call_of_few_rows_has_the_launch_of_its_own_plan(machine);
        captures_are_kept(machine);
        a_loss_after_the_last_call_harms_no_result(machine);
        a_communicator_is_not_closed_in_a_capture(machine);
        a_call_fails_on_request(machine);
    }
    if machine.backend() == BackendKind::Cuda && machine.library {
        a_product_that_the_library_refuses_is_done_by_our_gemm(machine);
    }
    logs_are_the_same_in_every_run(machine);
}
