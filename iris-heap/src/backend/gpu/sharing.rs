//! Sharing of device memory: afterwards every rank has the memory of all ranks mapped.
//!
//! Ranks that are threads of one process pass each other their regions, and each rank enables
//! access to the others' regions on its own device. Ranks that are processes send each other
//! descriptions of their memory. A description contains the driver's IPC handle; if the driver
//! shares the memory by file descriptors, the ranks pass descriptors instead.

use std::sync::Arc;

use super::mapping::as_gpu;
use super::memory::{MemoryDriver, Origin, PlainRegion, Region};
use crate::backend::{Export, Mapping, nothing_passed};
use crate::encoding::{Reader, Writer};
use crate::error::Result;
use crate::util::unsupported;

/// Memory of all ranks, as it is mapped on one device.
pub(super) struct Joined {
    /// Memory regions of the ranks, indexed by rank.
    pub(super) regions: Vec<Arc<dyn Region>>,
    /// Number of ranks that use this rank's device, this rank included.
    pub(super) sharing: u32,
}

/// Describes this rank's memory for peers in other processes: its length in bytes, the id of the
/// device, and the IPC handle, which is empty if the memory is shared by a descriptor.
pub(super) fn describe(device: &dyn MemoryDriver, own: &dyn Mapping) -> Result<Vec<u8>> {
    let region = as_gpu(own)?.region()?;
    let mut message = Writer::default();
    message.u64(region.bytes()).text(&device.uuid()).bytes(&region.handle()?);
    Ok(message.finish())
}

/// Maps on `device` the memory that the other ranks, which are other processes, have exported.
pub(super) fn import(
    device: &Arc<dyn MemoryDriver>,
    rank: usize,
    own: &dyn Mapping,
    all: Vec<Export>,
) -> Result<Joined> {
    let uuid = device.uuid();
    let mut joined = Joined { regions: Vec::with_capacity(all.len()), sharing: 0 };
    for (from, Export { message, mut descriptors }) in all.into_iter().enumerate() {
        let mut r = Reader::new("exchange of device memory", &message);
        let (bytes, theirs, handle) = (r.u64()?, r.text()?, r.bytes()?);
        joined.sharing += u32::from(theirs == uuid);
        joined.regions.push(match descriptors.pop() {
            _ if from == rank => as_gpu(own)?.region()?,
            Some(descriptor) => device.clone().import(descriptor, bytes)?,
            None if !handle.is_empty() => {
                let opened = (device.open(handle)?, bytes);
                PlainRegion::of(device.clone(), opened, Origin::Opened)
            }
            None => return Err(nothing_passed(from)),
        });
    }
    Ok(joined)
}

/// Makes the memory of all ranks accessible to this device, for ranks that are threads of this
/// process.
pub(super) fn join(
    device: &dyn MemoryDriver,
    own: &dyn Mapping,
    all: &[Arc<dyn Mapping>],
) -> Result<Joined> {
    let region = |mapping: &dyn Mapping| as_gpu(mapping)?.region();
    let regions: Vec<_> = all.iter().map(|m| region(&**m)).collect::<Result<_>>()?;
    let ordinal = device.ordinal();
    let sharing = regions.iter().filter(|r| r.ordinal() == ordinal).count() as u32;
    let mut ordinals: Vec<i32> = regions.iter().map(|r| r.ordinal()).collect();
    ordinals.sort_unstable();
    ordinals.dedup();
    for &peer in ordinals.iter().filter(|&&peer| peer != ordinal) {
        if !device.can_access(peer)? {
            return Err(unsupported(
                &format!("a heap over devices {ordinal} and {peer}"),
                "they cannot access each other's memory; set another IRIS_NODE for each group of ranks \
                 whose devices can, and MASTER_ADDR, so that each group is a node of its own",
            ));
        }
    }
    // With some drivers the owner maps its memory for other devices: this rank's region is granted
    // to all of them here. With other drivers each device enables access to other devices' memory,
    // which the loop below does.
    region(own)?.grant(&ordinals)?;
    for peer in regions.iter().filter(|r| r.asks_for_access() && r.ordinal() != ordinal) {
        device.enable_access(peer.ordinal())?;
    }
    Ok(Joined { regions, sharing })
}
