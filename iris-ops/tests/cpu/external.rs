//! Tests of matrices in memory of the caller, outside the heap, on the CPU.

use iris_heap::{HeapOptions, Settings, SymmetricHeap, World};
use iris_ops::{
    AllGatherMatmul, AnyOp, Device, HeapReserve, MatRef, Matmul, MatmulAllReduce, MatmulArgs,
    NormArgs, Op, Operand, Operands, Plan, Topology, Variant, all_gather_matmul, matmul::Options,
    matmul_all_reduce, scope,
};
use iris_testkit::worlds::on_heaps;

/// Tests that an op refuses to write a matrix made from a read-only pointer.
#[test]
#[allow(unsafe_code, reason = "memory of the caller's is given by its address")]
fn inputs_are_only_read_and_no_output() {
    on_heaps(1, HeapOptions::new(), |_, heap| {
        let (a, b, mut c) = ([1.0_f32, 2.0], [3.0_f32, 4.0, 5.0, 6.0], [0.0_f32; 2]);
        let op = Matmul::new(&heap, &Options::new(1, 2, 2).plan(&heap)?)?;
        let stream = heap.stream()?;
        // SAFETY: the arrays live until the calls that use them have been waited for.
        let [a, b, read] = unsafe {
            [
                MatRef::external(a.as_ptr(), 2, 1, 2),
                MatRef::external(b.as_ptr(), 4, 2, 2),
                MatRef::external(c.as_ptr(), 2, 1, 2),
            ]
        };
        let error = op.run(&MatmulArgs::new(a, b, read), &stream).unwrap_err().to_string();
        let says = "memory of C is MatRef::external, which is only read, expected \
                    MatRef::external_mut, MatRef::sym, or in a scope what scope.write returns";
        assert!(error.ends_with(says), "{error}");
        // SAFETY: C lives until the call that writes it has been waited for, and no other code
        // writes C.
        let written = unsafe { MatRef::external_mut(c.as_mut_ptr(), 2, 1, 2) };
        op.run(&MatmulArgs::new(a, b, written), &stream)?;
        stream.sync()?;
        assert_eq!(c, [13.0, 16.0]);
        Ok(op.free()?)
    });
}

/// Tests that a scope in which host memory is lent to calls ends only after these calls have ended,
/// whatever the program does.
#[test]
fn a_scope_waits_for_its_calls_also_when_it_fails() {
    on_heaps(1, HeapOptions::new(), |_, heap| {
        let op = Matmul::new(&heap, &Options::new(1, 2, 2).plan(&heap)?)?;
        let (stream, other) = (heap.stream()?, heap.stream()?);
        let slow = || {
            stream.call_cpu("slow", || {
                std::thread::sleep(std::time::Duration::from_millis(50));
                Ok(())
            })
        };
        let (a, b) = ([1.0_f32, 2.0], [3.0_f32, 4.0, 5.0, 6.0]);
        let call = |c: &mut [f32], failing: bool| -> anyhow::Result<()> {
            scope(&heap, &stream, |scope| {
                // This slow task keeps the call from beginning before the closure of the scope
                // returns.
                slow()?;
                let args = MatmulArgs::new(
                    scope.read(&a, 1, 2),
                    scope.read(&b, 2, 2),
                    scope.write(c, 1, 2),
                );
                op.run(&args, &stream)?;
                anyhow::ensure!(!failing, "an error between run and sync");
                Ok(())
            })
        };
        let mut c = [0.0_f32; 2];
        call(&mut c, false)?;
        assert_eq!(c, [13.0, 16.0]);
        let mut c = [0.0_f32; 2];
        assert_eq!(call(&mut c, true).unwrap_err().to_string(), "an error between run and sync");
        assert_eq!(c, [13.0, 16.0], "the call was waited for");
        let mut c = [0.0_f32; 2];
        let panics = || {
            scope(&heap, &stream, |scope| -> anyhow::Result<()> {
                slow()?;
                let args = MatmulArgs::new(
                    scope.read(&a, 1, 2),
                    scope.read(&b, 2, 2),
                    scope.write(&mut c, 1, 2),
                );
                op.run(&args, &stream)?;
                panic!("in a scope")
            })
        };
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics));
        let message = panicked.expect_err("it panics").downcast::<&str>().ok();
        assert_eq!(message.as_deref(), Some(&"in a scope"));
        assert_eq!(c, [13.0, 16.0], "the call was waited for");
        // Two uses must be refused: an input that is passed as an output, and a stream for which
        // the scope does not wait.
        let mut c = [0.0_f32; 2];
        let refused = scope(&heap, &stream, |scope| -> anyhow::Result<()> {
            let [x, y, z] = [scope.read(&a, 1, 2), scope.read(&b, 2, 2), scope.read(&a, 1, 2)];
            let args = MatmulArgs::new(x, y, z);
            let error = op.run(&args, &stream).unwrap_err().to_string();
            anyhow::ensure!(error.contains("memory of C"), "{error}");
            let args = MatmulArgs::new(
                scope.read(&a, 1, 2),
                scope.read(&b, 2, 2),
                scope.write(&mut c, 1, 2),
            );
            let error = op.run(&args, &other).unwrap_err().to_string();
            anyhow::ensure!(error.contains("expected the one of the scope"), "{error}");
            // Operands made by `as_input` share the memory of another operand. The same two uses of
            // these operands must be refused.
            {
                let [x, y, z] = [&args.a, &args.b, &args.c].map(Operand::as_input);
                let only_read = MatmulArgs::new(x, y, z);
                let error = op.run(&only_read, &stream).unwrap_err().to_string();
                anyhow::ensure!(error.contains("memory of C"), "{error}");
                let error = op.run(&only_read, &other).unwrap_err().to_string();
                anyhow::ensure!(error.contains("expected the one of the scope"), "{error}");
            }
            // One call may use host memory and memory of the heap together.
            let sym = heap.full::<f32>(4, 2.0)?;
            let args = MatmulArgs::new(
                scope.read(&a, 1, 2),
                Operand::from(MatRef::sym(sym, 2, 2)),
                args.c,
            );
            Ok(op.run(&args, &stream)?)
        });
        refused?;
        assert_eq!(c, [6.0, 6.0]);
        Ok(op.free()?)
    });
}

/// Tests that the error of a call in a scope begins with the operator's name.
#[test]
fn an_error_of_a_scope_names_the_operator() {
    let rank = |world: World| -> anyhow::Result<()> {
        let plan = matmul_all_reduce::Options::new(8, 5, 6).name("down").plan(&world)?;
        let heap = Plan::open_heap(&world, &[&plan], HeapReserve::none())?;
        let op = MatmulAllReduce::new(&heap, &plan)?;
        let rows = 2 + world.rank();
        let (a, b, mut c) = (vec![1.0_f32; rows * 6], [1.0_f32; 30], vec![0.0_f32; rows * 5]);
        let stream = heap.stream()?;
        scope(&heap, &stream, |scope| {
            let (a, b) = (scope.read(&a, rows, 6), scope.read(&b, 6, 5));
            op.run(&MatmulArgs::new(a, b, scope.write(&mut c, rows, 5)), &stream)
        })?;
        anyhow::bail!("calls of different sizes succeeded")
    };
    let error = World::run_threads(2, rank).unwrap_err().to_string();
    assert!(error.starts_with("down (matmul_all_reduce of 8 x 5 x 6 f32): rank "), "{error}");
}

const NAMES: [&str; 7] = ["A", "B", "C", "bias", "residual", "weight", "normed"];

/// Tests a call with each of its matrices in turn in memory of the caller. Returns "yes" for each
/// matrix for which this works, the error if it is refused, or "" if the operator has no such
/// matrix.
fn external(op: Op, variant: Variant) -> anyhow::Result<[String; 7]> {
    let rank = |world: World| -> anyhow::Result<[String; 7]> {
        let heap = SymmetricHeap::open(&world, HeapOptions::new())?;
        let (m, n, k) = (6, 4, 8);
        let mut request = op.request(m, n, k);
        request.variant = Some(variant);
        // If the variant can normalise rows, the plan also has an RMSNorm.
        let with_norm = {
            let mut request = request.clone();
            request.rms_norm = Some(1e-5);
            request.plan(&heap)
        };
        let has_norm = with_norm.is_ok();
        let plan = with_norm.or_else(|_| request.plan(&heap))?;
        let shapes = plan.shapes(m);
        let made = AnyOp::new(&heap, &plan)?;
        let stream = heap.stream()?;
        let given = [
            Some(shapes.a),
            shapes.b,
            Some(shapes.c),
            shapes.b.map(|_| (1, n)),
            has_norm.then_some(shapes.c),
            has_norm.then_some((1, n)),
            has_norm.then_some(shapes.c),
        ];
        let mut kept: Vec<Vec<f32>> = Vec::new();
        let mut answers = [const { String::new() }; 7];
        for which in 0..given.len() {
            if op == Op::Barrier || given[which].is_none() {
                continue;
            }
            // The matrix under test is in memory of the caller, and all other matrices are in the
            // heap.
            let mut matrices = Vec::new();
            for (index, shape) in given.iter().enumerate() {
                let (rows, cols) = shape.unwrap_or((0, 0));
                matrices.push(if index == which {
                    kept.push(vec![1.0; rows * cols]);
                    mine(kept.last_mut().unwrap(), (rows, cols))
                } else {
                    MatRef::sym(heap.ones::<f32>((m + 1) * k)?, rows, cols)
                });
            }
            let operands = Operands::new(matrices[0], matrices[1], matrices[2]);
            let operands = operands.bias(given[3].map(|_| matrices[3]));
            let norm = NormArgs::new(matrices[5], matrices[6]).residual(matrices[4]);
            let operands = operands.norm(has_norm.then_some(norm));
            answers[which] = match made.run(&operands, &stream) {
                Ok(()) => stream.sync().map(|()| "yes".into())?,
                Err(error) => {
                    let error = error.to_string();
                    assert!(
                        error.contains("because peers read it in place"),
                        "{op} {variant}: {error}"
                    );
                    "no".into()
                }
            };
            world.barrier()?;
        }
        made.free()?;
        heap.close()?;
        world.close()?;
        Ok(answers)
    };
    Ok(World::run_threads(2, rank)?.swap_remove(0))
}

/// Matrix of `rows` x `cols` in `memory`, which belongs to the caller.
#[allow(unsafe_code, reason = "memory of the caller's is given by its address")]
fn mine(memory: &mut [f32], (rows, cols): (usize, usize)) -> MatRef {
    // SAFETY: the caller keeps `memory` until the calls on the matrix have been waited for.
    unsafe { MatRef::external_mut(memory.as_mut_ptr(), memory.len(), rows, cols) }
}

/// Tests the table of external memory in the documentation. Every operator and variant of the CPU
/// is called with each matrix in turn outside the heap.
#[test]
fn the_table_of_external_memory_is_what_calls_take() {
    let mut table =
        format!("| operator | variant | {} |\n|{}\n", NAMES.join(" | "), " --- |".repeat(9));
    for op in Op::ALL.into_iter().filter(|&op| op != Op::Barrier) {
        let mut rows: Vec<(Vec<&str>, [String; 7])> = Vec::new();
        for variant in op.variants_on(Device::host()) {
            let answers =
                external(op, variant).unwrap_or_else(|error| panic!("{op} {variant}: {error}"));
            match rows.iter_mut().find(|(_, known)| *known == answers) {
                Some((names, _)) => names.push(variant.name()),
                None => rows.push((vec![variant.name()], answers)),
            }
        }
        for (variants, answers) in rows {
            let variants: Vec<_> = variants.iter().map(|name| format!("`{name}`")).collect();
            table += &format!("| `{op}` | {} | {} |\n", variants.join(", "), answers.join(" | "));
        }
    }
    let written = include_str!("../../src/external.md");
    assert_eq!(table.trim(), written.trim(), "external.md should be:\n{table}");
}

/// Tests an A outside the heap on one rank, whose peers would read it in place. The call is refused
/// there and may be tried again, so its peers wait. If the rank ends instead, they get its error.
#[test]
#[allow(unsafe_code, reason = "memory of the caller's is given by its address")]
fn an_external_a_that_peers_would_read_is_told_to_them() {
    let staged = all_gather_matmul::Variant::Staged(Default::default());
    for (variant, name) in [(all_gather_matmul::Variant::Pull, "pull"), (staged, "staged")] {
        let rank = |world: World| -> anyhow::Result<()> {
            let heap = SymmetricHeap::open(&world, HeapOptions::new())?;
            let options = all_gather_matmul::Options::new(2, 2, 2).variant(variant);
            let op = AllGatherMatmul::new(&heap, &options.plan(&heap)?)?;
            let (a, b) = (heap.ones::<f32>(2)?, heap.ones::<f32>(4)?);
            let (c, stream) = (heap.zeros::<f32>(4)?, heap.stream()?);
            let lent = [1.0_f32; 2];
            let a = match world.rank() {
                0 => MatRef::sym(a, 1, 2),
                // SAFETY: the memory is refused.
                _ => unsafe { MatRef::external(lent.as_ptr(), 2, 1, 2) },
            };
            op.run(&MatmulArgs::new(a, MatRef::sym(b, 2, 2), MatRef::sym(c, 2, 2)), &stream)?;
            Ok(stream.sync()?)
        };
        let results = World::run_threads_each(2, &Settings::default(), rank).unwrap();
        let [told, own] = [0, 1].map(|rank: usize| results[rank].as_ref().unwrap_err().to_string());
        let refused = format!("A of variant {name} is external or transposed, expected");
        assert!(own.contains(&refused), "{own}");
        assert!(told.contains(&format!("rank 1 gave up: {own}; ")), "{told}");
    }
}

/// Tests that `auto` chooses no variant that needs A in the heap. So a program need not tell the
/// planner where A is.
#[test]
fn auto_takes_no_variant_that_reads_a_where_it_lies() {
    for device in ["cpu", "a100", "h100", "h200", "b200", "mi300x"] {
        for size in [2, 3, 4, 8] {
            for (m, n, k) in [(1, 64, 64), (64, 512, 512), (4096, 1280, 8192), (16384, 4096, 4096)]
            {
                let ranks =
                    Topology::new(0, size).on_device(Device::named(device).unwrap()).untuned();
                for even in [false, true] {
                    let mut request = Op::AllGatherMatmul.request(m, n, k);
                    request.uniform_shape = even;
                    let plan = request.plan(ranks).unwrap();
                    let pulls = [Variant::Pull, Variant::Staged, Variant::Baseline];
                    let taken =
                        plan.choices().iter().find(|choice| pulls[..2].contains(&choice.variant));
                    assert!(taken.is_none(), "{plan}");
                }
            }
        }
    }
}

/// Tests that the example in COMING_FROM_NCCL.md is copied from a program that is compiled.
#[test]
fn the_example_of_the_page_is_that_of_the_program() {
    let page = include_str!("../../COMING_FROM_NCCL.md");
    // The block is marked as text, because rustdoc cannot compile a part of a function.
    let block = page.split("```text\n").find(|block| block.starts_with("fn ")).unwrap();
    let shown = block.split("```").next().unwrap();
    let program = include_str!("../../examples/cudarc.rs");
    assert!(shown.lines().count() > 20 && program.contains(shown), "the program has no:\n{shown}");
}
