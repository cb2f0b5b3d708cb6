//! Example of checking a protocol of your own, in Rust and in a device header, with a mutant of
//! each.
//!
//! Ranks 1 and 2 write a cell at rank 0 and increment a counter there. Rank 0 waits for both
//! increments and reads the cells. The device header is `check_my_protocol.h` in the folder of this
//! file; the program over the header is `cxx/example.cpp`. `iris_models::headers` explains how
//! another crate builds such programs.

#![allow(unsafe_code, reason = "the declaration of a program in C++")]

use iris_models::headers::{Headers, Input};
use iris_models::{Check, Operation, Place, Rules, Scenario, loom_memory};
use iris_sync::{Access, Memory, Order, Scope, SymWord};

#[cfg(iris_cxx)]
unsafe extern "C-unwind" {
    safe fn my_count_in(input: &Input<'_>) -> i32;
}
#[cfg(not(iris_cxx))]
extern "C-unwind" fn my_count_in(_: &Input<'_>) -> i32 {
    0 // Never called: without a C++ compiler, `on_headers` returns `None`.
}

/// Scenario of a counter. A thread that increments the counter releases its earlier writes; in the
/// mutant (`Relaxed`, or option 1) it does not.
fn count_in(order: Order) -> Scenario {
    let counter = SymWord { rank: 0, index: 1 << 20 }; // After all other words; begins with 0.
    let program = Headers::new(my_count_in, 1).option((order == Order::Relaxed).into());
    Scenario::new("count in", 3).headers(program).program(move |thread| {
        if thread.rank() != 0 {
            thread.write(thread.cell(0, 0, thread.rank()), 42);
            let (place, scope) = (Place::from(counter), Scope::System);
            thread.perform(Operation::Add { place, value: 1, order, scope });
            return;
        }
        while thread.load(counter, Access::SignalLoad) != thread.ranks() as i32 - 1 {
            thread.pause(0);
        }
        (1..thread.ranks()).for_each(|peer| thread.expect(thread.cell(0, 0, peer), 42));
    })
}

fn main() {
    for (order, expected) in [(Order::Release, None), (Order::Relaxed, Some(Check::Race))] {
        let scenario = count_in(order);
        for (source, scenario) in [("C++", scenario.on_headers()), ("Rust", Some(scenario))] {
            let Some(scenario) = scenario else {
                println!("skipped: {source}, there was no compiler for it");
                continue;
            };
            let report = loom_memory::check(&scenario, &Rules::default(), None);
            println!("{source}, {order:?}: {report}");
            assert_eq!(report.caught_by(), expected);
        }
    }
}
