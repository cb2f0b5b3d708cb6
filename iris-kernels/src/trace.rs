//! Spans that workgroups leave behind: what each did, from when to when.
//!
//! A trace buffer is `count[MAX_GROUPS]`, then `[group][capacity]` of [`TraceSpan`]. A workgroup
//! writes only its own part; when that is full, further spans are counted and dropped.

use bytemuck::{Pod, Zeroable};

/// Workgroups that a trace buffer has room for.
pub const MAX_GROUPS: usize = 512;

/// One span of one workgroup.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct TraceSpan {
    /// When it began, in nanoseconds of the clock that all ranks of a host share.
    pub begin: u64,
    /// When it ended.
    pub end: u64,
    /// Which: number of an [`iris_sync::Span`].
    pub kind: u32,
    /// The tile, unit or rank it was about.
    pub what: u32,
}

/// Bytes of a trace buffer with room for `capacity` spans a workgroup.
pub const fn buffer_bytes(capacity: u32) -> usize {
    MAX_GROUPS * 4 + MAX_GROUPS * capacity as usize * size_of::<TraceSpan>()
}

/// The spans in a trace buffer, workgroup by workgroup, and how many were dropped.
///
/// # Panics
/// If `bytes` is not as long as [`buffer_bytes`] says.
pub fn read_buffer(bytes: &[u8], capacity: u32) -> (Vec<Vec<TraceSpan>>, u64) {
    assert_eq!(bytes.len(), buffer_bytes(capacity), "bytes of a trace buffer");
    let (counts, spans) = bytes.split_at(MAX_GROUPS * 4);
    let size = size_of::<TraceSpan>();
    let mut dropped = 0;
    let groups = counts
        .chunks_exact(4)
        .enumerate()
        .map(|(group, count)| {
            let count: u32 = bytemuck::pod_read_unaligned(count);
            let kept = count.min(capacity);
            dropped += u64::from(count - kept);
            let first = group * capacity as usize * size;
            spans[first..first + kept as usize * size]
                .chunks_exact(size)
                .map(bytemuck::pod_read_unaligned)
                .collect()
        })
        .collect();
    (groups, dropped)
}
