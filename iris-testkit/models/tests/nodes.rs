//! Tests of operators over several nodes: the order between the work within a node and a step
//! between nodes, and the thread blocks of a device that both need.

use iris_models::mutants::STATES;
use iris_models::nodes::{Handover, Room, composition, residency};
use iris_models::{Check, Report, Rules, search};

fn sound(report: &Report, at_least: u64) {
    println!("{report}");
    assert!(report.failure.is_none(), "{report}\n{}", report.history());
    assert!(report.executions >= at_least, "{report}: expected at least {at_least}");
}

#[test]
fn a_block_belongs_to_the_node_or_to_the_step() {
    let rules = Rules::default();
    for (nodes, calls) in [(2, 2), (2, 3), (3, 1)] {
        let right = composition(nodes, calls, Handover::Right);
        sound(&search::exhaust(&right, &rules, STATES), 20);
    }
    sound(&search::random(&composition(3, 3, Handover::Right), &rules, 1, 2000), 2000);
    for how in [Handover::Unfinished, Handover::Reused] {
        let report = search::random(&composition(2, 2, how), &rules, 1, 2000);
        assert_eq!(report.caught_by(), Some(Check::Race), "{how:?}: {report}");
    }
}

/// Tests that four ranks deadlock if kernels that wait for peers fill the devices. Two ranks run
/// such a kernel, which waits for the other two ranks. These run the step between nodes, which
/// waits for a rank that runs the kernel.
#[test]
fn a_step_between_nodes_needs_room_beside_kernels_that_wait() {
    let rules = Rules::default();
    let filled = search::exhaust(&residency(Room::Filled), &rules, STATES);
    println!("{filled}\n{}", filled.history());
    assert_eq!(filled.caught_by(), Some(Check::Lost), "{filled}");
    for room in [Room::Left, Room::InTurn] {
        sound(&search::exhaust(&residency(room), &rules, STATES), 100);
    }
}
