//! Enqueues that operators make on GPU drivers, tested with stand-ins for driver, compiler and GEMM
//! library (`standin/*.cpp`), which run no kernel and log every enqueue.

use std::path::Path;
use std::process::ExitCode;

use iris_heap::BackendKind;
use iris_kernels::vendor::{Blas, Dialect};
use iris_testkit::allocations::Counting;
use iris_testkit::harness::{self, Group, named};

#[path = "standin/ahead.rs"]
mod ahead;
#[path = "standin/allocations.rs"]
mod allocations;
#[path = "standin/calls.rs"]
mod calls;
#[path = "standin/cases.rs"]
mod cases;
#[path = "standin/decode.rs"]
mod decode;
#[path = "standin/failures.rs"]
mod failures;
#[path = "standin/gemms.rs"]
mod gemms;
#[path = "standin/library.rs"]
mod library;
#[path = "standin/logs.rs"]
mod logs;
#[path = "standin/sizes.rs"]
mod sizes;
#[path = "standin/smoke.rs"]
mod smoke;

use cases::Extent;
use library::{CHILD, Machine, child, child_of};

/// Environment variables of a child process: the architecture and number of devices that the
/// stand-in (fake) driver shows, and the child's task.
const ARCH: &str = "STANDIN_ARCH";
const DEVICES: &str = "STANDIN_DEVICES";
const FOLDER: &str = "STANDIN_LOGS";
const WORLDS: &str = "STANDIN_WORLDS";

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn main() -> ExitCode {
    if let Ok(name) = std::env::var(CHILD) {
        let machine = machine_of_child();
        match name.as_str() {
            "logs" => {
                let folder = std::env::var(FOLDER).unwrap();
                logs::write(Path::new(&folder), &machine, &worlds_of_child(), Extent::All).unwrap();
            }
            "smoke" => smoke::run(&machine),
            "allocations" => allocations::check(&machine, 2).unwrap(),
            "decode" => decode::run(&machine),
            "sizes" => sizes::run(&machine),
            "gemms" => gemms::run(&machine),
            "unload" => unload(),
            "precompile" => ahead::precompile(&machine),
            "operators" => ahead::operators(&machine, &worlds_of_child()),
            "failures" => {
                let worlds = std::env::var(WORLDS).unwrap_or("2".into());
                failures::table(&machine, worlds.parse().unwrap()).unwrap();
            }
            other => panic!("no child is called {other}"),
        }
        return ExitCode::SUCCESS;
    }
    let tests = named![
        on_sm_90,
        on_sm_80,
        on_gfx942,
        with_a_library_of_products,
        a_decode_step_waits_for_nothing_between_its_launches,
        messages_of_all_sizes_have_their_kernels,
        products_are_launched_as_plans_predict,
        no_call_allocates_after_the_first_of_its_problem,
        a_library_stays_loaded_until_the_process_ends,
        without_a_compiler_kernels_come_from_the_folder_or_are_named,
        each_enqueue_that_fails_leaves_a_call_to_retry_or_a_poisoned_heap
    ];
    harness::run_together(vec![
        Group::new(harness::no_program("g++"), tests),
        Group::new(harness::no_program("g++"), named![logs]).slow(),
    ])
}

/// Runs the smoke test in a child process on a machine with a stand-in (fake) driver.
fn smoke_on(arch: &'static str, library: bool) {
    let output = child("smoke", Machine { arch, devices: 2, library }, &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn on_sm_90() {
    smoke_on("90", false);
}

fn on_sm_80() {
    smoke_on("80", false);
}

fn on_gfx942() {
    smoke_on("gfx942", false);
}

fn with_a_library_of_products() {
    smoke_on("90", true);
}

/// Tests that a vendor's GEMM library is never unloaded, because threads of the library may still
/// run.
fn a_library_stays_loaded_until_the_process_ends() {
    let output = child("unload", Machine { arch: "90", devices: 1, library: true }, &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn unload() {
    drop(Blas::load(&Dialect::CUBLASLT, &[]).unwrap());
    let mapped = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(mapped.contains("libcublasLt.so.13"), "the library is unloaded");
}

fn worlds_of_child() -> Vec<usize> {
    std::env::var(WORLDS).unwrap().split(',').map(|it| it.parse().unwrap()).collect()
}

fn machine_of_child() -> Machine {
    let get = |name| std::env::var(name).unwrap();
    let devices = get(DEVICES).parse().unwrap();
    let machine = Machine { arch: get(ARCH).leak(), devices, library: false };
    let library = match machine.backend() {
        BackendKind::Hip => "IRIS_HIPBLASLT",
        _ => "IRIS_CUBLASLT",
    };
    Machine { library: Path::new(&get(library)).exists(), ..machine }
}

/// Writes the logs of all cases to the folder in `STANDIN_LOGS`, for the machines and numbers of
/// ranks in the other variables.
fn logs() {
    let Ok(folder) = std::env::var(FOLDER) else {
        println!("{FOLDER} does not name a folder: nothing is written");
        return;
    };
    let worlds = std::env::var(WORLDS).unwrap_or("1,2,3,4,5,6,7,8".into());
    let list = |name: &str, otherwise: &str| {
        let text = std::env::var(name).unwrap_or(otherwise.into());
        text.split(',').map(str::to_owned).collect::<Vec<_>>()
    };
    for arch in list(ARCH, "90,80,100") {
        for devices in list(DEVICES, "8,1") {
            for library in list("STANDIN_LIBRARY", "no,yes") {
                let devices = devices.parse().unwrap();
                let machine =
                    Machine { arch: arch.clone().leak(), devices, library: library == "yes" };
                let set = [(FOLDER, &*folder), (WORLDS, &*worlds)];
                let output = child("logs", machine, &set);
                let said = String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success(), "{machine:?}: {said}");
            }
        }
    }
}

/// Tests that the host does not wait for the device within a decode step, captured or not, on CUDA
/// and on HIP.
fn a_decode_step_waits_for_nothing_between_its_launches() {
    for arch in ["90", "gfx942"] {
        let output = child("decode", Machine { arch, devices: 4, library: false }, &[]);
        assert!(output.status.success(), "{arch}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Tests that calls of all sizes find their kernels, those of messages in packs among them.
fn messages_of_all_sizes_have_their_kernels() {
    let output = child("sizes", Machine { arch: "90", devices: 4, library: false }, &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Tests that the built-in GEMM is launched with the kernel, build and grid that plans predict.
fn products_are_launched_as_plans_predict() {
    let output = child("gemms", Machine { arch: "90", devices: 4, library: false }, &[]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    print!("{said}");
}

/// Tests that only first calls allocate: on CUDA without and with a GEMM library, and on HIP.
fn no_call_allocates_after_the_first_of_its_problem() {
    for (arch, library) in [("90", false), ("90", true), ("gfx942", true)] {
        let output = child("allocations", Machine { arch, devices: 2, library }, &[]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arch}, library: {library}: {said}");
        print!("{}", String::from_utf8_lossy(&output.stdout));
    }
}

/// Tests the failure of each enqueue of a call, on CUDA without and with a GEMM library.
fn each_enqueue_that_fails_leaves_a_call_to_retry_or_a_poisoned_heap() {
    for library in [false, true] {
        let output = child("failures", Machine { arch: "90", devices: 8, library }, &[]);
        let said = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
    }
}

/// Tests a machine without a compiler. Kernels are compiled ahead of time into the folder of a copy
/// of this program, and the copy must make operators from them. If whole-matrix GEMMs are then
/// removed from the folder, operators must return an error instead of taking other kernels.
fn without_a_compiler_kernels_come_from_the_folder_or_are_named() {
    let own = std::env::current_exe().unwrap();
    let folder = tempfile::tempdir_in(own.parent().unwrap()).unwrap();
    let (program, kernels) = (folder.path().join("standin"), folder.path().join("kernels"));
    std::fs::hard_link(&own, &program).unwrap();
    let run = |name, set: &[(&str, &str)]| {
        let machine = Machine { arch: "90", devices: 8, library: false };
        let output = child_of(&program, name, machine, set);
        let [said, wrong] = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap());
        assert!(output.status.success(), "{said}{wrong}");
        said
    };
    run("precompile", &[]);
    let cache = folder.path().join("cache");
    let operators = |worlds| {
        let cache = cache.to_str().unwrap();
        run("operators", &[("IRIS_NVRTC", "/nowhere"), ("IRIS_CACHE", cache), (WORLDS, worlds)])
    };
    assert_eq!(operators("1,2,3,8"), "");
    for file in std::fs::read_dir(&kernels).unwrap().flatten() {
        if file.file_name().to_string_lossy().starts_with("gemm_sm90") {
            std::fs::remove_file(file.path()).unwrap();
        }
    }
    let refused = operators("3");
    let folder = kernels.display().to_string();
    for line in refused.lines() {
        let named =
            ["gemm_sm90", " for sm_90a ", &folder, "/nowhere", "`iris kernels --arch sm_90a "];
        assert!(named.iter().all(|it| line.contains(it)), "{line}");
    }
    assert!(refused.lines().count() > 0, "every operator is made without its kernels");
}
