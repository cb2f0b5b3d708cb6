//! Mappings of shared memory, of this rank and of peers: the unsafe core of the CPU backend.

#![allow(unsafe_code, reason = "mappings of own and peers' memory")]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicU64};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::atomic_copy;
use crate::error::{Error, Result};
use crate::plain_access::{Access, Span};
use crate::util::{check_file_size, lock};

/// Mapping of a memfd, unmapped on drop; or memory of the caller, which stays mapped.
///
/// Other ranks write these bytes at any time, so the only references made to them are references to
/// atomics. Copies are atomic ([`atomic_copy`]) and exclude kernels that access the bytes plainly
/// ([`plain_access`](crate::plain_access)), so a race yields old or new words, never undefined
/// behaviour. Code that takes an address of this memory is itself responsible for data races.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    base: NonNull<u8>,
    bytes: usize,
    owned: bool,
    /// Name of the memory if this process created it and has never shared it. Such memory is unused
    /// so far, so it may be replaced by a part of a file that all ranks share ([`JointMemory`]).
    fresh: Option<&'static str>,
    /// Descriptor, kept until it has been passed to the peers; the mapping does not need it.
    descriptor: Mutex<Option<OwnedFd>>,
}

// SAFETY: the struct owns its mapping, hands out references to atomics only, and its copies are
// atomic.
unsafe impl Send for SharedMemory {}
// SAFETY: a shared reference gives access only to atomics and atomic copies, as stated for `Send`.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Creates zeroed memory of `bytes` bytes. The system provides pages only when they are
    /// touched.
    pub(crate) fn create(name: &'static str, bytes: u64) -> Result<SharedMemory> {
        let size = whole_pages(bytes)?;
        let fd = create_file(name, size)?;
        let base = map(&fd, 0, size)?;
        let descriptor = Mutex::new(Some(fd));
        Ok(SharedMemory { base, bytes: size, owned: true, fresh: Some(name), descriptor })
    }

    /// Maps memory that was received as a descriptor; it must have at least `bytes` bytes and be
    /// sealed against shrinking.
    pub(crate) fn import(fd: OwnedFd, bytes: u64) -> Result<SharedMemory> {
        let size = whole_pages(bytes)?;
        check_file(&fd, bytes)?;
        let base = map(&fd, 0, size)?;
        let descriptor = Mutex::new(Some(fd));
        Ok(SharedMemory { base, bytes: size, owned: true, fresh: None, descriptor })
    }

    /// Makes a mapping of `bytes` bytes of the caller's memory at `address`.
    ///
    /// # Safety
    /// The memory stays valid for reads and writes by any thread until the returned object is
    /// dropped, and no reference to the memory exists in the meantime.
    pub(crate) unsafe fn foreign(address: u64, bytes: u64) -> Result<SharedMemory> {
        let base = NonNull::new(address as *mut u8);
        let range = address.checked_add(bytes).filter(|&end| end <= isize::MAX as u64);
        match (base, range) {
            (Some(base), Some(_)) => {
                let bytes = bytes as usize;
                let descriptor = Mutex::new(None);
                Ok(SharedMemory { base, bytes, owned: false, fresh: None, descriptor })
            }
            _ => Err(Error::invalid(
                "imported memory",
                format!("{bytes} bytes at {address:#x}"),
                "an address of this process",
            )),
        }
    }

    pub(crate) fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// Whether this process created the memory and has never shared it.
    pub(crate) fn is_fresh(&self) -> bool {
        self.fresh.is_some()
    }

    /// Name with which the memory was created; `iris` if it has been shared.
    pub(crate) fn name(&self) -> &'static str {
        self.fresh.unwrap_or("iris")
    }

    /// Duplicates the descriptor, for a peer.
    pub(crate) fn export(&self) -> Result<OwnedFd> {
        match &*lock(&self.descriptor) {
            Some(fd) => duplicate(fd.as_fd()),
            None => Err(Error::Closed { what: "the descriptor of this memory" }),
        }
    }

    /// Closes the descriptor, after the peers have received theirs.
    pub(crate) fn close_descriptor(&self) {
        lock(&self.descriptor).take();
    }

    /// Returns the 32-bit word at byte offset `offset`, which must be a multiple of 4.
    pub(crate) fn word(&self, offset: u64) -> Result<&AtomicI32> {
        let start = self.range(offset, 4)?;
        if !start.is_multiple_of(4) {
            return Err(Error::invalid("offset of a word", offset, "a multiple of 4"));
        }
        // SAFETY: `range` checked that the word lies in the mapping.
        let word = unsafe { self.base.as_ptr().add(start) };
        // SAFETY: the word is aligned, as page and `start` are; it lives as long as `self`; and it
        // lies in a signal segment, where copies are atomic and no kernel has operands.
        Ok(unsafe { AtomicI32::from_ptr(word.cast::<i32>()) })
    }

    /// Returns the 64-bit word at byte offset `offset`, which must be a multiple of 8. The memory
    /// must be accessed only as 64-bit words.
    pub(crate) fn long(&self, offset: u64) -> Result<&AtomicU64> {
        let start = self.range(offset, 8)?;
        if !start.is_multiple_of(8) {
            return Err(Error::invalid("offset of a word of 64 bits", offset, "a multiple of 8"));
        }
        // SAFETY: `range` checked that the word lies in the mapping.
        let word = unsafe { self.base.as_ptr().add(start) };
        // SAFETY: the word is aligned, as page and `start` are; it lives as long as `self`; and
        // issue boards and pages of epochs, the only users, access this memory by atomic operations
        // only.
        Ok(unsafe { AtomicU64::from_ptr(word.cast::<u64>()) })
    }

    /// Copies `data` into this memory at byte `offset`, atomically word by word.
    pub(crate) fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        let start = self.range(offset, data.len() as u64)?;
        // SAFETY: `range` checked that the bytes lie in the mapping.
        let to = unsafe { self.base.as_ptr().add(start) };
        let _access = Access::of_copy(&[self.span(start, data.len(), true)]);
        // SAFETY: `range` checked the bytes, and `_access` excludes plain accesses to them (see the
        // type).
        unsafe { atomic_copy::store(data, to) };
        Ok(())
    }

    /// Copies from this memory at byte `offset` into `data`, atomically word by word.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        let start = self.range(offset, data.len() as u64)?;
        // SAFETY: `range` checked that the bytes lie in the mapping.
        let from = unsafe { self.base.as_ptr().add(start) };
        let _access = Access::of_copy(&[self.span(start, data.len(), false)]);
        // SAFETY: `range` checked the bytes, and `_access` excludes plain writes to them (see the
        // type).
        unsafe { atomic_copy::load(from, data) };
        Ok(())
    }

    /// Sets `bytes` bytes from `offset` on to `value`, atomically word by word.
    pub(crate) fn fill(&self, offset: u64, bytes: u64, value: u8) -> Result<()> {
        self.range(offset, bytes)?;
        let part = [value; 4096];
        for start in (0..bytes).step_by(part.len()) {
            let len = (bytes - start).min(part.len() as u64);
            self.write(offset + start, &part[..len as usize])?;
        }
        Ok(())
    }

    /// Copies `bytes` bytes at byte `at` of `from` into this memory at byte `offset`, atomically
    /// word by word; `from` may be this mapping.
    pub(crate) fn copy(&self, offset: u64, from: &SharedMemory, at: u64, bytes: u64) -> Result<()> {
        let start = self.range(offset, bytes)?;
        let source = from.range(at, bytes)?;
        let len = bytes as usize;
        let spans = vec![self.span(start, len, true), from.span(source, len, false)];
        // SAFETY: `range` checked that the bytes lie in the mapping.
        let to = unsafe { self.base.as_ptr().add(start) };
        // SAFETY: `from.range` checked that the bytes lie in the mapping `from`.
        let source = unsafe { from.base.as_ptr().add(source) };
        let _access = Access::of_copy(&spans);
        // SAFETY: both ranges were checked, and `_access` excludes plain accesses to them (see the
        // type).
        unsafe { atomic_copy::copy(source, to, len) };
        Ok(())
    }

    /// Gives the pages of this memory, which a memfd has, back to the system, also if other processes map
    /// them. The memory then reads as zeros, and a later store takes a page again.
    pub(crate) fn give_pages_back(&self) -> Result<()> {
        // SAFETY: the range is this mapping, of which nobody has a reference: all accesses are by words or
        // announced, and to those this is a store of zeros.
        unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.bytes, Advice::LinuxRemove) }
            .map_err(|e| Error::system("madvise(MADV_REMOVE)", e))
    }

    fn span(&self, start: usize, len: usize, written: bool) -> Span {
        let start = self.address() + start as u64;
        Span { bytes: start..start + len as u64, written }
    }

    fn range(&self, offset: u64, bytes: u64) -> Result<usize> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes as u64 => Ok(offset as usize),
            end => Err(Error::OutOfBounds {
                what: "bytes of a mapping".into(),
                start: offset,
                end: end.unwrap_or(u64::MAX),
                len: self.bytes as u64,
            }),
        }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        // SAFETY: `map` made the mapping with this length, and every user of its addresses holds it
        // by `Arc`, so there is no user left.
        let outcome = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
        if let Err(error) = outcome {
            tracing::warn!(%error, bytes = self.bytes, "munmap failed");
        }
    }
}

/// File with the memory of all ranks: one part of whole pages per rank, one after the other.
#[derive(Debug)]
pub(crate) struct JointMemory {
    descriptor: OwnedFd,
    /// Length of each part in bytes, a multiple of the page size.
    sizes: Vec<usize>,
}

impl JointMemory {
    /// Creates a zeroed file with one part per size in `sizes`, in bytes.
    pub(crate) fn create(name: &str, sizes: &[u64]) -> Result<JointMemory> {
        let (sizes, whole) = JointMemory::parts(sizes)?;
        Ok(JointMemory { descriptor: create_file(name, whole)?, sizes })
    }

    /// Wraps a file that another rank created with parts of these `sizes`.
    pub(crate) fn import(descriptor: OwnedFd, sizes: &[u64]) -> Result<JointMemory> {
        let (sizes, whole) = JointMemory::parts(sizes)?;
        check_file(&descriptor, whole as u64)?;
        Ok(JointMemory { descriptor, sizes })
    }

    fn parts(sizes: &[u64]) -> Result<(Vec<usize>, usize)> {
        let parts = sizes.iter().map(|&bytes| whole_pages(bytes)).collect::<Result<Vec<_>>>()?;
        let whole = parts.iter().try_fold(0u64, |sum, &part| sum.checked_add(part as u64));
        // `whole_pages` checks that the file is not too large to be mapped. It rounds nothing up
        // here, because each part is a multiple of the page size.
        let whole = whole_pages(whole.unwrap_or(u64::MAX))?;
        Ok((parts, whole))
    }

    pub(crate) fn into_descriptor(self) -> OwnedFd {
        self.descriptor
    }

    /// Maps each part. The mappings stay valid without the descriptor.
    pub(crate) fn map(self) -> Result<Vec<SharedMemory>> {
        let mut offset = 0;
        let mut mapped = Vec::with_capacity(self.sizes.len());
        for &bytes in &self.sizes {
            let base = map(&self.descriptor, offset, bytes)?;
            let descriptor = Mutex::new(None);
            mapped.push(SharedMemory { base, bytes, owned: true, fresh: None, descriptor });
            offset += bytes as u64;
        }
        Ok(mapped)
    }
}

fn create_file(name: &str, size: usize) -> Result<OwnedFd> {
    check_file_size(name, size as u64)?;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create(name, flags)
        .map_err(|e| Error::system(format!("memfd_create({name})"), e))?;
    rustix::fs::ftruncate(&fd, size as u64)
        .map_err(|e| Error::system(format!("ftruncate of {name} to {size} bytes"), e))?;
    // The file is sealed against a change of its size: if it shrank under a mapping, the system
    // would kill a process that touches the mapping.
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&fd, seals)
        .map_err(|e| Error::system(format!("sealing {name}"), e))?;
    Ok(fd)
}

/// Checks that a received descriptor has at least `bytes` bytes and is sealed against shrinking.
fn check_file(fd: &OwnedFd, bytes: u64) -> Result<()> {
    let there = rustix::fs::fstat(fd)
        .map_err(|e| Error::system("fstat of a passed descriptor", e))?
        .st_size;
    if (there as u64) < bytes {
        return Err(Error::invalid(
            "size of passed memory",
            there,
            format!("at least {bytes} bytes"),
        ));
    }
    let seals = rustix::fs::fcntl_get_seals(fd)
        .map_err(|e| Error::system("seals of a passed descriptor (is it a memfd?)", e))?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(Error::invalid(
            "passed memory",
            "a memfd that may shrink",
            "a memfd with the seal F_SEAL_SHRINK",
        ));
    }
    Ok(())
}

/// Maps `bytes` bytes of `fd` from `offset` on; both numbers must be multiples of the page size.
fn map(fd: &OwnedFd, offset: u64, bytes: usize) -> Result<NonNull<u8>> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses touches no existing memory.
    let base = unsafe { rustix::mm::mmap(null_mut(), bytes, prot, MapFlags::SHARED, fd, offset) }
        .map_err(|e| Error::system(format!("mmap of {bytes} bytes"), e))?;
    NonNull::new(base.cast::<u8>())
        .ok_or_else(|| Error::invalid("address of a mapping", 0, "an address"))
}

pub(crate) fn duplicate(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    fd.try_clone_to_owned().map_err(|e| Error::system("duplicating a descriptor", e))
}

fn whole_pages(bytes: u64) -> Result<usize> {
    let page = rustix::param::page_size() as u64;
    let size = bytes.max(1).checked_next_multiple_of(page);
    // Sizes above `isize::MAX` are refused, because no Rust object may be longer.
    size.and_then(|s| isize::try_from(s).ok()).map(|s| s as usize).ok_or_else(|| {
        Error::invalid("size of a segment", bytes, format!("at most {} bytes", isize::MAX))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn two_mappings_of_one_memory() {
        let a = SharedMemory::create("iris-test", 5000).unwrap();
        assert_eq!(a.bytes(), 8192);
        let b = SharedMemory::import(a.export().unwrap(), 5000).unwrap();
        a.close_descriptor();
        assert!(a.export().is_err());
        a.write(4998, &[1, 2, 3]).unwrap();
        let mut got = [0; 4];
        b.read(4997, &mut got).unwrap();
        assert_eq!(got, [0, 1, 2, 3]);
        b.word(64).unwrap().store(-7, Ordering::Relaxed);
        assert_eq!(a.word(64).unwrap().load(Ordering::Relaxed), -7);
        a.copy(0, &b, 4998, 3).unwrap();
        b.fill(1, 1, 9).unwrap();
        a.read(0, &mut got).unwrap();
        assert_eq!(got, [1, 9, 3, 0]);
        drop(a);
        b.read(4997, &mut got).unwrap();
        assert_eq!(got, [0, 1, 2, 3], "the memory outlives the mapping it came from");
    }

    #[test]
    fn parts_of_one_file_do_not_overlap() {
        let sizes = [5000, 1, 4096];
        let made = JointMemory::create("iris-test", &sizes).unwrap();
        let other = made.descriptor.try_clone().unwrap();
        let (a, b) = (made.map().unwrap(), JointMemory::import(other, &sizes).unwrap());
        let b = b.map().unwrap();
        assert_eq!(a.iter().map(SharedMemory::bytes).collect::<Vec<_>>(), [8192, 4096, 4096]);
        for (rank, part) in a.iter().enumerate() {
            part.fill(0, part.bytes(), rank as u8 + 1).unwrap();
        }
        for (rank, part) in b.iter().enumerate() {
            let mut got = vec![0; part.bytes() as usize];
            part.read(0, &mut got).unwrap();
            assert!(got.iter().all(|&byte| byte == rank as u8 + 1), "part {rank}");
        }
        assert!(!a[0].is_fresh(), "a part is shared already");
        assert!(JointMemory::create("iris-test", &[1 << 62, 1 << 62]).is_err());
        let short = JointMemory::create("iris-test", &[4096]).unwrap().into_descriptor();
        assert!(JointMemory::import(short, &[4096, 1]).is_err());
    }

    #[test]
    fn nothing_past_the_end() {
        let a = SharedMemory::create("iris-test", 4096).unwrap();
        assert!(a.write(4095, &[0, 0]).is_err());
        assert!(a.read(u64::MAX, &mut [0, 0]).is_err());
        assert!(a.fill(0, 4097, 0).is_err());
        assert!(a.word(4096).is_err() && a.word(2).is_err());
        assert!(SharedMemory::create("iris-test", u64::MAX - 5).is_err());
    }

    #[test]
    fn memory_that_may_shrink_or_is_short_is_refused() {
        let fd = rustix::fs::memfd_create("iris-test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        let other = fd.try_clone().unwrap();
        let e = SharedMemory::import(fd, 4096).unwrap_err().to_string();
        assert!(e.contains("F_SEAL_SHRINK"), "{e}");
        let e = SharedMemory::import(other, 5000).unwrap_err().to_string();
        assert!(e.contains("4096") && e.contains("5000"), "{e}");
    }
}
