//! Tests of operators on a machine without a compiler, where a folder next to the program holds
//! compiled kernels.

use std::collections::HashMap;

use anyhow::Result;
use iris_heap::{HeapOptions, SymmetricHeap, World};
use iris_kernels::build::Build;
use iris_kernels::cache::{self, Cache};
use iris_kernels::rtc::{self, Compiler};
use iris_kernels::{Target, ahead_of_time};
use iris_ops::{AnyOp, Topology};
use iris_testkit::suite::plan;

use crate::calls::in_line;
use crate::cases::{Extent, Planned, all};
use crate::library::{Machine, Standin};
use crate::logs::title;

/// Fills the folder beside this program with an entry for each build that is compiled ahead of
/// time; runs in a child process. Builds of one source share an image, because the stand-in
/// compiler is slow and only the keys matter here.
pub(crate) fn precompile(machine: &Machine) {
    let arch = Target::nvidia(&format!("sm_{}", machine.arch)).arch;
    let (compiler, folder) =
        (Compiler::nvrtc().unwrap(), Cache::open(&cache::carried_folder().unwrap()).unwrap());
    let mut images = HashMap::new();
    for Build { source, options, .. } in ahead_of_time::builds(&arch) {
        let image = images.entry(source.name);
        let image =
            image.or_insert_with(|| compiler.compile(source.into(), &options, &arch).unwrap());
        folder.put(&rtc::key(source.into(), &options, &arch, None), image).unwrap();
    }
}

/// Makes operators with these numbers of ranks and prints a line for each that lacks a kernel; runs
/// in a child process. With two ranks it makes the operators of all cases. With other numbers of
/// ranks it makes only operators whose builds depend on the number of ranks.
pub(crate) fn operators(machine: &Machine, worlds: &[usize]) {
    let backend = machine.backend();
    let mut cases = all(backend, Extent::All);
    // Kernels that count or trace are left out, because they are not compiled ahead of time.
    cases.retain(|it| !it.case.options.count_traffic && it.case.options.trace_spans == 0);
    for &size in worlds {
        let missing = World::run_threads(size, |world| -> Result<Vec<String>> {
            Standin::get(backend).rank(world.rank());
            let options = HeapOptions::new().backend(backend).data_bytes(16 << 30);
            let options = options.signal_bytes(1 << 30).device_words(1 << 20);
            let heap = SymmetricHeap::open(&world, options.device(world.rank()))?;
            let ranks = Topology::from(&heap);
            let mut missing = Vec::new();
            let taken = |it: &&Planned| size == 2 || ["plain", "library ours"].contains(&&*it.what);
            for planned in cases.iter().filter(taken) {
                let case = &planned.case;
                let Ok(plan) = plan(case.op, &case.variant, ranks, &case.options_of(ranks.rank))
                else {
                    continue;
                };
                match AnyOp::new(&heap, &plan) {
                    Ok(op) => op.free()?,
                    Err(error) => {
                        missing.push(format!("{}: {}", title(planned), in_line(&error.into())));
                    }
                }
            }
            heap.close()?;
            Ok(missing)
        });
        missing.unwrap()[0].iter().for_each(|line| println!("{size} ranks, {line}"));
    }
}
