//! Checking protocols by exploring their executions.
//!
//! **Problem.** A protocol that is wrong in one interleaving of a million passes every test and
//! fails in production.
//!
//! **Solution.** A [`Scenario`] is a small program: some ranks, workgroups and threads, a few
//! calls, and what each thread does over a [`Memory`](iris_sync::Memory). Two engines run it:
//!
//! | engine | explores | finds | for |
//! |---|---|---|---|
//! | [`loom_memory::check`] | executions of the C11 memory model | races, stale reads, lost signals, wrong values | 2 ranks, up to 4 threads in all |
//! | [`search::exhaust`] | every interleaving, each state once | lost signals, wrong values | 2 to 4 ranks |
//! | [`search::random`] | interleavings drawn from a printed seed, with vector clocks | races, lost signals, wrong values | any size |
//!
//! [`Rules`] change the accesses of a protocol on the way to the memory: an order weakened, a
//! comparison replaced, a wait dropped. A check that still passes after such a change does not
//! check the changed rule. So every rule has such a mutant, see [`mutants`].
//!
//! **Running.** A protocol of one's own is a closure over a [`Thread`]:
//!
//! ```
//! use iris_sync::{Access, Order, epoch};
//! use iris_models::{Change, Check, Rules, Scenario, loom_memory};
//!
//! // Rank 0 writes a cell at rank 1 and publishes it; rank 1 waits and reads.
//! let handover = Scenario::new("handover", 2).program(|thread| {
//!     let (word, cell) = (thread.channel().signal(1, 0, 0), thread.cell(1, 0, 0));
//!     let call = thread.call(0);
//!     if thread.rank() == 0 {
//!         thread.write(cell, 42);
//!         epoch::publish(thread, word, call);
//!     } else if epoch::wait(thread, thread.channel(), word, call, 0).is_ok() {
//!         thread.expect(cell, 42);
//!     }
//! });
//! assert!(loom_memory::check(&handover, &Rules::default(), None).failure.is_none());
//!
//! // With a relaxed store, the search must find a race.
//! let weak = Rules::from(Change::Order(Access::VersionStore, Order::Relaxed));
//! assert_eq!(loom_memory::check(&handover, &weak, None).caught_by(), Some(Check::Race));
//! ```
//!
//! A program in another language drives the same engines through [`Thread::with_current`] and
//! [`Thread::perform`], which take operations ([`Operation`]) instead of the calls of `Memory`.
//!
//! [`headers`] does the same for a header that runs on a device. `examples/check_my_protocol.rs`
//! checks one protocol in both languages, in some forty lines. The feature `checks` (on by default)
//! adds [`check`], the checks of iris itself, which other protocols do not need.
//!
//! **Limits.** loom supports four threads besides the main thread and remembers seven stores of a
//! word. It does not reorder a load with a later store (load buffering). The search is sequentially
//! consistent. Neither engine models GPU caches or the asynchronous proxy.

mod arena;
#[cfg(feature = "checks")]
pub mod check;
pub mod elastic;
#[cfg(iris_cxx)]
mod hooks;
pub mod ll;
pub mod loom_memory;
pub mod mutants;
pub mod nodes;
pub mod ops;
pub mod primitives;
#[cfg(feature = "checks")]
pub mod proof;
mod quads;
pub mod recorder;
mod report;
mod rules;
mod scenario;
#[cfg(feature = "checks")]
pub mod schedule;
pub mod search;
#[cfg(feature = "checks")]
pub mod sequence;
#[cfg(iris_cxx)]
mod target;

pub use arena::{Arena, Operation, Place, ThreadId};
pub use report::{Check, Failure, Forbidden, Report};
pub use rules::{Change, Compare, Kind, Rules, Site};
pub use scenario::{Headers, POISON, Scenario, Thread, headers};
