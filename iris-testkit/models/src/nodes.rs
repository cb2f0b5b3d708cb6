//! Scenarios of operators over several nodes. They check the order between the work within a node
//! and a step between nodes, and the use of a device's thread blocks, which both need.
//!
//! **Limits.** Streams, events and the scheduler of a device are modelled as their documentation
//! describes them. An event is a word that is released and acquired. A launch takes all of its
//! thread blocks at once, and waits while fewer are free.

use iris_sync::{Memory, epoch};

use super::ops::value;
use super::{Place, Scenario, Thread};

/// Order between the work within a node and the step between nodes, for one block of data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Handover {
    /// The step begins after the block is finished, and the block is reused after the step's end.
    Right,
    /// Mutant: the step does not wait until the block is finished.
    Unfinished,
    /// Mutant: the next call writes the block without waiting for the step's end.
    Reused,
}

/// Use of a device's thread blocks by a node's kernels while a step between nodes is in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Room {
    /// A kernel that waits for peers leaves room for the step's thread blocks.
    Left,
    /// A kernel that waits for peers fills the device, but the step begins after the kernel's end.
    InTurn,
    /// Mutant: a kernel that waits for peers fills the device, and the step may begin at any time.
    Filled,
}

/// Index of the event that a node's stream records when a block is finished.
const FINISHED: u32 = 0;
/// Index of the event that the stream of steps records at a step's end.
const ENDED: u32 = 1;
/// Index of the signal by which a rank announces that it has begun the step.
const BEGUN: u32 = 2;
/// Index of the signal by which a rank announces that its data for the step has arrived.
const ARRIVED: u32 = 3;

/// Scenario of calls over `nodes` nodes of one rank each. Workgroup 0 of a rank stands for the
/// caller's stream: on it, the node finishes a block and later uses the data that the step
/// received. Workgroup 1 stands for the stream of steps, on which the ranks of all nodes exchange
/// their blocks.
pub fn composition(nodes: u32, calls: u32, how: Handover) -> Scenario {
    Scenario::new(format!("composition, {nodes} nodes, {calls} calls, {how:?}"), nodes)
        .calls(calls, 7)
        .groups(&vec![2; nodes as usize])
        .program(move |thread| match thread.id().group {
            0 => stream(thread, how),
            _ => steps(thread, how),
        })
}

/// Waits until the word `index` from rank `from` has the number of the call at `position`.
fn wait(thread: &Thread<'_>, from: u32, index: u32, position: u32) {
    let channel = thread.channel();
    let word = channel.signal(thread.rank(), from, index);
    let _ = epoch::wait(thread, channel, word, thread.call(position), from);
}

/// Publishes the number of the call at `position` in the word `index` for rank `to`.
fn tell(thread: &Thread<'_>, to: u32, index: u32, position: u32) {
    let word = thread.channel().signal(to, thread.rank(), index);
    epoch::publish(thread, word, thread.call(position));
}

/// Cell with the block of this rank, which the node finishes and the step sends.
fn block(thread: &Thread<'_>) -> Place {
    thread.cell(thread.rank(), 0, 0)
}

/// Cell of rank `at` that receives the block of rank `from`.
fn received(thread: &Thread<'_>, at: u32, from: u32) -> Place {
    thread.cell(at, 1, from)
}

fn stream(thread: &Thread<'_>, how: Handover) {
    let me = thread.rank();
    let number = |position| thread.call(position).number();
    for position in 0..thread.calls() {
        thread.write(block(thread), value(me, number(position), 0, 0));
        tell(thread, me, FINISHED, position);
        if how == Handover::Reused {
            continue;
        }
        wait(thread, me, ENDED, position);
        for peer in thread.channel().peers() {
            thread.expect(received(thread, me, peer), value(peer, number(position), 0, 0));
        }
    }
}

fn steps(thread: &Thread<'_>, how: Handover) {
    let me = thread.rank();
    let peers = || thread.channel().peers();
    for position in 0..thread.calls() {
        if how != Handover::Unfinished {
            wait(thread, me, FINISHED, position);
        }
        peers().for_each(|peer| tell(thread, peer, BEGUN, position));
        for peer in peers() {
            wait(thread, peer, BEGUN, position);
            let sent = thread.read(block(thread));
            thread.write(received(thread, peer, me), sent);
            tell(thread, peer, ARRIVED, position);
        }
        peers().for_each(|peer| wait(thread, peer, ARRIVED, position));
        tell(thread, me, ENDED, position);
    }
}

/// Number of thread blocks that a device of [`residency`] runs at once.
const BLOCKS: i32 = 4;
/// Number of thread blocks of a step between nodes.
const STEP_BLOCKS: i32 = 1;

/// Word that counts the free thread blocks of a rank's device; it lies after all other words.
fn free(rank: u32) -> Place {
    Place::Dev { rank, index: 1 << 20 }
}

/// Runs `body` as a launch of `blocks` thread blocks: waits until that many blocks are free, takes
/// them, and gives them back at the end. A device takes blocks in one step. So the count is
/// accessed without atomics, because [`search::exhaust`](crate::search::exhaust) runs consecutive
/// non-atomic accesses as one step.
fn launch(thread: &Thread<'_>, blocks: i32, body: impl FnOnce()) {
    let place = free(thread.rank());
    let change = |now: i32, by: i32| thread.write(place, now + by);
    loop {
        let now = thread.read(place);
        if now >= blocks {
            change(now, -blocks);
            break;
        }
        thread.pause(0);
    }
    body();
    change(thread.read(place), blocks);
}

/// Scenario of two nodes of two ranks each; ranks 0 and 1 are on node 0. Workgroup 0 of each rank
/// launches a kernel that waits for the other rank of the node. Workgroup 1 launches a step between
/// nodes, which waits for the rank with the same local rank. Only
/// [`search::exhaust`](crate::search::exhaust) can run this scenario.
pub fn residency(room: Room) -> Scenario {
    let ranks = 4;
    let scenario = Scenario::new(format!("residency, {room:?}"), ranks);
    let all_free = |scenario: Scenario, rank| scenario.initial(free(rank), BLOCKS);
    (0..ranks).fold(scenario, all_free).groups(&vec![2; ranks as usize]).program(move |thread| {
        let me = thread.rank();
        let meet = |peer: u32, index: u32| {
            tell(thread, peer, index, 0);
            wait(thread, peer, index, 0);
        };
        if thread.id().group == 0 {
            let blocks = if room == Room::Left { BLOCKS - STEP_BLOCKS } else { BLOCKS };
            launch(thread, blocks, || meet(me ^ 1, BEGUN));
            if room == Room::InTurn {
                tell(thread, me, FINISHED, 0);
            }
        } else {
            if room == Room::InTurn {
                wait(thread, me, FINISHED, 0);
            }
            launch(thread, STEP_BLOCKS, || meet(me ^ 2, ARRIVED));
        }
    })
}
