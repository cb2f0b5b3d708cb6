//! Tests of rules that the programs of all operators must keep, and of the sources of their
//! kernels.

use iris_heap::DType;
use iris_kernels::build::OpBuild;
use iris_kernels::program::Program;
use iris_kernels::{Kernel, ahead_of_time};
use iris_sync::barrier::Members;

use crate::op_names::Op;
use crate::op_row::Norm;
use crate::ops::row;
use crate::topology::Topology;
use crate::{all_gather, all_reduce, reduce_scatter};

/// Tests that every kernel that an operator launches is in the source that is compiled for the
/// operator, and that this build is among the builds that are compiled ahead of time.
#[test]
fn every_kernel_is_in_the_source_that_is_asked_for() {
    const ARCH: &str = "sm_90a";
    let ahead = ahead_of_time::builds(ARCH);
    for op in Op::ALL {
        for form in row(op).forms {
            // An unfused variant launches the kernels of the operator's collective, which is
            // `row.message`.
            let (name, unfused) = (op.name(), form.has_whole_gemm());
            let message = row(op).message.name();
            let plain = OpBuild {
                op: if unfused { message } else { name },
                product: op.multiplies() && !unfused,
                norm: false,
                packs: true,
                dtype: DType::BF16,
                tile_m: 64,
                tile_n: 96,
                fault_injection: crate::FaultInjection::default(),
                observed: false,
            };
            // With a single rank, a call launches only the product (or a copy) and the RMSNorm.
            let mut kernels = vec![(Kernel::Local, plain), (Kernel::Norm, plain)];
            let program = Program { members: Members::all(2), ..Program::new(form.program) };
            program.each_step(&mut |step| {
                let norms = form.norm != Norm::None;
                if let Some(kernel) = program.kernel_of(step.work) {
                    let norm = norms.then_some((kernel, OpBuild { norm: true, ..plain }));
                    kernels.extend(norm.into_iter().chain([(kernel, plain)]));
                }
            });
            for (kernel, op_build) in kernels {
                let build = op_build.of(kernel, ARCH).expect("a build");
                let (entry, source) = (format!("iris_{}(", kernel.name()), build.source);
                let entry = format!("IRIS_KERNEL {entry}");
                assert!(source.text.contains(&entry), "{op}: {entry} in {}", source.name);
                assert!(ahead.contains(&build), "{op}: {build:?}");
            }
        }
    }
}

/// Tests that [`Program::check`] accepts the programs of all operators and variants, for 1 to 8
/// ranks, with and without an RMSNorm, and for 0 to 3 parts.
#[test]
fn every_program_keeps_the_rules() {
    for op in Op::ALL {
        for form in row(op).forms {
            for size in 1..=8 {
                let mut request = op.request(64, 64, 64);
                request.variant = Some(form.variant);
                for norm in
                    [None, Some(1e-5)].into_iter().take(if form.norm == Norm::None { 1 } else { 2 })
                {
                    request.rms_norm = norm;
                    let plan = request.plan(Topology::new(0, size)).unwrap();
                    for choice in plan.choices() {
                        let program = plan.program(choice);
                        for parts in 0..4 {
                            let checked = program.check(size as u32, parts);
                            checked.unwrap_or_else(|rule| panic!("{plan}: {rule}\n{program}"));
                        }
                        // Every call must have a step that ends it, except products with a single
                        // rank or without communication.
                        let mut ends = false;
                        program.each_step(&mut |step| ends |= step.work.effects().ends);
                        assert_eq!(
                            ends,
                            op == Op::Barrier || op != Op::Matmul && size > 1,
                            "{plan}"
                        );
                    }
                }
            }
        }
    }
}

/// Tests the programs of sums of weighted parts, which are not in the table of operators.
#[test]
fn weighted_parts_have_programs_in_the_sources_of_their_operators() {
    for size in 1..=8 {
        let ranks = Topology::new(0, size);
        let sum = all_reduce::Options::rows(64, 8).combine(3);
        let plans = [
            (sum.clone().plan(ranks).unwrap(), "all_reduce", vec![Kernel::OneShotCombineLl]),
            (
                sum.rms_norm(1e-5).plan(ranks).unwrap(),
                "all_reduce_norm",
                match size {
                    1 => vec![Kernel::OneShotCombineLl, Kernel::Norm],
                    _ => vec![Kernel::OneShotCombineLl],
                },
            ),
            (
                reduce_scatter::Options::rows(64, 8).combine(3).plan(ranks).unwrap(),
                "reduce_scatter",
                vec![Kernel::ReduceScatterCombineLl],
            ),
        ];
        for (plan, source, expected) in plans {
            let program = plan.program(plan.at(64));
            program
                .check(size as u32, 0)
                .unwrap_or_else(|rule| panic!("{plan}: {rule}\n{program}"));
            let mut kernels = Vec::new();
            program.each_step(&mut |step| kernels.extend(program.kernel_of(step.work)));
            assert_eq!(kernels, expected, "{plan}");
            let entry = format!("IRIS_KERNEL iris_{}(", expected[0].name());
            let source = iris_kernels::source::kernel(source).unwrap();
            assert!(source.text.contains(&entry), "{entry} in {}", source.name);
        }
    }
}

/// Tests the program of a gather of a list, which is not in the table of operators.
#[test]
fn a_list_has_a_program_in_the_source_of_its_operator() {
    for size in 1..=8 {
        let options = all_gather::Options::rows(64, 7).dtype(DType::I32).and(DType::U8, 3);
        let plan = options.plan(Topology::new(0, size)).unwrap();
        let program = plan.program(plan.at(64));
        program.check(size as u32, 0).unwrap_or_else(|rule| panic!("{plan}: {rule}\n{program}"));
        let mut kernels = Vec::new();
        program.each_step(&mut |step| kernels.extend(program.kernel_of(step.work)));
        assert_eq!(kernels, [Kernel::AllGatherListLl], "{plan}");
    }
    let entry = format!("IRIS_KERNEL iris_{}(", Kernel::AllGatherListLl.name());
    let source = iris_kernels::source::kernel(Op::AllGather.name()).unwrap();
    assert!(source.text.contains(&entry), "{entry} in {}", source.name);
}
