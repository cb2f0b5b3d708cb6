//! Every op against the oracle.

use iris_heap::{HeapOptions, SymmetricHeap, World};
use iris_ops::Options;
use iris_testkit::suite::{Case, OpName, run_case};

#[test]
fn smoke() {
    for size in [1, 2, 3] {
        World::run_threads(size, |world| -> anyhow::Result<()> {
            let heap = SymmetricHeap::open(&world, HeapOptions::new())?;
            for op in OpName::ALL {
                for variant in op.variants() {
                    let k = if op.multiplies() { 17 } else { 0 };
                    if let Err(e) =
                        run_case(&heap, &Case::new(op, variant, Options::new(33, 65, k)))
                    {
                        println!("FAIL {e:?}");
                        return Err(e);
                    }
                }
            }
            heap.close()?;
            world.close()?;
            Ok(())
        })
        .unwrap();
    }
}
