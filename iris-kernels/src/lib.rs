//! The kernels of iris: what runs on a device, as one source for AMD, NVIDIA and a host compiler,
//! and as Rust for the CPU.
//!
//! **Problem.** A kernel that multiplies and communicates is written once a vendor and once a
//! library, and each copy has its own subtle protocol.
//!
//! **Solution.** The protocols are those of [`iris_sync`], the same functions everywhere. [`args`]
//! is what a kernel is given, laid out alike on both sides; [`schedule`] says who computes what
//! and who waits for what; [`cpu`] runs it here.
//!
//! **Running.** Operators are [`program`]s, which an [`Executor`] runs; nobody else needs to launch kernels. Kernels of one's own,
//! from source that includes the same headers, are [`UserKernel`]s: `examples/ring.rs` is one, and
//! `kernels/README.md` says what they may call.
//!
//! **Debugging.** With a [`trace`] buffer in its arguments a kernel leaves a span for every
//! fetch, product, wait, signal and reduction of each workgroup.
//!
//! **Limits.** f32, f16 and bf16, sums in f32.

pub mod ahead;
pub mod args;
pub mod build;
pub mod cache;
pub mod cpu;
mod execute;
pub mod gemm;
pub mod gemm_config;
mod kernel;
mod library;
mod parallel;
pub mod program;
mod recent;
pub mod rtc;
pub mod schedule;
pub mod source;
mod target;
pub mod trace;
mod user_kernel;
pub mod vendor;
mod whole;

pub use execute::{Executor, Failure, Then, Workgroups};
pub use kernel::Kernel;
pub use library::{Library, Whole};
pub use target::Target;
pub use user_kernel::UserKernel;
pub use whole::WholeProduct;
