//! Tests of memory sharing between the devices of several ranks, on fake drivers.

use super::*;
use crate::backend::{Backend, Export, LaunchOrder, Mapping, Memory, Purpose};

/// Makes the backend of a rank on a fake device with index `ordinal`.
fn gpu(ordinal: i32, same_process: bool) -> (Arc<Fake>, Gpu) {
    let fake = Arc::new(Fake { ordinal, ..Fake::default() });
    let gpu = Gpu::new(fake.clone(), same_process, false).unwrap();
    (fake, gpu)
}

/// Empties the log of driver calls, and returns those of the calls that concern memory, in order.
fn about_memory(fake: &Fake) -> Vec<String> {
    const NAMES: [&str; 7] =
        ["allocate", "import", "open", "grant", "enable_access", "free", "shared_by"];
    let calls = fake.taken().into_iter();
    calls.filter(|call| NAMES.iter().any(|name| call.starts_with(name))).collect()
}

/// Makes the [`Memory`] of a heap, with `data` used as data segments and as signal segments.
fn memory(gpu: &Gpu, data: Vec<Arc<dyn Mapping>>, device_words: Arc<dyn Mapping>) -> Memory {
    let (control, registered) = (gpu.control(), Arc::default());
    Memory { signal: data.clone(), data, device_words, control, registered }
}

#[test]
fn ranks_that_are_threads_ask_for_access_to_each_other() {
    // Ranks 0 and 1 use device 0, rank 2 uses device 1.
    let ranks = [gpu(0, true), gpu(0, true), gpu(1, true)];
    let made: Vec<_> =
        ranks.iter().map(|(_, gpu)| gpu.allocate(Purpose::Signal, 64).unwrap()).collect();
    for (fake, _) in &ranks {
        assert_eq!(about_memory(fake), ["allocate 64 of Signal"]);
    }
    let joined: Vec<_> = ranks
        .iter()
        .zip(&made)
        .map(|((_, gpu), own)| gpu.join(&**own, made.clone()).unwrap())
        .collect();
    assert_eq!(ranks.each_ref().map(|(_, gpu)| gpu.ranks_on_device()), [2, 2, 1]);
    assert_eq!(ranks.each_ref().map(|(_, gpu)| gpu.device().workgroups), [4, 4, 8]);
    let own = |rank: usize| format!("grant {} to [0, 1]", made[rank].address());
    assert_eq!(about_memory(&ranks[0].0), [own(0), "enable_access 1".into()]);
    let far = "enable_access 0".to_string();
    assert_eq!(about_memory(&ranks[2].0), [own(2), far.clone(), far]);
    for (rank, mappings) in joined.iter().enumerate() {
        let addresses: Vec<_> = mappings.iter().map(|mapping| mapping.address()).collect();
        let expected: Vec<_> = made.iter().map(|mapping| mapping.address()).collect();
        assert_eq!(addresses, expected, "as rank {rank} sees them");
    }
    // Once all memory is mapped, the backend of a rank that shares its device reports the number of
    // sharing ranks to the driver.
    let words = ranks[0].1.allocate(Purpose::DeviceWords, 8).unwrap();
    ranks[0].1.opened(memory(&ranks[0].1, joined[0].clone(), words));
    assert!(about_memory(&ranks[0].0).contains(&"shared_by 2".to_string()));
    // Memory is freed when all ranks have closed, even if mappings of it are still held.
    for (_, gpu) in &ranks {
        gpu.shutdown();
        gpu.unmap(true);
    }
    for (fake, _) in &ranks {
        let calls = about_memory(fake);
        assert!(calls.iter().any(|call| call.starts_with("free")), "{calls:?}");
    }
    let gone = ranks[0].1.write(&*made[0], 0, &[1]).unwrap_err();
    assert!(matches!(gone, Error::Closed { .. }), "{gone}");
}

#[test]
fn devices_without_access_to_each_other_are_no_heap() {
    let far = Arc::new(Fake { far: Some(1), ..Fake::default() });
    let here = Gpu::new(far, true, false).unwrap();
    let (_, there) = gpu(1, true);
    let made = [&here, &there].map(|gpu| gpu.allocate(Purpose::Data, 64).unwrap());
    let error = here.join(&*made[0], made.to_vec()).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("devices 0 and 1"), "{error}");
}

#[test]
fn ranks_that_are_processes_open_each_others_handles() {
    let ranks = [gpu(0, false), gpu(0, false), gpu(3, false)];
    let made: Vec<_> =
        ranks.iter().map(|(_, gpu)| gpu.allocate(Purpose::Data, 96).unwrap()).collect();
    let described: Vec<_> =
        ranks.iter().zip(&made).map(|((_, gpu), own)| gpu.describe(&**own).unwrap()).collect();
    for (rank, (_, gpu)) in ranks.iter().enumerate() {
        assert!(gpu.descriptors(rank, &*made[rank], &described).unwrap().is_empty());
    }
    let passed =
        || described.iter().map(|message| Export { message: message.clone(), ..Export::default() });
    ranks[0].0.taken();
    let mappings = ranks[0].1.import(0, made[0].clone(), passed().collect()).unwrap();
    assert_eq!(about_memory(&ranks[0].0), ["open 96 of 0", "open 96 of 3"]);
    assert_eq!(mappings[0].address(), made[0].address());
    assert!(mappings[1..].iter().all(|mapping| mapping.bytes() == 96));
    assert_eq!(ranks[0].1.ranks_on_device(), 2, "by what the devices are, whatever their numbers");
    // Device words have no handle, so the message that describes them has neither handle nor
    // descriptor, and importing them fails.
    let words = ranks[1].1.allocate(Purpose::DeviceWords, 8).unwrap();
    let message = ranks[1].1.describe(&*words).unwrap();
    let all = passed().take(1).chain([Export { message, ..Export::default() }]).collect();
    let error = ranks[0].1.import(0, made[0].clone(), all).map(drop).unwrap_err();
    assert!(error.to_string().starts_with("rank 1 failed in open"), "{error}");
}

#[test]
fn an_image_is_loaded_once_a_device_and_launched_in_the_order_of_ops() {
    let (fake, gpu) = gpu(7, true);
    let image = b"an image of this test alone";
    let (module, again) = (gpu.load(image).unwrap(), gpu.load(image).unwrap());
    let loads = fake.taken().iter().filter(|call| call.starts_with("load")).count();
    assert_eq!(loads, 1);
    let function = module.function("kernel", 0).unwrap();
    assert!(again.function("no\0name", 0).is_err());
    assert_eq!(function.max_coresident_workgroups(32, 0).unwrap(), 8);
    let (a, b) = (gpu.stream().unwrap(), gpu.stream().unwrap());
    let shape = LaunchShape { groups: 1, threads: 32, shared_bytes: 0, early: false };
    fake.taken();
    let launch = |stream: &Arc<dyn StreamBackend>, order| {
        // SAFETY: the fake driver launches nothing, so it reads no parameter.
        unsafe { function.launch(&**stream, order, shape, &[]) }
    };
    launch(&a, LaunchOrder::Op).unwrap();
    launch(&b, LaunchOrder::Beside).unwrap();
    launch(&a, LaunchOrder::Op).unwrap();
    let calls = fake.taken();
    let (x, y) = (a.raw_handle(), b.raw_handle());
    let launches: Vec<_> = calls.iter().filter(|call| call.starts_with("launch")).collect();
    assert_eq!(
        launches,
        [
            &format!("launch kernel on {x}"),
            &format!("launch kernel on {y}"),
            &format!("launch kernel on {x}")
        ]
    );
    let waits: Vec<_> = calls.iter().filter(|call| call.starts_with("wait_for")).collect();
    assert!(matches!(&waits[..], [wait] if wait.ends_with(&format!("on {y}"))), "{calls:?}");
    gpu.finish();
    gpu.shutdown();
}

/// Tests that the heap accepts the caller's stream and memory as plain numbers.
#[test]
fn the_callers_stream_and_memory_come_as_numbers() {
    let (fake, gpu) = gpu(0, true);
    let (stream, address) = (0x7f00, 0xd000_0000);
    // SAFETY: streams and addresses of the fake driver are plain numbers.
    let theirs = unsafe { gpu.wrap_stream(stream) }.unwrap();
    // SAFETY: streams and addresses of the fake driver are plain numbers.
    let memory = unsafe { gpu.register(address, 256) }.unwrap();
    assert_eq!((theirs.raw_handle(), memory.address(), memory.bytes()), (stream, address, 256));
    fake.taken();
    theirs.write((memory.clone(), 16), vec![1; 4]).unwrap();
    assert!(fake.taken().contains(&format!("write on {stream}")));
    let beyond = theirs.write((memory, 255), vec![1; 4]).unwrap_err();
    assert!(matches!(beyond, Error::OutOfBounds { .. }), "{beyond}");
    drop(theirs);
    gpu.shutdown();
    let calls = fake.taken();
    assert!(!calls.contains(&format!("destroy_stream {stream}")), "it is the caller's: {calls:?}");
}

/// Tests when default streams of the caller are accepted: the legacy default stream, which all
/// threads share, and the per-thread default stream.
#[test]
fn default_streams_are_taken_or_refused_by_name() {
    let join = |ordinals: [i32; 2], same_process: bool| {
        let ranks = ordinals.map(|ordinal| gpu(ordinal, same_process));
        if same_process {
            let made: Vec<_> =
                ranks.iter().map(|(_, gpu)| gpu.allocate(Purpose::Signal, 64).unwrap()).collect();
            for ((_, gpu), own) in ranks.iter().zip(&made) {
                gpu.join(&**own, made.clone()).unwrap();
            }
        }
        ranks
    };
    // SAFETY: streams of the fake driver are plain numbers.
    let taken = |gpu: &Gpu, raw: u64| unsafe { gpu.wrap_stream(raw) }.map(drop);
    for (ordinals, same_process) in [([0, 1], true), ([0, 0], false)] {
        let [(_, gpu), _] = join(ordinals, same_process);
        for legacy in [0, 1] {
            taken(&gpu, legacy).unwrap();
        }
        let error = taken(&gpu, 2).unwrap_err().to_string();
        assert!(
            error.contains("per-thread default stream") && error.contains("new_stream"),
            "{error}"
        );
    }
    // Ranks that are threads on one device would share the legacy default stream: one rank's call
    // would be queued after the other rank's call, which waits for it.
    let [(_, gpu), _] = join([0, 0], true);
    for legacy in [0, 1] {
        let error = taken(&gpu, legacy).unwrap_err().to_string();
        assert!(
            error.contains("legacy default stream, of 2 ranks") && error.contains("new_stream"),
            "{error}"
        );
    }
    taken(&gpu, 99).unwrap();
}
