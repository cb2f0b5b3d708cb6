//! Matrices in memory of the caller, outside the heap, on the CPU.

use iris_heap::{HeapOptions, SymmetricHeap, World};
use iris_ops::{MatRef, Matmul, MatmulArgs, matmul::Options};

/// Tests that an op refuses to write a matrix made from a read-only pointer.
#[test]
#[allow(unsafe_code, reason = "memory of the caller's is given by its address")]
fn inputs_are_only_read_and_no_output() {
    let rank = |world: World| -> anyhow::Result<()> {
        let heap = SymmetricHeap::open(&world, HeapOptions::new())?;
        let (a, b, mut c) = ([1.0_f32, 2.0], [3.0_f32, 4.0, 5.0, 6.0], [0.0_f32; 2]);
        let op = Matmul::new(&heap, &Options::new(1, 2, 2).plan(&heap)?)?;
        let stream = heap.stream()?;
        // SAFETY: the arrays outlive the calls, which are waited for.
        let [a, b, read] = unsafe {
            [
                MatRef::external(a.as_ptr(), 2, 1, 2),
                MatRef::external(b.as_ptr(), 4, 2, 2),
                MatRef::external(c.as_ptr(), 2, 1, 2),
            ]
        };
        let error = op.run(&MatmulArgs::new(a, b, read), &stream).unwrap_err().to_string();
        let says = "matmul: memory of C is MatRef::external, which is only read, expected \
                    MatRef::external_mut or MatRef::sym";
        assert_eq!(error, says);
        // SAFETY: C outlives the calls, which are waited for, and nobody else writes it.
        let written = unsafe { MatRef::external_mut(c.as_mut_ptr(), 2, 1, 2) };
        op.run(&MatmulArgs::new(a, b, written), &stream)?;
        stream.sync()?;
        assert_eq!(c, [13.0, 16.0]);
        op.free()?;
        heap.close()?;
        Ok(world.close()?)
    };
    World::run_threads(1, rank).unwrap();
}
