//! Tests of the issue boards: what ranks learn of each other's calls.

use super::*;

fn boards<const N: usize>() -> [Boards; N] {
    let board = |_| SharedMemory::create("iris-test", BYTES).unwrap();
    let all = Arc::new((0..N).map(board).collect());
    std::array::from_fn(|rank| Boards::new(rank, Arc::clone(&all)))
}

fn issue(boards: &Boards, operators: impl IntoIterator<Item = u32>) {
    let issue = |operator| boards.issue(operator, Pulled::default()).unwrap();
    operators.into_iter().for_each(issue);
}

#[test]
fn the_first_difference_is_found_by_all() {
    let all = boards::<3>();
    issue(&all[0], [7, 0, 5]);
    issue(&all[1], [7]);
    issue(&all[2], [7, 1, 0]);
    let operators = vec![Some(0), None, Some(1)];
    for boards in &all {
        let found = boards.difference().unwrap();
        assert_eq!(found, Some(Difference { call: 2, operators: operators.clone() }));
    }
    let behind = |rank: usize| all[rank].behind().unwrap();
    assert_eq!(behind(0), Some(Behind { call: 2, operator: Some(0), ranks: vec![1] }));
    assert_eq!(behind(1), Some(Behind { call: 1, operator: Some(7), ranks: vec![] }));
    assert_eq!(behind(2).map(|it| it.operator), Some(Some(1)));
}

#[test]
fn the_last_calls_of_all_ranks_are_told() {
    let [one, other] = boards();
    issue(&one, [4, 6]);
    one.complete(1).unwrap();
    one.complete(0).unwrap();
    assert_eq!(other.standing().unwrap(), Some(vec![(2, Some(6)), (0, None)]));
    assert_eq!((other.completed().unwrap(), one.issued().unwrap()), (vec![1, 0], 2));
}

#[test]
fn a_step_between_nodes_is_told_until_it_ends() {
    let [one, other] = boards();
    assert_eq!(other.step(0).unwrap(), None);
    for step in [AwaitedNode::Unknown, AwaitedNode::Node(0), AwaitedNode::Node(4095)] {
        one.set_step(Some(step)).unwrap();
        assert_eq!((other.step(0).unwrap(), other.step(1).unwrap()), (Some(step), None));
    }
    one.set_step(None).unwrap();
    assert_eq!(other.step(0).unwrap(), None);
}

#[test]
fn a_step_of_the_host_is_told_until_it_ends() {
    let [one, other] = boards();
    let long = "é".repeat(4 * STEP.count()) + "cut";
    for (step, told) in [("close heap at a.rs:1:2", None), ("free at b.rs:3:4", None)]
        .into_iter()
        .chain([(&*long, Some(&long[..8 * STEP.count()]))])
    {
        one.set_host_step(Some(step)).unwrap();
        assert_eq!(other.host_step(0).unwrap().as_deref(), Some(told.unwrap_or(step)));
        assert_eq!(other.host_step(1).unwrap(), None);
        one.set_host_step(None).unwrap();
        assert_eq!(other.host_step(0).unwrap(), None);
    }
}

#[test]
fn a_call_is_left_out_if_its_rank_can_no_longer_issue_it() {
    let all = boards::<3>();
    all[1].set_ended(Some(Ended::Heap)).unwrap();
    issue(&all[0], [7, 5]);
    issue(&all[1], [7]);
    issue(&all[2], [7]);
    let found = Difference { call: 2, operators: vec![Some(5), None, None] };
    let left_out = Some(LeftOut { found, ranks: vec![1], dropped: false });
    assert!(all.iter().all(|boards| boards.left_out().unwrap() == left_out));
    all[1].set_ended(Some(Ended::Dropped)).unwrap();
    assert!(all[0].left_out().unwrap().expect("rank 1 has ended").dropped);
    for (ended, is_left_out) in
        [(None, false), (Some(Ended::Operator(7)), false), (Some(Ended::Operator(5)), true)]
    {
        all[1].set_ended(ended).unwrap();
        assert_eq!(all[0].left_out().unwrap(), left_out.clone().filter(|_| is_left_out));
    }
    issue(&all[1], [5]);
    assert_eq!(all[0].left_out().unwrap(), None);
}

/// Tests that a rank which has closed the heap is found even if another rank, which continues, has
/// issued fewer calls.
#[test]
fn a_call_is_left_out_though_another_rank_is_late() {
    let all = boards::<3>();
    issue(&all[0], [7, 5]);
    issue(&all[1], [7]);
    all[1].set_ended(Some(Ended::Heap)).unwrap();
    let found = all[2].left_out().unwrap().expect("rank 1 has ended");
    assert_eq!((found.found.call, found.ranks), (2, vec![1]));
}

#[test]
fn calls_that_one_board_no_longer_holds_are_not_compared() {
    let [ahead, late] = boards();
    issue(&ahead, (0..CALLS + 1).map(|_| 2));
    // The entry of call 1 has been overwritten by a later call.
    let behind = Behind { call: 1, operator: None, ranks: vec![1] };
    assert_eq!(ahead.behind().unwrap(), Some(behind));
    issue(&late, [1, 2]);
    assert_eq!(ahead.difference().unwrap(), None);
    issue(&late, [3]);
    assert_eq!(late.difference().unwrap().unwrap().call, 3);
}

#[test]
fn the_first_call_with_different_places_is_found_by_all() {
    let all = boards::<3>();
    let place = |offset, ld| Pulled { offset, ld };
    // Places in the first call, which is a call of operator 5, so a search for 7 must ignore it.
    let firsts = [place(0, 0), place(64, 0), place(128, 0)];
    let seconds = [place(0, 9), place(0, 9), place(0, 8)];
    let differing = || all[2].different_places(7).unwrap();
    for (boards, first) in all.iter().zip(firsts) {
        boards.issue(5, first).unwrap();
    }
    for (boards, second) in all.iter().zip(seconds).take(2) {
        boards.issue(7, second).unwrap();
    }
    assert_eq!(differing(), None);
    all[2].issue(7, seconds[2]).unwrap();
    assert_eq!(differing(), Some(seconds.map(Some).to_vec()));
    issue(&all[0], (0..CALLS).map(|_| 5));
    assert_eq!(differing(), None, "rank 0 has overwritten the call");
}

#[test]
fn a_call_that_was_taken_back_or_a_capture_is_no_difference() {
    let [one, other] = boards();
    issue(&one, [4]);
    one.retract().unwrap();
    issue(&other, [5]);
    assert_eq!(one.difference().unwrap(), None);
    issue(&one, [6]);
    assert!(other.difference().unwrap().is_some());
    one.set_captured().unwrap();
    issue(&other, [5]);
    assert_eq!((one.difference().unwrap(), other.behind().unwrap()), (None, None));
}
