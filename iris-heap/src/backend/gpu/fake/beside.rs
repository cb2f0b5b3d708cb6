//! Tests of copies that run concurrently with a stream.

use super::*;
use crate::backend::Backend;

const COPY: DeviceCopy =
    DeviceCopy { to: 0x1000, from: 0x2000, bytes: 4, lines: 1, strides: [4, 4], signal: false };

/// Handle of the stream on which the last logged copy was enqueued.
fn copied_on(calls: &[String]) -> u64 {
    let copy = calls.iter().rfind(|call| call.starts_with("copy")).expect("a copy");
    copy.rsplit(' ').next().and_then(|raw| raw.parse().ok()).expect("a number")
}

/// Enqueues two copies on a copy stream that runs at the same time as `stream`; returns the handle
/// of the copy stream, and the logged calls.
fn copies(fake: &Fake, gpu: &Gpu, stream: &Stream) -> (u64, Vec<String>) {
    fake.taken();
    // SAFETY: the fake driver copies nothing.
    unsafe { gpu.copy_concurrent(stream, [COPY; 2]) }.unwrap();
    let calls: Vec<_> =
        fake.taken().into_iter().filter(|call| !call.starts_with("current")).collect();
    (copied_on(&calls), calls)
}

#[test]
fn they_begin_behind_what_is_enqueued_and_are_waited_for_where_they_are_joined() {
    let fake = Arc::new(Fake::default());
    let gpu = Gpu::new(fake.clone(), true, false).unwrap();
    let stream = Stream::from_backend(gpu.stream().unwrap());
    let own = stream.raw_handle();
    let (side, calls) = copies(&fake, &gpu, &stream);
    assert_ne!(side, own);
    let event = |call: &str| call.split(' ').nth(1).unwrap().to_string();
    let begin = event(&calls[0]);
    assert_eq!(calls[0], format!("record {begin} on {own}"));
    assert_eq!(calls[1], format!("wait_for {begin} on {side}"));
    assert_eq!(calls[2..4], [format!("copy on {side}"), format!("copy on {side}")]);
    let end = event(&calls[4]);
    assert_eq!(calls[4..], [format!("record {end} on {side}")]);
    gpu.join_copies(&stream).unwrap();
    assert_eq!(fake.taken(), [format!("wait_for {end} on {own}")]);
    // Later copies must use the same copy stream, even if they run concurrently with another
    // stream.
    assert_eq!(copies(&fake, &gpu, &stream).0, side);
    let other = Stream::from_backend(gpu.stream().unwrap());
    assert_eq!(copies(&fake, &gpu, &other).0, side);
}

#[test]
fn those_of_a_capture_have_a_stream_that_no_other_call_uses() {
    let fake = Arc::new(Fake::default());
    let gpu = Gpu::new(fake.clone(), true, false).unwrap();
    let [live, first, second] = [(); 3].map(|()| Stream::from_backend(gpu.stream().unwrap()));
    let ran = copies(&fake, &gpu, &live).0;
    fake.capture(first.raw_handle(), Some(1));
    let captured = copies(&fake, &gpu, &first).0;
    // Copies in a capture need a separate copy stream, because a stream that waits for an event of
    // a capture becomes part of the capture.
    fake.capture(captured, Some(1));
    assert_eq!(copies(&fake, &gpu, &first).0, captured, "another call of the same graph");
    fake.capture(second.raw_handle(), Some(2));
    let beside = copies(&fake, &gpu, &second).0;
    fake.capture(beside, Some(2));
    assert_eq!(copies(&fake, &gpu, &live).0, ran);
    let mut all = vec![ran, captured, beside];
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 3);
    // When a capture has ended, its copy stream is free for another capture.
    for raw in [first.raw_handle(), captured] {
        fake.capture(raw, None);
    }
    fake.capture(first.raw_handle(), Some(3));
    assert_eq!(copies(&fake, &gpu, &first).0, captured);
}

/// Tests devices on which an event must be recorded between data and signal: the event is recorded,
/// and signals are refused in captures, because recording an event adds no node to a graph.
#[test]
fn a_signal_stands_behind_a_record_and_in_no_capture() {
    let fake = Arc::new(Fake::default());
    assert!(!fake.kind().traits().copies_in_order);
    let gpu = Gpu::new(fake.clone(), true, false).unwrap();
    let stream = Stream::from_backend(gpu.stream().unwrap());
    assert!(gpu.copies_signal(&stream).unwrap());
    let copies = [COPY, DeviceCopy::signal(0x1000, 0x2000)];
    // SAFETY: the fake driver copies nothing.
    unsafe { gpu.copy_concurrent(&stream, copies) }.unwrap();
    let calls = fake.taken();
    let side = copied_on(&calls);
    let on_side = calls.iter().filter(|call| call.ends_with(&format!(" on {side}")));
    let names: Vec<&str> = on_side.filter_map(|call| call.split(' ').next()).collect();
    assert_eq!(names, ["wait_for", "copy", "record", "copy", "record"]);
    fake.capture(stream.raw_handle(), Some(1));
    assert!(!gpu.copies_signal(&stream).unwrap());
}

/// Tests that a join after a failed copy still waits for the copies that were enqueued before the
/// failure.
#[test]
fn copies_that_fail_are_joined() {
    let fake = Arc::new(Fake::default());
    let gpu = Gpu::new(fake.clone(), true, false).unwrap();
    let stream = Stream::from_backend(gpu.stream().unwrap());
    *fake.fails.lock().unwrap() = Some("copy");
    // SAFETY: the fake driver copies nothing.
    unsafe { gpu.copy_concurrent(&stream, [COPY]) }.unwrap_err();
    let last = fake.taken().pop().unwrap();
    let end = last.strip_prefix("record ").expect("behind what was enqueued").split(' ').next();
    gpu.join_copies(&stream).unwrap();
    assert_eq!(fake.taken(), [format!("wait_for {} on {}", end.unwrap(), stream.raw_handle())]);
}

/// Tests that a join does not wait for an event that was never recorded, nor for an event of
/// another capture.
#[test]
fn where_nothing_was_copied_nothing_is_waited_for() {
    let fake = Arc::new(Fake::default());
    let gpu = Gpu::new(fake.clone(), true, false).unwrap();
    let stream = Stream::from_backend(gpu.stream().unwrap());
    let waits = || {
        fake.taken();
        gpu.join_copies(&stream).unwrap();
        fake.taken().len()
    };
    assert_eq!(waits(), 0);
    // SAFETY: the fake driver copies nothing.
    unsafe { gpu.copy_concurrent(&stream, [COPY]) }.unwrap();
    assert_eq!((waits(), waits()), (1, 0));
}
