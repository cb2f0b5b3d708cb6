//! Allocator for the bytes of a segment: it computes offsets only, deterministically, and owns no
//! memory.
//!
//! Every rank keeps one [`Layout`] per segment and applies the same requests to it, so all ranks
//! compute the same offsets. A layout takes the first free block, by address, that is large enough.
//! So the result depends only on the sequence of requests, and large blocks at the end stay whole.

use std::collections::BTreeMap;

/// Alignment of every allocation, in bytes.
pub const ALIGNMENT: u64 = 1024;

/// Allocator of one segment: its free and its allocated blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    alignment: u64,
    capacity: u64,
    /// Free blocks: length by offset; adjacent blocks are always merged.
    free: BTreeMap<u64, u64>,
    live: BTreeMap<u64, Block>,
    serial: u64,
}

/// Block of memory that was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes, rounded up to the alignment.
    pub bytes: u64,
    /// Length in bytes as requested.
    pub asked: u64,
    /// Serial number of the allocation; never reused.
    pub serial: u64,
}

/// Error for a request that does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full {
    /// Bytes requested, rounded up to the alignment; `u64::MAX` if that overflows.
    pub asked: u64,
    /// Number of bytes that are not allocated.
    pub free: u64,
    /// Size of the largest free block in bytes.
    pub largest: u64,
}

/// Size of a block for `bytes` bytes: the next multiple of `alignment`, not 0; `u64::MAX` if that
/// overflows.
pub(crate) fn rounded(bytes: u64, alignment: u64) -> u64 {
    bytes.max(1).checked_next_multiple_of(alignment).unwrap_or(u64::MAX)
}

impl Layout {
    /// Makes an allocator of the bytes `reserved..capacity`. Both ends are rounded inwards to
    /// multiples of `alignment`.
    ///
    /// # Panics
    /// If `alignment` is zero.
    pub fn new(capacity: u64, reserved: u64, alignment: u64) -> Layout {
        assert!(alignment > 0, "an alignment of zero");
        let start = reserved.next_multiple_of(alignment);
        let end = capacity - capacity % alignment;
        let mut free = BTreeMap::new();
        if start < end {
            free.insert(start, end - start);
        }
        Layout {
            alignment,
            capacity: end.saturating_sub(start),
            free,
            live: BTreeMap::new(),
            serial: 0,
        }
    }

    /// Allocates a block of at least `bytes` bytes. A request of 0 bytes gets a block of one
    /// alignment unit, so that no two blocks have the same offset.
    ///
    /// # Errors
    /// [`Full`]; the state is then unchanged.
    pub fn alloc(&mut self, bytes: u64) -> Result<Block, Full> {
        let whole = rounded(bytes, self.alignment);
        let found = self.free.iter().find(|&(_, &len)| len >= whole);
        let Some((&offset, &len)) = found else {
            return Err(Full { asked: whole, free: self.free_bytes(), largest: self.largest() });
        };
        self.free.remove(&offset);
        if len > whole {
            self.free.insert(offset + whole, len - whole);
        }
        self.serial += 1;
        let block = Block { offset, bytes: whole, asked: bytes, serial: self.serial };
        self.live.insert(offset, block);
        Ok(block)
    }

    /// Frees the block that begins at `offset` and has this serial number. Returns `None`, without
    /// any change, if there is no such block.
    pub fn free(&mut self, offset: u64, serial: u64) -> Option<Block> {
        let block = *self.live.get(&offset).filter(|b| b.serial == serial)?;
        self.live.remove(&offset);
        let (mut start, mut end) = (block.offset, block.offset + block.bytes);
        if let Some(&len) = self.free.get(&end) {
            self.free.remove(&end);
            end += len;
        }
        if let Some((&before, &len)) = self.free.range(..start).next_back()
            && before + len == start
        {
            self.free.remove(&before);
            start = before;
        }
        self.free.insert(start, end - start);
        Some(block)
    }

    /// Allocated block that contains all of `offset..offset + bytes`; `None` if there is none.
    pub fn find(&self, offset: u64, bytes: u64) -> Option<Block> {
        let (_, block) = self.live.range(..=offset).next_back()?;
        let end = offset.checked_add(bytes)?;
        (end <= block.offset + block.bytes).then_some(*block)
    }

    /// Size of the allocatable range in bytes.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Number of bytes that are not allocated.
    pub fn free_bytes(&self) -> u64 {
        self.free.values().sum()
    }

    /// Size of the largest free block in bytes.
    pub fn largest(&self) -> u64 {
        self.free.values().copied().max().unwrap_or(0)
    }

    /// Allocated blocks, by ascending address.
    pub fn blocks(&self) -> impl Iterator<Item = Block> + '_ {
        self.live.values().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_neighbours_become_one_block() {
        let mut l = Layout::new(10 * 1024, 4096, 1024);
        assert_eq!(l.capacity(), 6 * 1024);
        let b: Vec<Block> = (0..6).map(|_| l.alloc(1000).unwrap()).collect();
        assert_eq!(b[0].offset, 4096);
        let full = l.alloc(1).unwrap_err();
        assert_eq!((full.asked, full.free, full.largest), (1024, 0, 0));
        for i in [1, 3, 5] {
            l.free(b[i].offset, b[i].serial).unwrap();
        }
        let full = l.alloc(1025).unwrap_err();
        assert_eq!((full.asked, full.free, full.largest), (2048, 3072, 1024));
        l.free(b[2].offset, b[2].serial).unwrap();
        assert_eq!(l.largest(), 3072);
        assert_eq!(l.alloc(3072).unwrap().offset, b[1].offset);
    }

    #[test]
    fn a_block_is_freed_once() {
        let mut l = Layout::new(1 << 20, 0, 1024);
        let a = l.alloc(0).unwrap();
        assert_eq!(a.bytes, 1024);
        assert!(l.free(a.offset, a.serial).is_some());
        assert!(l.free(a.offset, a.serial).is_none());
        let again = l.alloc(5).unwrap();
        assert_eq!(again.offset, a.offset);
        assert!(l.free(a.offset, a.serial).is_none(), "an old slice frees nothing");
        assert!(l.find(512, 513).is_none());
        assert_eq!(l.find(512, 512), Some(again));
        assert!(l.find(u64::MAX, 2).is_none());
        assert_eq!(l.alloc(u64::MAX).unwrap_err().asked, u64::MAX);
    }
}
