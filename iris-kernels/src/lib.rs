//! Kernels of iris: device code from one source for AMD, NVIDIA and a host compiler, and Rust code
//! for the CPU.
//!
//! **Problem.** A kernel that multiplies and communicates is usually written once per vendor and
//! library, and each copy has its own subtle protocol.
//!
//! **Solution.** The protocols are those of [`iris_sync`], with the same functions everywhere.
//! [`args`] defines the kernels' arguments with one layout for host and device; [`schedule`]
//! assigns tiles to workgroups and defines who waits for whom; [`cpu`] runs the kernels on the CPU.
//!
//! **Running.** Operators are [`program`]s, which an [`Executor`] runs; other code need not launch
//! kernels. A user's own kernel, from source that includes the same headers, is a [`UserKernel`]:
//! `examples/ring.rs` has one, and `kernels/README.md` lists the functions that it may call.
//!
//! **Debugging.** With a [`trace`] buffer in its arguments a kernel records a span for every fetch,
//! product, wait, signal and reduction of each workgroup.
//!
//! **Limits.** Elements are f32, f16 or bf16; sums are f32.

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
