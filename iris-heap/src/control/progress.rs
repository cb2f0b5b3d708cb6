//! Progress that each rank of this node publishes on its issue board, which the other ranks read:
//! its current call, the collective step of its host, and the node that it waits for in a step
//! between nodes.

use std::thread;
use std::time::{Duration, Instant};

use iris_sync::FaultKind;

use super::Control;
use crate::abi::abort;
use crate::bootstrap::ProcessId;
use crate::error::Error;
use crate::issue_board::{AwaitedNode, Boards, Difference, Ended, LeftOut, Pulled};

impl Control {
    /// Sets the names of the nodes, by index, and the index of this rank's node.
    pub(crate) fn set_nodes(&self, names: Vec<String>, own: usize) {
        let _ = self.nodes.set((names, own));
    }

    /// Sets the processes of the ranks of this node, `None` for a thread of this process.
    pub(crate) fn set_processes(&self, processes: Vec<Option<ProcessId>>) {
        let _ = self.processes.set(processes);
    }

    /// Process of the rank `rank` of this node; `None` if it is a thread of this process, or not
    /// known.
    pub(crate) fn process(&self, rank: usize) -> Option<ProcessId> {
        *self.processes.get()?.get(rank)?
    }

    /// Process of the rank `rank` of this node, if the process is stopped.
    pub(super) fn stopped_process(&self, rank: usize) -> Option<ProcessId> {
        self.process(rank).filter(ProcessId::is_stopped)
    }

    /// Ranks of this node whose processes are stopped.
    pub(crate) fn stopped(&self) -> Vec<usize> {
        let all = self.processes.get().map_or(0, Vec::len);
        (0..all).filter(|&rank| self.stopped_process(rank).is_some()).collect()
    }

    /// Number in the whole world of the rank `rank` of this node, and the name of its host; in a
    /// world of one node, `rank` and `None`.
    pub(crate) fn in_whole_world(&self, rank: usize) -> (usize, Option<String>) {
        let Some((names, node)) = self.nodes.get() else { return (rank, None) };
        let size = self.boards().map_or(1, Boards::ranks);
        (node * size + rank, Some(names[*node].clone()))
    }

    /// Pairs texts, one for each rank of this node, with the ranks' numbers in the whole world.
    pub(super) fn numbered(&self, texts: impl IntoIterator<Item = String>) -> Vec<(usize, String)> {
        let number = |(rank, text)| (self.in_whole_world(rank).0, text);
        texts.into_iter().enumerate().map(number).collect()
    }

    /// Text of the error because of which rank `rank` of this node gave up, if a step between nodes
    /// failed; `None` for another reason.
    pub(super) fn reason_of(&self, rank: usize) -> Option<String> {
        let boards = self.boards().filter(|boards| rank < boards.ranks())?;
        boards.reason(rank).ok()?
    }

    /// Error for the rank `rank` of this node, which has given up.
    pub(crate) fn gave_up(&self, rank: usize) -> Error {
        let reason = self.reason_of(rank);
        let (rank, host) = self.in_whole_world(rank);
        Error::GaveUp { rank, host, reason }
    }

    /// Error for the loss of the rank `rank` of this node. In a world of several nodes, the
    /// connection of all ranks tells which rank was lost first, with its number in the whole world.
    /// The connection of this node's ranks may report a loss a little earlier, perhaps of a rank
    /// that ended because of the first loss, so this function waits for the connection of all
    /// ranks.
    pub(super) fn loss(&self, rank: usize) -> Error {
        let (number, Some(host)) = self.in_whole_world(rank) else {
            self.await_own_world();
            return self.cut_off.get().cloned().unwrap_or(Error::PeerLost { rank });
        };
        await_reason(|| self.elsewhere.get().is_some());
        self.elsewhere.get_or_init(|| Error::RankLost { rank: number, host }).clone()
    }

    /// Waits until this rank's own world reports the loss that a peer's kernel has reported,
    /// because the world may know why the lost rank has left.
    pub(super) fn await_own_world(&self) {
        await_reason(|| self.host_abort() != 0);
    }

    /// Error for the loss of a rank that is not of this node. A peer's kernel may report the loss a
    /// little earlier than this rank's own connection, so this function waits for the connection.
    pub(super) fn world_loss(&self) -> Error {
        let known = || self.elsewhere.get().or(self.cut_off.get()).cloned();
        await_reason(|| known().is_some());
        known().unwrap_or_else(|| super::aborted(abort::WORLD_LOST))
    }

    /// Tells the ranks of this node that this rank waits in a step between nodes, and for which
    /// node. Kernels that wait for this rank then blame that node, not this rank. `None`: the step
    /// has ended.
    pub fn publish_step(&self, step: Option<AwaitedNode>) {
        if let Some(boards) = self.boards()
            && let Err(error) = boards.set_step(step)
        {
            tracing::debug!(%error, "a step between nodes is not told to other ranks");
        }
    }

    /// Tells the ranks of this node which collective step this rank's host is in, by kind and call
    /// site; `None` ends the step. If this rank has closed or dropped the heap, the heap's last
    /// step stays published.
    pub(crate) fn publish_host_step(&self, step: Option<&str>) {
        if let Some(boards) = self.boards()
            && (step.is_some() || !boards.has_ended())
            && let Err(error) = boards.set_host_step(step)
        {
            tracing::debug!(%error, "a collective step of the host is not told to other ranks");
        }
    }

    /// Tells the ranks of this node that this rank issues no further call of the heap or operator
    /// `ended`. `None` withdraws that message and ends the host's step. Does nothing if a call of
    /// this heap has failed: the failure is then the error to report, not a missing call that
    /// follows from it.
    pub(crate) fn publish_end(&self, ended: Option<Ended>) {
        if let Some(boards) = self.boards()
            && (ended.is_none() || !self.has_failed())
            && let Err(error) = boards.set_ended(ended)
        {
            tracing::debug!(%error, "the end of a heap or operator is not told to other ranks");
        }
        if ended.is_none() {
            self.publish_host_step(None);
        }
    }

    /// Kind and call site of the collective step that the host of `rank` is in; `None` outside one.
    pub(super) fn host_step(&self, rank: usize) -> Option<String> {
        self.boards().filter(|boards| rank < boards.ranks())?.host_step(rank).ok()?
    }

    /// Text, to be appended to another text, that lists which of `ranks` are in a collective step
    /// of the hosts, and in which; empty if there are none.
    pub(crate) fn host_steps(&self, ranks: &[usize]) -> String {
        let steps = ranks.iter().filter_map(|&rank| Some((rank, self.host_step(rank)?)));
        let number = |rank| self.in_whole_world(rank).0;
        let text = |(rank, step)| format!("; rank {} waits for all ranks in {step}", number(rank));
        steps.map(text).collect()
    }

    /// Error about the first call that some rank has issued and that another rank can no longer
    /// issue, because it closes the heap or frees the call's operator. `None` if there is no such
    /// call. Also `None` if a call of this rank has failed, because a program may then close the
    /// heap early. If a rank has dropped its heap without close, first waits up to 2 s for the
    /// world to report why: a rank that fails drops its heap before its world.
    pub(crate) fn left_out(&self) -> Option<Error> {
        if self.boards()?.left_out().ok()??.dropped {
            await_reason(|| self.has_failed());
        }
        if self.has_failed() { None } else { self.find_left_out() }
    }

    /// Whether the library has returned an error to the program.
    pub(crate) fn has_told(&self) -> bool {
        self.errors.get().is_some_and(|errors| errors.any())
    }

    /// Error about a difference between the ranks' orders of calls, if there is one, even if the
    /// heap has failed. Used for the error of a collective step, because a rank that left out a
    /// call, or issued a call that other ranks left out, may have no fault of its own.
    pub(crate) fn broken_order(&self) -> Option<Error> {
        self.disorder().or_else(|| self.find_left_out())
    }

    /// Does [`Control::left_out`] without waiting, even if a call of this rank has failed.
    fn find_left_out(&self) -> Option<Error> {
        let LeftOut { found: Difference { call, operators }, ranks, .. } =
            self.boards()?.left_out().ok()??;
        let name = |(rank, operator): (usize, &Option<u32>)| match operator {
            Some(operator) => self.describe(*operator),
            None if ranks.contains(&rank) => match self.host_step(rank) {
                Some(step) => format!("left out ({step})"),
                None => "left out (the heap is closed or dropped, or the operator freed)".into(),
            },
            None => "not issued yet, or long ago".into(),
        };
        let operators = self.numbered(operators.iter().enumerate().map(name));
        let ranks = ranks.iter().map(|&rank| self.in_whole_world(rank).0).collect();
        let error = Error::Order { call, ranks, operators };
        Some(self.disorder.get_or_init(|| error).clone())
    }

    /// Text that names the node for which `rank` waits in a step between nodes, and the rank of
    /// that node; `None` if `rank` is in no step between nodes.
    pub(super) fn node_awaited_by(&self, rank: usize) -> Option<String> {
        let boards = self.boards().filter(|boards| rank < boards.ranks())?;
        Some(match boards.step(rank).ok()?? {
            AwaitedNode::Unknown => "another node".into(),
            AwaitedNode::Node(node) => {
                // Steps between nodes connect ranks of equal local rank.
                let number = node * boards.ranks() + rank;
                let name = self.nodes.get().and_then(|(names, _)| names.get(node));
                let host = name.map_or(String::new(), |name| format!(" on host {name}"));
                format!("node {node} (rank {number}{host})")
            }
        })
    }

    /// Text, to be appended to another text, that lists the ranks that wait in a step between
    /// nodes; empty if there are none.
    pub(crate) fn steps(&self) -> String {
        let ranks = 0..self.boards().map_or(0, Boards::ranks);
        let steps = ranks.filter_map(|rank| Some((rank, self.node_awaited_by(rank)?)));
        let number = |rank| self.in_whole_world(rank).0;
        let text = |(rank, node)| {
            format!("; rank {} waits for {node} in a step between nodes", number(rank))
        };
        steps.map(text).collect()
    }

    /// For each rank of this node, its number in the whole world and a text for an error message.
    ///
    /// If `fault` says that ranks passed A at different places of their memory, the text is the place of the
    /// rank's A. Otherwise it names, as far as the issue boards show them, the call that the rank is in
    /// and the collective function that its program has called, and its process if that is stopped.
    /// `None` if `fault` can come neither from a wrong order of calls nor from different places.
    pub(super) fn standing(&self, fault: &iris_sync::Fault) -> Option<Vec<(usize, String)>> {
        use iris_sync::Field;
        if fault.is_about_place() {
            return self.places(fault);
        }
        let about_calls = match fault.kind {
            FaultKind::NotEntered | FaultKind::NoProgress => true,
            FaultKind::Mismatch => matches!(fault.differing(), Some(Field::Op | Field::Sequence)),
            _ => false,
        };
        let boards = self.boards().filter(|_| about_calls)?;
        let (all, completed) = (boards.standing().ok()??, boards.completed().ok()?);
        let text = |(rank, (call, operator)): (usize, (u64, Option<u32>))| {
            let state = if completed[rank] >= call { "done with" } else { "in" };
            let place = match operator {
                Some(operator) => {
                    format!("{state} {}, call {call} of the heap", self.describe(operator))
                }
                None if call == 0 => "in no operator: it has issued no call".into(),
                None => format!("{state} call {call} of the heap"),
            };
            let place = match (self.node_awaited_by(rank), self.host_step(rank)) {
                (Some(node), _) => {
                    format!("{place}, in a step between nodes, waiting for {node}")
                }
                (None, Some(step)) => format!("{place}, and waits for all ranks in {step}"),
                (None, None) => place,
            };
            let place = match self.stopped_process(rank) {
                Some(process) => format!("{place}, in {process}"),
                None => place,
            };
            (self.in_whole_world(rank).0, place)
        };
        Some(all.into_iter().enumerate().map(text).collect())
    }

    /// For each rank of this node whose board shows it, its number in the whole world, and the
    /// place of its matrix A in the call of `fault`.
    fn places(&self, fault: &iris_sync::Fault) -> Option<Vec<(usize, String)>> {
        let places = self.boards()?.different_places(fault.op as u32).ok()??;
        let text = |(rank, Pulled { offset, ld }): (usize, Pulled)| {
            let rows =
                if ld == 0 { "contiguous".into() } else { format!("leading dimension {ld}") };
            (self.in_whole_world(rank).0, format!("at byte {offset} of the data segment, {rows},"))
        };
        let known = places.into_iter().enumerate().filter_map(|(rank, place)| Some((rank, place?)));
        Some(known.map(text).collect())
    }
}

/// Waits at most 2 s until `is_told` returns true, because the world often reports a little later
/// why a rank has ended.
pub(crate) fn await_reason(is_told: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_told() && begun.elapsed() < Duration::from_secs(2) {
        thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::bootstrap::process::tests::Sleeper;
    use crate::issue_board;

    /// Control blocks of two ranks; rank 0 waits in its second call for rank 1.
    pub(crate) fn waits_for_rank_1() -> [Control; 2] {
        let boards =
            |_| crate::segment::SharedMemory::create("iris-test", issue_board::BYTES).unwrap();
        let all = Arc::new((0..2).map(boards).collect::<Vec<_>>());
        let [c, late] = [0, 1].map(|rank| {
            let c = Control::default();
            c.set_boards(Boards::new(rank, all.clone()));
            assert_eq!(c.name_op("sum"), 0);
            c.boards().unwrap().issue(0, Pulled::default()).unwrap();
            c
        });
        c.boards().unwrap().issue(0, Pulled::default()).unwrap();
        [c, late]
    }

    /// Records a fault about rank 1, or node 1 if the kind is about nodes.
    fn record(c: &Control, kind: FaultKind) {
        let mut words = [0; crate::abi::FAULT_WORDS];
        (words[0], words[4]) = (kind as i32, 1);
        assert!(c.record_fault(&words));
    }

    #[test]
    fn a_fault_tells_where_each_rank_stands() {
        let [c, late] = waits_for_rank_1();
        late.complete(1);
        late.publish_host_step(Some("free at a.rs:1:2"));
        record(&c, FaultKind::NotEntered);
        let text = c.fault_error().unwrap().to_string();
        for expected in [
            "rank 1 has not entered",
            "rank 0 is in sum (operator 0), call 2 of the heap;",
            "rank 1 is done with sum (operator 0), call 1 of the heap, and waits for all ranks in free at a.rs:1:2;",
        ] {
            assert!(text.contains(expected), "{text}");
        }
        assert!(!text.contains("on host"), "{text}");
        assert!(matches!(c.gave_up(1), Error::GaveUp { rank: 1, host: None, reason: None }));
    }

    #[test]
    fn a_fault_tells_that_a_rank_is_stopped() {
        let [c, _] = waits_for_rank_1();
        let sleeper = Sleeper::spawn();
        c.set_processes(vec![None, Some(sleeper.process())]);
        sleeper.set_stopped(true);
        record(&c, FaultKind::NoProgress);
        let text = c.fault_error().unwrap().to_string();
        let expected =
            format!("rank 1 is in sum (operator 0), call 1 of the heap, in {}", sleeper.process());
        assert!(expected.contains("is stopped") && text.contains(&expected), "{text}");
    }

    /// Tests that a fault names a rank whose process is stopped in a step between nodes, and not
    /// the node that the rank waits for.
    #[test]
    fn a_rank_stopped_in_a_step_waits_for_no_node() {
        let [c, late] = waits_for_rank_1();
        let sleeper = Sleeper::spawn();
        c.set_processes(vec![None, Some(sleeper.process())]);
        late.publish_step(Some(AwaitedNode::Node(1)));
        sleeper.set_stopped(true);
        record(&c, FaultKind::NoProgress);
        let error = c.fault_error().unwrap();
        assert!(matches!(&error, Error::Fault { fault, .. } if fault.rank == 1), "{error:?}");
    }

    /// Tests that ranks that wait for a rank get the error of the step between nodes in which that
    /// rank failed.
    #[test]
    fn a_rank_that_gives_up_for_a_failed_step_tells_why() {
        let step = || Error::other(std::io::Error::other("rank 0 on host a has no ink"));
        for is_fault in [false, true] {
            let [c, late] = waits_for_rank_1();
            late.fail_elsewhere(step());
            let error = match is_fault {
                false => c.told_by_peer(2),
                true => {
                    record(&c, FaultKind::PeerGaveUp);
                    c.check().unwrap_err()
                }
            };
            let text = error.to_string();
            assert!(text.contains("rank 1 gave up: rank 0 on host a has no ink"), "{text}");
        }
    }

    /// Tests the error if a rank drops its heap and tells a reason a moment later: it is the
    /// reason, and not a call that the rank has left out.
    #[test]
    fn a_rank_that_drops_its_heap_may_tell_why() {
        let [c, late] = waits_for_rank_1();
        late.publish_end(Some(Ended::Dropped));
        let reason = Error::PeerAborted { rank: 1, host: None, reason: "no vocabulary".into() };
        let found = thread::scope(|scope| {
            let watcher = scope.spawn(|| c.left_out());
            thread::sleep(Duration::from_millis(100));
            c.lose(Some(1), reason);
            watcher.join().unwrap()
        });
        assert!(found.is_none(), "{found:?}");
        assert!(matches!(c.check(), Err(Error::PeerAborted { rank: 1, .. })), "{:?}", c.check());
    }

    /// Tests that the error is a rank's reason for leaving even if a peer's kernel has reported the
    /// loss of that rank before.
    #[test]
    fn a_loss_that_a_kernel_tells_has_the_reason_that_the_world_tells() {
        let reason = || Error::PeerAborted { rank: 1, host: None, reason: "no rank 2".into() };
        for is_fault in [false, true] {
            let [c, _late] = waits_for_rank_1();
            let find = || match is_fault {
                false => c.told_by_peer(abort::PEER_LOST + 1),
                true => {
                    record(&c, FaultKind::PeerLost);
                    c.check().unwrap_err()
                }
            };
            let found = thread::scope(|scope| {
                let watcher = scope.spawn(find);
                thread::sleep(Duration::from_millis(100));
                c.lose(Some(1), reason());
                watcher.join().unwrap()
            });
            assert!(matches!(found, Error::PeerAborted { rank: 1, .. }), "{found:?}");
        }
    }

    /// Tests texts about ranks of the second of two nodes, whose ranks have the numbers 2 and 3 in
    /// the whole world.
    #[test]
    fn ranks_of_several_nodes_have_their_numbers_in_the_whole_world() {
        let on_node_1 = || {
            let pair = waits_for_rank_1();
            pair.iter().for_each(|c| c.set_nodes(vec!["a".into(), "b".into()], 1));
            pair
        };
        let check = |text: String, expected: &[&str]| {
            expected.iter().for_each(|part| assert!(text.contains(part), "no {part:?} in {text}"));
            let of_node_0 = text.replace("(rank 1 on host a)", "");
            assert!(!of_node_0.contains("rank 0") && !of_node_0.contains("rank 1"), "{text}");
        };
        let [c, late] = on_node_1();
        late.publish_host_step(Some("free at a.rs:1:2"));
        check(c.host_steps(&[1]), &["; rank 3 waits for all ranks in free"]);
        record(&c, FaultKind::NotEntered);
        let error = c.fault_error().unwrap();
        assert!(matches!(&error, Error::Fault { fault, .. } if fault.rank == 3), "{error:?}");
        check(
            error.to_string(),
            &[
                "rank 3 has not entered",
                "rank 3 is on host b",
                "rank 2 is in sum",
                "rank 3 is in sum",
            ],
        );
        check(c.gave_up(1).to_string(), &["rank 3 on host b gave up"]);
        check(c.op_name(7).to_string(), &["that rank 2 has not made"]);

        let [c, late] = on_node_1();
        late.publish_step(Some(AwaitedNode::Node(0)));
        check(c.steps(), &["; rank 3 waits for node 0 (rank 1 on host a)"]);
        record(&c, FaultKind::NoProgress);
        let silent = c.fault_error().unwrap().to_string();
        check(silent, &["because rank 3 on host b waits for node 0 (rank 1 on host a)"]);

        let [c, late] = on_node_1();
        assert_eq!(late.name_op("max"), 1);
        late.boards().unwrap().issue(1, Pulled::default()).unwrap();
        late.complete(1);
        check(c.completed(), &["no call on rank 2; call 1 on rank 3"]);
        let order = c.disorder().unwrap();
        assert!(matches!(&order, Error::Order { ranks, .. } if *ranks == [3]), "{order:?}");
        check(order.to_string(), &["sum (operator 0) on rank 2", "(operator 1)", "on rank 3"]);

        let [c, late] = on_node_1();
        late.publish_end(Some(Ended::Heap));
        let order = c.left_out().unwrap();
        assert!(matches!(&order, Error::Order { ranks, .. } if *ranks == [3]), "{order:?}");
        check(order.to_string(), &["on rank 2; left out", "on rank 3"]);

        // The fault names a node, whose number is not converted.
        let [c, _] = on_node_1();
        record(&c, FaultKind::StepDiffers);
        let text = c.fault_error().unwrap().to_string();
        assert!(text.contains("node 1 is in another step") && !text.contains("host"), "{text}");
    }
}
