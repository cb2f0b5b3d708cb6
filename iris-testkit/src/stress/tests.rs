use std::sync::Arc;

use iris_heap::SymmetricHeap;
use iris_kernels::gemm::Config;
use iris_ops::{Device, OpRequest};
use iris_sync::Access;

use super::*;

#[test]
fn every_wait_has_a_subject() {
    let waits = Access::ALL.iter().filter(|access| {
        let name = access.name();
        name == "LockTake" || name.ends_with("Load") && !["AbortLoad", "CallLoad"].contains(&name)
    });
    let listed = WAITS.map(|(access, _, _)| access);
    assert!(waits.clone().all(|wait| listed.contains(wait)), "{listed:?}");
    assert_eq!(waits.count(), WAITS.len());
    let all = Subject::all();
    assert!(WAITS.iter().all(|(_, subject, _)| all.contains(subject)));
    assert!(MORE_WAITS.iter().all(|(_, _, subject, _)| all.contains(subject)));
    // An entry of `MORE_WAITS` with a whole-matrix GEMM must say which kernels lack the wait. Waits
    // inside a GEMM that stores to peers, and waits after the GEMM, are left out in separate runs.
    for (_, without, subject, _) in MORE_WAITS {
        assert_eq!(without.is_some(), subject.is_whole(), "{subject}");
    }
}

/// Tests that subjects with whole-matrix GEMMs can be planned for every number of ranks. Whether
/// the GEMMs accept these calls shows only on a device.
#[test]
fn subjects_of_whole_products_are_planned_for_every_world() {
    for subject in Subject::all().into_iter().filter(|it| it.is_whole()) {
        for ranks in 2..=8 {
            let fault_injection = FaultInjection::default();
            let setting = Setting::of(subject, ranks, 1, DType::BF16, 1, fault_injection);
            let h200 = Device::named("h200").expect("a device");
            let of = Topology::new(ranks - 1, ranks).on_device(h200);
            let (plan, case) = subject
                .plan::<half::bf16>(of, &setting)
                .unwrap_or_else(|error| panic!("{subject}: {error:#}"))
                .expect("a plan");
            let OpRequest { m, n, k, library, .. } = *case.options;
            assert_eq!(library, iris_ops::Library::Ours);
            assert!(plan.data_bytes() > (m * n.min(k)) as u64, "what comes has its place");
            let tile = [plan.tile().m, plan.tile().n];
            match subject {
                Subject::Op { variant: "epilogue", .. } => {
                    assert_eq!(tile, [64, 128], "of a signal");
                }
                Subject::Op { variant: "unfused_one_shot", .. } => {
                    assert_eq!(tile, [64, 64], "of a workgroup");
                    continue;
                }
                Subject::Op { variant: "unfused_ll", .. } => continue,
                _ => {}
            }
            assert!(m.is_multiple_of(256 * ranks) && n.is_multiple_of(256), "{subject}");
            assert!(k > 4 * 64 && k.is_multiple_of(64), "{subject}");
            if !16usize.is_multiple_of(ranks) {
                continue;
            }
            let wide = Config::of_plan([m, n, k], 132, 1).pop().expect("a build");
            assert_eq!((wide.width, wide.cluster, wide.hold), (256, 2, true), "{subject}");
        }
    }
}

#[test]
fn a_heap_that_is_dropped_on_purpose_logs_nothing() {
    let said = |quiet: bool| {
        let log = Log::default();
        World::run_threads(2, |world| -> Result<(), iris_heap::Error> {
            let heap = SymmetricHeap::open(&world, HeapOptions::new())?;
            let writer = log.clone();
            let subscriber = tracing_subscriber::fmt()
                .with_max_level(tracing::Level::DEBUG)
                .with_writer(move || writer.clone())
                .finish();
            tracing::subscriber::with_default(subscriber, || match quiet {
                true => quietly(|| drop(heap)),
                false => drop(heap),
            });
            Ok(())
        })
        .expect("two ranks");
        let bytes = log.0.lock().expect("nobody panicked").clone();
        String::from_utf8(bytes).expect("text")
    };
    assert!(said(false).contains("dropped without close"), "{}", said(false));
    assert_eq!(said(true), "");
}

/// Writer that collects log messages for a test.
#[derive(Clone, Default)]
struct Log(Arc<std::sync::Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("nobody panicked").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
