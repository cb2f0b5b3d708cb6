//! Call numbers: a wait tests whether a signal is of its call or a later one, even across a wrap.
//!
//! ```sh
//! cargo run --release -p iris-sync --example 01_call_numbers
//! ```

use iris_sync::Call;

fn main() {
    let call = Call::new(i32::MAX);
    let (before, after) = (call.previous(), call.next());
    println!("call {}: before it {}, after it {}", call.number(), before.number(), after.number());
    // A signal word holds the number of the last call that raised the signal: the word is never
    // cleared.
    for seen in [before, call, after] {
        println!(
            "  a wait for it that sees {:11} is over: {}",
            seen.number(),
            call.reached_by(seen.number())
        );
    }
    assert!(!call.reached_by(before.number()) && call.reached_by(after.number()));
}
