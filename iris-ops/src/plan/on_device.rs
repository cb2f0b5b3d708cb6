//! Relation of a plan to devices: the device for which the plan was made, and whether the plan can
//! run on another device.

use super::{Choice, Plan};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::op_names::{ChoiceReason, Variant};
use crate::op_row::{Form, Row};
use crate::tune;

impl Plan {
    /// Device for which the plan was made; its field `assumed` is true if the device is unknown.
    pub fn device(&self) -> Device {
        self.ranks.device
    }

    /// GPU whose tuning data the plan uses, if it is not the plan's own kind of device: `H200` or
    /// `MI300X`. `None` if the data is for the plan's device, and for a host.
    pub fn borrowed_tuning(&self) -> Option<&'static str> {
        tune::figures_of(self.ranks)
    }

    /// Checks that the device has kernels for the variants that the caller requested. Variants that
    /// the plan itself chose need no check, because they have fallbacks.
    pub(crate) fn check_device(&self, device: Device) -> Result<()> {
        let asked = |choice: &&Choice| choice.why == ChoiceReason::Requested && !self.alone();
        let mut forms = self.choices.iter().filter(asked).map(|choice| choice.form);
        forms.try_for_each(|form| check_form(self.row(), form, device))
    }

    /// Logs, once per plan, whether the device is the one for which the plan was made, and which
    /// GPU's tuning data was used.
    pub(crate) fn log_device(&self, device: Device) {
        if self.on_cpu() {
            return;
        }
        let (op, rank, planned) = (self.op(), self.ranks.rank, self.ranks.device);
        self.logged.call_once(|| match tune::figures_of(self.ranks.on_device(device)) {
            _ if planned.deciding() != device.deciding() => tracing::warn!(
                %op, rank, %planned, %device,
                "the plan is for another device: make Topology from the heap, or by Topology::from(&world).on(backend)"
            ),
            Some(gpu) => {
                tracing::info!(%op, rank, %device, "chosen by tuning data of an {gpu}, because there is none of this device");
            }
            None => tracing::debug!(%op, rank, %device, "chosen by tuning data of this device"),
        });
    }
}

/// Variants of an operator for which the device has kernels.
pub(crate) fn variants(row: &Row, device: Device) -> impl Iterator<Item = Variant> {
    row.forms.iter().filter(move |form| has(device, form)).map(|form| form.variant)
}

fn has(device: Device, form: &Form) -> bool {
    !form.stores || device.stores_to_peers()
}

/// Checks that the device has kernels for a variant.
pub(super) fn check_form(row: &Row, form: &Form, device: Device) -> Result<()> {
    if has(device, form) {
        return Ok(());
    }
    let expected = format!("auto, {}", row.names(|form| has(device, form)));
    Err(Error::invalid(row.op, format!("variant on {device}"), form.variant, expected))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use iris_heap::DType;
    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Level, Metadata, Subscriber};

    use super::*;
    use crate::options::TileShape;
    use crate::tune::message_groups;
    use crate::{Topology, matmul, matmul_all_reduce};

    fn named(name: &str) -> Device {
        Device::named(name).expect("a device")
    }

    fn options() -> matmul_all_reduce::Options {
        matmul_all_reduce::Options::new(16384, 8192, 3584).dtype(DType::BF16)
    }

    fn plan(device: Device) -> Plan {
        options().plan(Topology::new(0, 2).on_device(device)).expect("a plan")
    }

    /// Subscriber that collects the levels and messages of log events.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<(Level, String)>>>);

    struct Message<'a>(&'a mut String);

    impl Visit for Message<'_> {
        fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
            if field.name() == "message" {
                *self.0 = format!("{value:?}");
            }
        }
    }

    impl Subscriber for Log {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, event: &Event<'_>) {
            let mut message = String::new();
            event.record(&mut Message(&mut message));
            self.0.lock().expect("no panic").push((*event.metadata().level(), message));
        }

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    #[test]
    fn a_plan_logs_its_tuning_data_once() {
        let logged = |planned: &str, device: &str| {
            let log = Log::default();
            let plan = plan(named(planned));
            tracing::subscriber::with_default(log.clone(), || {
                plan.log_device(named(device));
                plan.clone().log_device(named(device));
            });
            let mut all = log.0.lock().expect("no panic").clone();
            assert_eq!(all.len(), 1, "{all:?}");
            all.remove(0)
        };
        let (level, said) = logged("a100", "a100");
        assert_eq!(
            (level, said.as_str()),
            (Level::INFO, "chosen by tuning data of an H200, because there is none of this device")
        );
        // An H100 differs from an H200 only in its memory, which plans ignore. But it has no
        // tuning data of its own, so the log says so.
        assert_eq!(logged("h200", "h100"), (Level::INFO, said));
        assert_eq!(
            logged("h200", "h200"),
            (Level::DEBUG, "chosen by tuning data of this device".into())
        );
        let (level, said) = logged("h200", "a100");
        assert!(
            level == Level::WARN && said.starts_with("the plan is for another device"),
            "{said}"
        );
    }

    #[test]
    fn a_plan_names_its_device_or_says_that_nobody_knows_it() {
        let said = |device| plan(device).to_string();
        let [h200, a100] = ["h200", "a100"].map(|name| said(named(name)));
        let head = "matmul_all_reduce of 16384 x 8192 x 3584 bf16, rank 0 of 2 on";
        let on_h200 = format!("{head} cuda (NVIDIA H200, sm_90, 132 multiprocessors): unfused_ll");
        assert!(h200.starts_with(&on_h200), "{h200}");
        let on_a100 =
            "cuda (NVIDIA A100, sm_80, 108 multiprocessors), tuning data of an H200: unfused";
        assert!(a100.starts_with(&format!("{head} {on_a100}")), "{a100}");
        let assumed = said(Device::assumed(iris_heap::BackendKind::Cuda));
        assert!(
            assumed.starts_with(&format!("{head} cuda (device not known, taken for")),
            "{assumed}"
        );
        assert_eq!(
            (plan(named("a100")).borrowed_tuning(), plan(named("h200")).borrowed_tuning()),
            (Some("H200"), None)
        );
        assert_eq!(
            (plan(named("mi300x")).borrowed_tuning(), plan(Device::host()).borrowed_tuning()),
            (None, None)
        );
        assert_eq!(plan(named("a100")).device(), named("a100"));
    }

    /// Tests calls of every size, because some variants are chosen by prediction and others by rows
    /// of the tuning table.
    #[test]
    fn plans_have_fused_stores_only_where_there_are_kernels() {
        let stores = |name| plan(named(name)).choices().iter().any(|choice| choice.form.stores);
        assert_eq!(["h100", "h200"].map(stores), [true; 2]);
        assert_eq!(["a100", "b200", "mi300x", "cpu"].map(stores), [false; 4]);
    }

    #[test]
    fn a_variant_without_kernels_is_refused_by_name_alone() {
        let epilogue = options().variant(matmul_all_reduce::Variant::Epilogue);
        let planned = |size, name| epilogue.plan(Topology::new(0, size).on_device(named(name)));
        let error = planned(2, "a100").unwrap_err().to_string();
        assert_eq!(
            error,
            "matmul_all_reduce of 16384 x 8192 x 3584 bf16: variant on cuda (NVIDIA A100, sm_80, 108 \
             multiprocessors) is epilogue, expected auto, one_shot, two_shot, spinlock, atomic, unfused, \
             unfused_one_shot, unfused_ll, unfused_two_shot_ll, copy_engine"
        );
        // The variant must be accepted with one rank on any device, because no tile is stored at a
        // peer, and on the CPU, which runs it as a GEMM and copies.
        assert!(planned(1, "a100").is_ok() && planned(2, "cpu").is_ok());
        let asked = planned(2, "h200").expect("a plan");
        asked.check_device(named("h100")).expect("kernels");
        let refused = asked.check_device(named("a100")).unwrap_err();
        assert_eq!(refused.labelled(&asked.request().label(None)).to_string(), error);
        // A variant that the plan itself chose must fall back to another variant on a device
        // without kernels for it.
        plan(named("h200")).check_device(named("a100")).expect("a fallback");
    }

    #[test]
    fn ranks_with_other_devices_are_told_so_before_what_follows() {
        let [one, other] = ["h200", "a100"].map(|name| plan(named(name)).fingerprint());
        let differing = one.into_iter().zip(other).find(|(one, other)| one != other);
        let (one, other) = differing.expect("something differs");
        assert_eq!(one, ("device", "cuda, sm_90, 132 multiprocessors".into()));
        assert_eq!(other, ("device", "cuda, sm_80, 108 multiprocessors".into()));
        assert_eq!(plan(named("h200")).fingerprint(), plan(named("h100")).fingerprint());
    }

    /// Tests the limits that are computed from a GPU's number of multiprocessors. For the 132
    /// multiprocessors of an H200, the limits must equal the measured ones.
    #[test]
    fn constants_of_a_gpu_follow_from_its_multiprocessors() {
        let ranks = |name, size| Topology::new(0, size).on_device(named(name));
        let names = ["h200", "h100", "a100", "b200", "mi300x"];
        assert_eq!(names.map(|name| message_groups(ranks(name, 2))), [131, 131, 107, 147, 65]);
        // Numbers of columns of C that give 64, 48, 72 and 152 tiles of 128 x 128. These are the
        // smallest numbers of tiles for which the larger tile is chosen.
        let tile = |name, columns| {
            let options = matmul::Options::new(1024, columns, 64).dtype(DType::BF16);
            options.plan(ranks(name, 1)).unwrap().tile().n
        };
        for (name, enough) in [("h200", 1024), ("a100", 768), ("b200", 1152), ("mi300x", 2432)] {
            assert_eq!([tile(name, enough), tile(name, enough - 128)], [128, 64], "{name}");
        }
        // H100 on a PCIe board, with 114 multiprocessors.
        let mut pcie = named("h100");
        pcie.multiprocessors = 114;
        let [sxm, pcie] = [ranks("h100", 2), Topology::new(0, 2).on_device(pcie)];
        let options = matmul_all_reduce::Options::new(512, 8064, 3584).dtype(DType::BF16);
        let columns =
            |variant, ranks| options.clone().variant(variant).plan(ranks).unwrap().tile().n;
        use matmul_all_reduce::Variant::Epilogue;
        assert_eq!([columns(Epilogue, sxm), columns(Epilogue, pcie)], [128, 256]);
        let few = |n, ranks| {
            let options = matmul_all_reduce::Options::new(100, n, 3584).dtype(DType::BF16);
            let options = options.variant(matmul_all_reduce::Variant::UnfusedOneShot);
            options.plan(ranks).unwrap().tile()
        };
        let fused = TileShape { m: 104, n: 64 };
        assert_eq!([few(8192, sxm), few(7168, pcie)], [fused; 2]);
        assert_ne!(few(8192, pcie), fused);
    }
}
