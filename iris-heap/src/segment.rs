//! Mappings of shared memory, own and peers': the unsafe core of the CPU backend.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicU64};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::atomic_copy;
use crate::error::{Error, Result};
use crate::plain_access::{Access, Span};
use crate::util::{check_file_size, lock};

/// One mapping of a memfd, unmapped when it is dropped; or memory of the caller's, left alone.
///
/// The bytes are shared with other ranks, which write them at any time: no reference to them is ever
/// made but to atomics. Copies are atomic ([`atomic_copy`]) and keep apart from kernels that access
/// the bytes plainly ([`plain_access`](crate::plain_access)), so a race yields old or new words and
/// nothing undefined. Whoever resolves an address for code of their own vouches for that code.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    base: NonNull<u8>,
    bytes: usize,
    owned: bool,
    /// The name of memory that was made here and not yet shared: nothing is in it, and each rank's
    /// may be exchanged for a part of one file.
    fresh: Option<&'static str>,
    /// Kept until it has been passed on; a mapping does not need it.
    descriptor: Mutex<Option<OwnedFd>>,
}

// SAFETY: the struct owns its mapping, hands out references to atomics only, and its copies are atomic.
unsafe impl Send for SharedMemory {}
// SAFETY: as for Send.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// New memory, all zero. It takes pages only where it is touched.
    pub(crate) fn create(name: &'static str, bytes: u64) -> Result<SharedMemory> {
        let size = whole_pages(bytes)?;
        let fd = create_file(name, size)?;
        let base = map(&fd, 0, size)?;
        let descriptor = Mutex::new(Some(fd));
        Ok(SharedMemory { base, bytes: size, owned: true, fresh: Some(name), descriptor })
    }

    /// Maps memory that came as a descriptor: at least `bytes`, sealed against shrinking.
    pub(crate) fn import(fd: OwnedFd, bytes: u64) -> Result<SharedMemory> {
        let size = whole_pages(bytes)?;
        check_file(&fd, bytes)?;
        let base = map(&fd, 0, size)?;
        let descriptor = Mutex::new(Some(fd));
        Ok(SharedMemory { base, bytes: size, owned: true, fresh: None, descriptor })
    }

    /// Memory of the caller's.
    ///
    /// # Safety
    /// It stays valid for reads and writes by any thread until this is dropped, and nobody keeps a
    /// reference to it in the meantime.
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

    /// Whether this is memory that was made here and never shared.
    pub(crate) fn is_fresh(&self) -> bool {
        self.fresh.is_some()
    }

    /// The name it was made with.
    pub(crate) fn name(&self) -> &'static str {
        self.fresh.unwrap_or("iris")
    }

    /// A duplicate of the descriptor, for a peer.
    pub(crate) fn export(&self) -> Result<OwnedFd> {
        match &*lock(&self.descriptor) {
            Some(fd) => duplicate(fd.as_fd()),
            None => Err(Error::Closed { what: "the descriptor of this memory" }),
        }
    }

    /// Gives the descriptor back to the system, once the peers have theirs.
    pub(crate) fn close_descriptor(&self) {
        lock(&self.descriptor).take();
    }

    /// The word at byte `offset`.
    pub(crate) fn word(&self, offset: u64) -> Result<&AtomicI32> {
        let start = self.range(offset, 4)?;
        if !start.is_multiple_of(4) {
            return Err(Error::invalid("offset of a word", offset, "a multiple of 4"));
        }
        // SAFETY: `range` checked that the byte lies in the mapping.
        let word = unsafe { self.base.as_ptr().add(start) };
        // SAFETY: the word is aligned, as a page and `start` are; it lives as long as `self`; and
        // it is of a signal segment, in which copies are atomic and kernels have no operands.
        Ok(unsafe { AtomicI32::from_ptr(word.cast::<i32>()) })
    }

    /// The word of 64 bits at byte `offset`, of memory that is accessed by such words only.
    pub(crate) fn long(&self, offset: u64) -> Result<&AtomicU64> {
        let start = self.range(offset, 8)?;
        if !start.is_multiple_of(8) {
            return Err(Error::invalid("offset of a word of 64 bits", offset, "a multiple of 8"));
        }
        // SAFETY: `range` checked that the byte lies in the mapping.
        let word = unsafe { self.base.as_ptr().add(start) };
        // SAFETY: the word is aligned, as a page and `start` are; it lives as long as `self`; and who makes
        // such memory, issue boards, accesses it by atomic operations only.
        Ok(unsafe { AtomicU64::from_ptr(word.cast::<u64>()) })
    }

    /// Copies `data` to `offset`, atomically word by word.
    pub(crate) fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        let start = self.range(offset, data.len() as u64)?;
        // SAFETY: `range` checked that the bytes lie in the mapping.
        let to = unsafe { self.base.as_ptr().add(start) };
        let _access = Access::of_copy(&[self.span(start, data.len(), true)]);
        // SAFETY: as above; nobody accesses the bytes plainly during `_access` (see the type).
        unsafe { atomic_copy::store(data, to) };
        Ok(())
    }

    /// Copies from `offset` into `data`, atomically word by word.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        let start = self.range(offset, data.len() as u64)?;
        // SAFETY: `range` checked that the bytes lie in the mapping.
        let from = unsafe { self.base.as_ptr().add(start) };
        let _access = Access::of_copy(&[self.span(start, data.len(), false)]);
        // SAFETY: as above; nobody writes the bytes plainly during `_access` (see the type).
        unsafe { atomic_copy::load(from, data) };
        Ok(())
    }

    /// Sets `bytes` bytes from `offset` on, atomically word by word.
    pub(crate) fn fill(&self, offset: u64, bytes: u64, value: u8) -> Result<()> {
        self.range(offset, bytes)?;
        let part = [value; 4096];
        for start in (0..bytes).step_by(part.len()) {
            let len = (bytes - start).min(part.len() as u64);
            self.write(offset + start, &part[..len as usize])?;
        }
        Ok(())
    }

    /// Copies between mappings, which may be the same, atomically word by word.
    pub(crate) fn copy(&self, offset: u64, from: &SharedMemory, at: u64, bytes: u64) -> Result<()> {
        let start = self.range(offset, bytes)?;
        let source = from.range(at, bytes)?;
        let len = bytes as usize;
        let spans = vec![self.span(start, len, true), from.span(source, len, false)];
        // SAFETY: `range` checked that the bytes lie in the mapping.
        let to = unsafe { self.base.as_ptr().add(start) };
        // SAFETY: as above, of the other mapping.
        let source = unsafe { from.base.as_ptr().add(source) };
        let _access = Access::of_copy(&spans);
        // SAFETY: as above; nobody accesses the bytes plainly during `_access` (see the type).
        unsafe { atomic_copy::copy(source, to, len) };
        Ok(())
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
        // SAFETY: the mapping was made by `map` with this length, and whoever uses its addresses
        // holds it by `Arc`, so nobody is left.
        let outcome = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
        if let Err(error) = outcome {
            tracing::warn!(%error, bytes = self.bytes, "munmap failed");
        }
    }
}

/// One file that holds memory of all ranks: each rank's part in whole pages, one after the other.
#[derive(Debug)]
pub(crate) struct JointMemory {
    descriptor: OwnedFd,
    /// Pages of each part, in bytes.
    sizes: Vec<usize>,
}

impl JointMemory {
    /// A new file for parts of these sizes, all zero.
    pub(crate) fn create(name: &str, sizes: &[u64]) -> Result<JointMemory> {
        let (sizes, whole) = JointMemory::parts(sizes)?;
        Ok(JointMemory { descriptor: create_file(name, whole)?, sizes })
    }

    /// A file that another rank made for parts of these sizes.
    pub(crate) fn import(descriptor: OwnedFd, sizes: &[u64]) -> Result<JointMemory> {
        let (sizes, whole) = JointMemory::parts(sizes)?;
        check_file(&descriptor, whole as u64)?;
        Ok(JointMemory { descriptor, sizes })
    }

    fn parts(sizes: &[u64]) -> Result<(Vec<usize>, usize)> {
        let parts = sizes.iter().map(|&bytes| whole_pages(bytes)).collect::<Result<Vec<_>>>()?;
        let whole = parts.iter().try_fold(0u64, |sum, &part| sum.checked_add(part as u64));
        // Of pages already: what is rejected is a sum that no mapping could have.
        let whole = whole_pages(whole.unwrap_or(u64::MAX))?;
        Ok((parts, whole))
    }

    pub(crate) fn into_descriptor(self) -> OwnedFd {
        self.descriptor
    }

    /// A mapping of each part. They need the descriptor no longer.
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
    // A file that shrinks under a mapping would kill the process that touches the mapping.
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&fd, seals)
        .map_err(|e| Error::system(format!("sealing {name}"), e))?;
    Ok(fd)
}

/// A descriptor that came from elsewhere: at least `bytes`, sealed against shrinking.
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
            "one with the seal F_SEAL_SHRINK",
        ));
    }
    Ok(())
}

/// Maps `bytes` bytes from `offset` on, both of whole pages.
fn map(fd: &OwnedFd, offset: u64, bytes: usize) -> Result<NonNull<u8>> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
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
    // Rust's pointers reach isize::MAX bytes.
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
