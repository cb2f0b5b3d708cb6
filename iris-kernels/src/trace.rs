//! Trace spans that workgroups record: an activity with its start and its end.
//!
//! A trace buffer consists of one counter per workgroup, `count[MAX_GROUPS]`, followed by
//! `[group][capacity]` of [`TraceSpan`]. A workgroup writes only its own part of the buffer. When
//! this part is full, further spans are counted but dropped.

use bytemuck::{Pod, Zeroable};

/// Maximum number of workgroups of a launch for which a trace buffer has room.
pub const MAX_GROUPS: usize = 512;

/// Span of time in which one workgroup was occupied with one activity.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct TraceSpan {
    /// Start time in nanoseconds, on a clock that all ranks of a host share.
    pub begin: u64,
    /// End time in nanoseconds, on the same clock as `begin`.
    pub end: u64,
    /// Activity of the workgroup: the number of an [`iris_sync::Span`].
    pub kind: u32,
    /// Number of the tile, unit or rank that the activity concerned.
    pub what: u32,
}

/// Size in bytes of a trace buffer for `capacity` spans per workgroup.
pub const fn buffer_bytes(capacity: u32) -> usize {
    MAX_GROUPS * 4 + MAX_GROUPS * capacity as usize * size_of::<TraceSpan>()
}

/// Reads the spans in a trace buffer, by workgroup, and the number of dropped spans.
///
/// # Panics
/// If the length of `bytes` is not [`buffer_bytes`] of `capacity`.
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
