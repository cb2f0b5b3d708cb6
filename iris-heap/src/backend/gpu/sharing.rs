//! Who is told what of whose memory, so that all ranks have all of it mapped.
//!
//! Ranks that are threads of one process pass each other their regions, and each asks its device for
//! access to those of others. Ranks that are processes describe their memory to each other, with a
//! handle of the driver's where it goes by one, and pass a descriptor where it goes by that.

use std::sync::Arc;

use super::mapping::as_gpu;
use super::memory::{MemoryDriver, Region};
use crate::backend::{Export, Mapping};
use crate::error::{Error, Result};
use crate::util::unsupported;
use crate::wire::{Reader, Writer};

/// The memory of all ranks, as a device has it.
pub(super) struct Joined {
    /// By rank.
    pub(super) regions: Vec<Arc<dyn Region>>,
    /// Ranks that use this device, this one included.
    pub(super) sharing: u32,
}

/// What the peers, other processes, are told of this rank's memory: its length, the device, and a
/// handle, if it goes by one.
pub(super) fn describe(device: &dyn MemoryDriver, own: &dyn Mapping) -> Result<Vec<u8>> {
    let region = as_gpu(own)?.region()?;
    let mut message = Writer::default();
    message.u64(region.bytes()).text(&device.uuid()).bytes(&region.handle()?);
    Ok(message.finish())
}

/// Maps what the other ranks, processes, have given.
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
            None if !handle.is_empty() => device.clone().open(handle, bytes)?,
            None => {
                return Err(Error::Wire {
                    what: format!("memory of rank {from}"),
                    problem: "no handle".into(),
                });
            }
        });
    }
    Ok(joined)
}

/// Makes the memory of all ranks, threads of this process, good for this device.
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
                "they cannot access each other's memory",
            ));
        }
    }
    // Where the owner maps its memory for all devices, it must be told of them; whoever accesses
    // other memory asks for that.
    region(own)?.grant(&ordinals)?;
    for peer in regions.iter().filter(|r| r.asks_for_access() && r.ordinal() != ordinal) {
        device.enable_access(peer.ordinal())?;
    }
    Ok(Joined { regions, sharing })
}
