//! Test that every exchange of a collective step carries the call site in the user's program, not a
//! call site in this crate.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use crate::bootstrap::{Bootstrap, Object, Step, Watcher};
use crate::world::Place;
use crate::{Error, HeapOptions, Request, Result, Segment, Settings, SymmetricHeap, World};

/// Bootstrap of a world of one rank that records the steps of its exchanges.
#[derive(Default)]
struct Recorder {
    /// Value that [`Bootstrap::same_process`] of this fake returns.
    threads: bool,
    steps: Mutex<Vec<String>>,
}

impl Recorder {
    fn keep<T>(&self, step: &Step, value: T) -> Result<Vec<T>> {
        self.steps.lock().unwrap().push(step.what.clone());
        Ok(vec![value])
    }
}

impl Bootstrap for Recorder {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn allgather(&self, bytes: &[u8], step: &Step) -> Result<Vec<Vec<u8>>> {
        self.keep(step, bytes.to_vec())
    }

    fn share_descriptors(
        &self,
        mine: Vec<OwnedFd>,
        _: &[usize],
        step: &Step,
    ) -> Result<Vec<Vec<OwnedFd>>> {
        self.keep(step, mine)
    }

    fn share_objects(&self, object: Object, step: &Step) -> Result<Vec<Object>> {
        self.keep(step, object)
    }

    fn same_process(&self) -> bool {
        self.threads
    }

    fn split(&self, _: &[usize], _: u64, step: &Step) -> Result<Option<Arc<dyn Bootstrap>>> {
        self.keep(step, ()).map(|_| None)
    }

    fn watch(&self, _: Watcher) {}

    fn lost(&self) -> Option<Error> {
        None
    }

    fn give_up(&self, _: Error) {}

    fn leave(&self, _: bool) {}
}

#[test]
fn are_those_of_the_program() {
    for threads in [true, false] {
        let recorder = Arc::new(Recorder { threads, ..Recorder::default() });
        let place = Place { node: 0, local_rank: 0, local_size: 1 };
        let world = World::new(recorder.clone(), Settings::default(), place, None);
        let taken = |least: usize, what: &str| {
            let steps = std::mem::take(&mut *recorder.steps.lock().unwrap());
            assert!(steps.len() >= least, "{what}: {steps:?}");
            for step in steps {
                assert!(step.contains(" at iris-heap/src/heap/call_sites.rs:"), "{what}: {step}");
            }
        };
        let options = HeapOptions::new().data_bytes(1 << 20).threads(1);
        let heap = SymmetricHeap::open(&world, options).unwrap();
        taken(8, "open");
        let x = heap.alloc::<f32>(1).unwrap();
        taken(1, "alloc");
        let y = heap.alloc_signal(1).unwrap();
        taken(1, "alloc_signal");
        heap.alloc_many("several", &[Request::new(Segment::Data, 1, "one")]).unwrap();
        taken(1, "alloc_many");
        heap.zeros::<f32>(1).unwrap();
        taken(2, "zeros");
        heap.ones::<f32>(1).unwrap();
        taken(2, "ones");
        heap.full(1, 1.0_f32).unwrap();
        taken(2, "full");
        heap.arange::<f32>(1).unwrap();
        taken(2, "arange");
        heap.rand::<f32>(1, 1).unwrap();
        taken(2, "rand");
        heap.free(x).unwrap();
        taken(1, "free");
        heap.free_many(&[y.raw()]).unwrap();
        taken(1, "free_many");
        // The descriptor is that of /dev/null and has no memory, so the import fails after the
        // exchange.
        let file = std::fs::File::open("/dev/null").unwrap();
        heap.import_descriptor::<u8>(file.into(), 1).unwrap_err();
        taken(2, "import_descriptor");
        let memory = crate::segment::SharedMemory::create("iris-test", 4096).unwrap();
        heap.import_descriptor::<u8>(memory.export().unwrap(), 4096).unwrap();
        taken(4, "import_descriptor");
        heap.close().unwrap();
        taken(2, "close");
        world.barrier().unwrap();
        world.allgather(&[]).unwrap();
        world.agree("agree", &[]).unwrap();
        world.all_ok("all_ok", Ok(())).unwrap();
        world.split(Some(0), 0).unwrap();
        world.share_descriptors(Vec::new()).unwrap();
        world.share_objects(Arc::new(())).unwrap();
        world.close().unwrap();
        taken(8, "world");
    }
}
