//! Checks a protocol of one's own, in Rust and in a device header, and a mutant of each.
//!
//! Ranks 1.. each write a cell at rank 0 and count themselves in there; rank 0 waits for all and
//! reads the cells. The header is `check_my_protocol.h`; `cxx/example.cpp` calls it as a program of
//! a model. A crate of one's own compiles such a file with cc, as `build.rs` does here.

use iris_sync::{Access, Memory, Order, Scope, SymWord};
use iris_testkit::model::headers::{self, Headers};
use iris_testkit::model::{Check, Op, Place, Rules, Scenario, loom_memory};

#[cfg(iris_cxx)]
unsafe extern "C-unwind" {
    safe fn my_count_in(input: &headers::Input<'_>) -> i32;
}

/// The counter is word 2^20 of rank 0; whoever counts itself in releases what it wrote.
fn count_in(order: Order) -> Scenario {
    Scenario::new("count in", 3).program(move |lane| {
        let counter = Place::Sym { rank: 0, index: 1 << 20 };
        if lane.rank() != 0 {
            lane.write(lane.cell(0, 0, lane.rank()), 42);
            let scope = Scope::System;
            lane.perform(Op::Add { place: counter, value: 1, order, scope });
            return;
        }
        let counter = SymWord { rank: 0, index: 1 << 20 };
        while lane.load(counter, Access::SignalLoad) != lane.ranks() as i32 - 1 {
            lane.pause(0);
        }
        (1..lane.ranks()).for_each(|peer| lane.expect(lane.cell(0, 0, peer), 42));
    })
}

fn main() {
    let check = |scenario: &Scenario| loom_memory::check(scenario, &Rules::default(), None);
    let report = check(&count_in(Order::Release));
    println!("{report}");
    assert!(report.failure.is_none());
    let mutant = check(&count_in(Order::Relaxed));
    println!("{mutant}");
    assert_eq!(mutant.caught_by(), Some(Check::Race));
    in_the_header(check);
}

#[cfg(iris_cxx)]
fn in_the_header(check: impl Fn(&Scenario) -> iris_testkit::model::Report) {
    let program = Headers::new(my_count_in, 1);
    for (program, expected) in [(program, None), (program.option(1), Some(Check::Race))] {
        let scenario = Scenario::new("count in, device header", 3).headers(program);
        let report = scenario.on_headers().map(|scenario| check(&scenario));
        report.iter().for_each(|report| println!("{report}"));
        assert_eq!(report.map(|report| report.caught_by()), Some(expected));
    }
}

#[cfg(not(iris_cxx))]
fn in_the_header(_: impl Fn(&Scenario) -> iris_testkit::model::Report) {
    let _: Option<Headers> = None;
    println!("skipped: no C++ compiler, looked for {}", headers::COMPILER);
}
