//! Test that launches of the built-in GEMM are those that the plan predicts: kernel, build, and
//! numbers of workgroups and threads, for every operator, variant and plan of the cases.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use iris_heap::World;
use iris_kernels::gemm::GemmLaunch;
use iris_ops::Topology;
use iris_testkit::suite::plan;

use crate::calls::{Calls, heap};
use crate::cases::{Extent, Planned, all};
use crate::library::{Machine, Standin};
use crate::logs::title;

/// Launches of the built-in GEMM in the log of a call: kernel, build and size.
fn launched(log: &str) -> Vec<String> {
    let words =
        log.lines().map(|line| line.split(' ').skip_while(|it| !it.starts_with("iris_gemm")));
    let launch = words.filter_map(|words| {
        let words: Vec<&str> = words.take_while(|it| *it != "|").collect();
        let (kernel, build) = (words.first()?, words.join(" "));
        let option = |name: &str| {
            let name = format!("IRIS_GEMM_{name}=");
            let value = build.split([' ', '{', '}']).find_map(|it| it.strip_prefix(&*name));
            value.unwrap_or("none").to_owned()
        };
        let size = words.iter().skip_while(|it| !it.ends_with('}')).nth(1)?;
        Some(format!("{kernel} {:?} {size}", OPTIONS.map(option)))
    });
    launch.collect()
}

/// Options of a build by which its launches differ.
const OPTIONS: [&str; 8] =
    ["WIDTH", "GROUPS", "CLUSTER", "STAGES", "HOLD", "FLIPPED", "A_ACROSS", "B_ACROSS"];

/// Text of a predicted launch, in the form of [`launched`].
fn predicted((kernel, GemmLaunch { config, grid }): (&str, GemmLaunch)) -> String {
    let flags = [config.hold, config.flipped, config.a_across, config.b_across].map(u32::from);
    let numbers = [config.width, config.groups, config.cluster, config.stages];
    let options: Vec<String> = numbers.iter().chain(&flags).map(u32::to_string).collect();
    format!("{kernel} {options:?} {}x{}", grid.groups, config.threads())
}

/// Compares the calls of a case; counts launches by kernel and number of waves.
fn rank(world: &World, machine: &Machine, planned: &Planned) -> Result<BTreeMap<String, usize>> {
    let standin = Standin::get(machine.backend());
    standin.rank(world.rank());
    let heap = heap(world, machine, planned)?;
    let mut counts = BTreeMap::new();
    if let Ok(calls) = Calls::new(planned, &heap) {
        let (case, ranks) = (&planned.case, Topology::from(&heap));
        let plan = plan(case.op, &case.variant, ranks, &case.options_of(ranks.rank))?;
        let stream = heap.stream()?;
        standin.take();
        for &m in &case.rows {
            if calls.run(&planned.calls[0], m, &stream).is_err() {
                standin.take();
                continue;
            }
            let (ours, log) = (plan.gemms_at(m), standin.take());
            let [wanted, found] = [ours.iter().copied().map(predicted).collect(), launched(&log)];
            ensure!(
                wanted == found,
                "{}, m={m}, rank {} of {}, {}: predicted {wanted:#?}, launched {found:#?}",
                title(planned),
                ranks.rank,
                ranks.size,
                plan.at(m).variant
            );
            for (kernel, GemmLaunch { grid, .. }) in ours {
                let waves = if grid.waves > 1 { "several waves" } else { "one wave" };
                *counts.entry(format!("{kernel} in {waves}")).or_default() += 1;
            }
        }
    }
    heap.close()?;
    Ok(counts)
}

/// Compares all calls with these numbers of ranks and prints how many launches were compared, in a
/// child process.
pub(crate) fn run(machine: &Machine) {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    // The builds of a call depend on the number of ranks only by the rows of an owner.
    for (size, extent) in [(1, Extent::Few), (2, Extent::All), (4, Extent::Few)] {
        let cases = all(machine.backend(), extent);
        for planned in cases.iter().filter(|it| it.case.op.multiplies()) {
            let found = World::run_threads(size, |world| rank(&world, machine, planned)).unwrap();
            for (kernel, count) in found.into_iter().flatten() {
                *counts.entry(kernel).or_default() += count;
            }
        }
    }
    println!("{counts:?}");
    for kernel in ["iris_gemm", "iris_gemm_gather", "iris_gemm_scatter"] {
        for waves in ["one wave", "several waves"] {
            assert!(counts.contains_key(&format!("{kernel} in {waves}")), "{kernel}: {counts:?}");
        }
    }
    for kernel in ["iris_gemm_exchange", "iris_gemm_one_shot"] {
        assert!(counts.contains_key(&format!("{kernel} in one wave")), "{kernel}: {counts:?}");
    }
}
