//! Where in the user's program a collective step was begun.
//!
//! `#[track_caller]` finds it through plain calls, but ends at a closure and at a method of a trait
//! object. Whoever begins a step of several exchanges therefore takes the place down here, for as
//! long as the step lasts.

use std::cell::Cell;
use std::marker::PhantomData;
use std::panic::Location;

thread_local! {
    static SITE: Cell<Option<&'static Location<'static>>> = const { Cell::new(None) };
}

/// While it lives, errors of this thread's collective calls name the place where it was made. The
/// outermost one counts.
#[must_use]
#[derive(Debug)]
pub struct CallSite {
    outer: bool,
    /// It belongs to the thread that made it.
    thread: PhantomData<*const ()>,
}

impl CallSite {
    /// The place where the caller of the calling function stands, if that is `#[track_caller]`.
    #[track_caller]
    pub fn enter() -> CallSite {
        let outer = SITE.get().is_none();
        if outer {
            SITE.set(Some(Location::caller()));
        }
        CallSite { outer, thread: PhantomData }
    }
}

impl Drop for CallSite {
    fn drop(&mut self) {
        if self.outer {
            SITE.set(None);
        }
    }
}

/// The place to name: that of the step that is under way, or of this call.
#[track_caller]
pub(crate) fn call_site() -> &'static Location<'static> {
    let here = Location::caller();
    SITE.get().unwrap_or(here)
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::sync::{Arc, Mutex};

    use crate::bootstrap::{Bootstrap, Step, Watcher};
    use crate::error::{Error, Result};
    use crate::world::{Place, World, lock};
    use crate::{HeapOptions, Settings, SymmetricHeap};

    /// A world of one as it looks to a process, which writes down what every exchange is called.
    #[derive(Default)]
    struct Recorder(Arc<Mutex<Vec<String>>>);

    impl Bootstrap for Recorder {
        fn rank(&self) -> usize {
            0
        }

        fn size(&self) -> usize {
            1
        }

        fn allgather(&self, bytes: &[u8], step: &Step) -> Result<Vec<Vec<u8>>> {
            lock(&self.0).push(step.what.clone());
            Ok(vec![bytes.to_vec()])
        }

        fn share_descriptors(&self, fds: Vec<OwnedFd>, step: &Step) -> Result<Vec<Vec<OwnedFd>>> {
            lock(&self.0).push(step.what.clone());
            Ok(vec![fds])
        }

        fn split(&self, _: &[usize], _: u64, _: &Step) -> Result<Option<Arc<dyn Bootstrap>>> {
            Ok(None)
        }

        fn watch(&self, _: Watcher) {}

        fn lost(&self) -> Option<Error> {
            None
        }

        fn leave(&self, _: bool) {}
    }

    #[test]
    fn every_exchange_is_named_after_the_users_call() {
        let first = line!();
        let said = Arc::new(Mutex::new(Vec::new()));
        let place = Place { node: 0, local_rank: 0, local_size: 1 };
        let recorder = Arc::new(Recorder(said.clone()));
        let world = World::new(recorder, Settings::default(), place, None);
        let options = HeapOptions::new().data_bytes(1 << 16).signal_bytes(1 << 16).threads(1);
        let heap = SymmetricHeap::open(&world, options).unwrap();
        let (a, b) = (heap.zeros::<f32>(9).unwrap(), heap.arange::<i32>(9).unwrap());
        heap.free(a).unwrap();
        heap.free_many(&[b.cast().unwrap()]).unwrap();
        let memory = crate::segment::SharedMemory::create("iris-test", 4096).unwrap();
        let c = heap.import_descriptor::<i32>(memory.export().unwrap(), 9).unwrap();
        heap.free(c).unwrap();
        heap.close().unwrap();
        world.agree("this", &[("item", "value".into())]).unwrap();
        world.all_ok("that", Ok(())).unwrap();
        world.split(None, 0).unwrap();
        world.share_descriptors(Vec::new()).unwrap();
        world.close().unwrap();
        let said = lock(&said);
        assert!(said.len() > 20, "{said:?}");
        for what in said.iter() {
            let line = what.split_once(&format!(" at {}:", file!())).map(|(_, rest)| rest);
            let line = line.and_then(|rest| rest.split(':').next()?.parse::<u32>().ok());
            assert!(line.is_some_and(|line| line > first), "{what} in {said:#?}");
        }
    }
}
