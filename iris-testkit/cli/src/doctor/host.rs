//! Checks of the host: limits, folders, variables and the CPU backend.

use std::path::Path;
use std::process::Command;
use std::time::SystemTime;

use iris_heap::{BackendKind, Bytes, Limit, World, env, host_memory};
use iris_kernels::cache::{Cache, carried_folder};
use iris_ops::{
    AllReduce, CollectiveArgs, HeapReserve, MatRef, Plan, Topology, TuningFile, all_reduce,
};
use rustix::fs::statvfs;

use super::{Finding, Section, State, Verdict};
use crate::bench::origin::{date, provenance};

/// Number of file descriptors that one process of a job of 64 ranks needs, for its sockets and for
/// the shared memory of all ranks.
const DESCRIPTORS: u64 = 512;

/// Runs the checks of the host that apply to every backend.
pub(super) fn section() -> Section {
    let mut findings = vec![
        Finding::new(State::Ok, "iris", version()),
        Finding::new(State::Ok, "system", system()),
        memory(),
        shared_memory(),
        descriptors(),
        cache(),
        kernels(),
        world(),
    ];
    let unknown = env::unknown();
    findings.extend(
        unknown
            .iter()
            .map(|it| Finding::new(State::Warning, "variable", it).remedy("correct or unset it")),
    );
    findings[0].details = variables();
    Section { title: "host", findings }
}

/// Tests the CPU backend with a small all-reduce: two ranks, as threads, sum known numbers.
pub(super) fn cpu() -> (Section, Verdict) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let outcome = sum_of_two();
    let state = if outcome.is_ok() { State::Ok } else { State::Error };
    let found = match &outcome {
        Ok(()) => format!("{cores} cores; an all_reduce of two ranks is right"),
        Err(why) => format!("an all_reduce of two ranks fails: {why}"),
    };
    let obstacle = outcome.err().map(|error| error.to_string());
    let verdict = Verdict { backend: "cpu", obstacle };
    let findings = vec![Finding::new(state, "operators", found), tuning(BackendKind::Cpu, 2)];
    (Section { title: "CPU", findings }, verdict)
}

fn sum_of_two() -> anyhow::Result<()> {
    const LEN: usize = 1000;
    World::run_threads(2, |world| {
        let plan =
            all_reduce::Options::new(LEN).name("doctor").plan(Topology::from(&world).untuned())?;
        let heap = Plan::open_heap(&world, &[&plan], HeapReserve::matrices())?;
        let op = AllReduce::new(&heap, &plan)?;
        let (x, y) = (heap.full::<f32>(LEN, 1.0 + world.rank() as f32)?, heap.zeros::<f32>(LEN)?);
        let stream = heap.stream()?;
        op.run(&CollectiveArgs::new(MatRef::vector(x), MatRef::vector(y)), &stream)?;
        stream.sync()?;
        anyhow::ensure!(heap.read(y)? == [3.0; LEN], "the sum is wrong");
        op.free()?;
        heap.close()?;
        Ok(world.close()?)
    })?;
    Ok(())
}

/// Reports the tuning file, written by `iris tune`, that plans for `ranks` ranks read.
pub(super) fn tuning(kind: BackendKind, ranks: usize) -> Finding {
    let ranks = Topology::new(0, ranks).on(kind);
    let path = TuningFile::path(ranks);
    let details: Vec<_> = path.iter().map(|path| path.display().to_string()).collect();
    let finding = match path {
        None => Finding::new(State::None, "tuning", "built-in figures"),
        Some(path) if !path.exists() && std::env::var_os("IRIS_TUNING").is_some() => {
            Finding::new(State::Error, "tuning", format!("{} is not there", path.display()))
                .remedy("`iris tune` makes it; or set IRIS_TUNING=off, or unset it")
        }
        Some(path) if !path.exists() => {
            Finding::new(State::None, "tuning", format!("none for {} ranks", ranks.size))
                .remedy(format!("`iris tune --backend {kind}` measures this machine"))
        }
        Some(path) => match TuningFile::at(&path) {
            Ok(Some(file)) if file.holds_for(ranks) => {
                Finding::new(State::Ok, "tuning", format!("measured for {} ranks", ranks.size))
            }
            Ok(file) => {
                let of = file.map_or("no file".into(), |file| format!("a file for {file}"));
                Finding::new(
                    State::None,
                    "tuning",
                    format!("{of}, none for {} ranks here", ranks.size),
                )
            }
            Err(error) => Finding::new(State::Error, "tuning", error)
                .remedy("measure again with `iris tune`, or set IRIS_TUNING=off"),
        },
    };
    finding.details(details)
}

fn version() -> String {
    let about = provenance(BackendKind::Cpu, None);
    // Version and commit of this program. The text `about` has the form `CPU; commit; date`, of
    // which only the commit is used.
    let commit = about.split("; ").nth(1).unwrap_or("unknown");
    format!("{} ({commit}), {}", env!("CARGO_PKG_VERSION"), date(SystemTime::now()))
}

/// Name and release of the operating system.
fn system() -> String {
    let uname = Command::new("uname").args(["-srm"]).output();
    let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let pretty = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    let kernel = uname.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    let kernel = kernel.unwrap_or_else(|error| format!("uname: {error}"));
    format!("{}, {kernel}", pretty.unwrap_or("no /etc/os-release").trim_matches('"'))
}

/// Memory of the host, or of this process's control group if that can provide less. Heaps of the CPU
/// backend are allocated in it.
fn memory() -> Finding {
    let Some(host) = host_memory::of_host() else {
        return Finding::new(State::Warning, "memory", "/proc/meminfo cannot be read")
            .remedy("mount /proc");
    };
    let group = host_memory::of_group().filter(|group| group.0 < host.0);
    let (free, all) = group.unwrap_or(host);
    let of = if group.is_some() { ", the limit of this process's control group," } else { "" };
    let text = format!("{} of {}{of} available", Bytes::new(free), Bytes::new(all));
    match Bytes::new(free) < Bytes::gib(1) {
        true => Finding::new(State::Warning, "memory", text)
            .remedy("heaps of 512 MiB a rank may not fit; free some, or raise the limit"),
        false => Finding::new(State::Ok, "memory", text),
    }
}

/// Size of /dev/shm, which NCCL needs; iris itself uses anonymous files (memfd) for its heaps.
fn shared_memory() -> Finding {
    let place = Path::new("/dev/shm");
    match statvfs(place) {
        Ok(found) => {
            let free = Bytes::new(found.f_bavail.saturating_mul(found.f_frsize));
            let text = format!("{free} free");
            match free < Bytes::mib(64) {
                true => Finding::new(State::Warning, "/dev/shm", text)
                    .remedy("NCCL needs more (in a container: --shm-size); iris does not use it"),
                false => Finding::new(State::Ok, "/dev/shm", text),
            }
        }
        Err(error) => {
            Finding::new(State::Warning, "/dev/shm", error).remedy("NCCL needs it; iris does not")
        }
    }
}

fn descriptors() -> Finding {
    let limit = Limit::OpenFiles.value();
    let text = limit.map_or("unlimited".into(), |limit| limit.to_string());
    match limit {
        Some(limit) if limit < DESCRIPTORS => {
            Finding::new(State::Warning, "open files", format!("at most {text}"))
                .remedy(format!("64 ranks need {DESCRIPTORS}: `ulimit -n {DESCRIPTORS}`"))
        }
        _ => Finding::new(State::Ok, "open files", format!("at most {text}")),
    }
}

/// Limit of the memory that this user may lock; GPU drivers lock memory that they pin.
pub(super) fn locked_memory() -> Finding {
    let limit = Limit::LockedMemory.value().map(Bytes::new);
    match limit {
        Some(limit) if limit < Bytes::mib(64) => {
            Finding::new(State::Warning, "memlock", format!("at most {limit}"))
                .remedy("pinned memory may be refused: `ulimit -l unlimited`")
        }
        limit => Finding::new(
            State::Ok,
            "memlock",
            limit.map_or("unlimited".into(), |it| it.to_string()),
        ),
    }
}

fn cache() -> Finding {
    let folder = Cache::user_folder().display().to_string();
    match Cache::of_user() {
        Ok(cache) => {
            let files = std::fs::read_dir(cache.folder()).map_or(0, Iterator::count);
            Finding::new(State::Ok, "cache", format!("{files} files in {folder}"))
        }
        Err(error) => Finding::new(State::Error, "cache", error),
    }
}

/// Checks the folder of compiled kernels that came with the program.
fn kernels() -> Finding {
    let folder = carried_folder();
    let files = folder.as_ref().and_then(|folder| std::fs::read_dir(folder).ok());
    let place: Vec<_> = folder.iter().map(|folder| folder.display().to_string()).collect();
    match files {
        Some(files) => {
            Finding::new(State::Ok, "kernels", format!("{} came with iris", files.count()))
        }
        None => {
            Finding::new(State::None, "kernels", "none came with iris, so GPUs need a compiler")
        }
    }
    .details(place)
}

/// Reports the world (rank and number of ranks) that the launcher's environment variables describe.
fn world() -> Finding {
    match iris_heap::launched() {
        Ok(Some(world)) => Finding::new(State::Ok, "world", world),
        Ok(None) => {
            Finding::new(State::None, "world", "one rank, as no launcher has set variables")
        }
        Err(error) => Finding::new(State::Error, "world", error),
    }
}

/// Prefixes of the environment variables to list, because they affect how ranks run.
const PREFIXES: [&str; 15] = [
    "IRIS_",
    "CUDA_",
    "NVIDIA_",
    "NCCL_",
    "RCCL_",
    "HIPBLASLT_",
    "HIP_",
    "HSA_",
    "ROCR_",
    "ROCM_",
    "ROC_",
    "GPU_",
    "AMD_",
    "LD_LIBRARY_PATH",
    "MASTER_",
];

/// Lists the environment variables that are set and affect ranks, then all variables of iris with
/// their meaning.
fn variables() -> Vec<String> {
    let all = std::env::vars_os().map(|(name, value)| {
        (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned())
    });
    let is_listed = |name: &str| {
        let of_launcher = iris_heap::launcher_variables().any(|known| known == name);
        of_launcher || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
    };
    let set = all.filter(|(name, _)| is_listed(name));
    let mut lines: Vec<_> = set.map(|(name, value)| format!("{name}={value}")).collect();
    lines.sort();
    lines.extend(env::VARIABLES.iter().map(|it| format!("{}: {}", it.name, it.doc)));
    lines
}
