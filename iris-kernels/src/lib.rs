//! Device kernels of iris: one source for NVIDIA, AMD and a host compiler, and the same kernels in
//! Rust for the CPU.
//!
//! **Problem.** A kernel that multiplies and communicates is usually written once per vendor and
//! once per library, and each copy has a subtle protocol of its own.
//!
//! **Solution.** All kernels call the protocol functions of [`iris_sync`], or device functions with
//! the same names. [`args`] defines the kernel arguments, with one layout for host and device;
//! [`schedule`] assigns tiles to ranks and workgroups; [`cpu`] contains the kernels in Rust, which
//! run on host threads.
//!
//! **Running.** An operator's call is a [`program`], which an [`Executor`] enqueues; applications
//! do not launch operator kernels themselves. An application's own kernel, compiled from source
//! that includes the same headers, is a [`UserKernel`]. `examples/ring.rs` is a complete example,
//! and `kernels/README.md` lists the functions that a user's kernel may call.
//!
//! **Debugging.** If the arguments have a [`trace`] buffer, a kernel records a span for every
//! fetch, product, wait, signal and reduction of each workgroup.
//!
//! **Limits.** Elements are f32, f16 or bf16; sums are f32.

pub mod ahead_of_time;
pub mod args;
pub mod build;
pub mod cache;
pub mod cpu;
pub mod dtype;
mod execute;
pub mod gemm;
pub mod gemm_config;
mod kernel;
mod library;
mod library_gemm;
mod lru_cache;
mod parallel;
pub mod program;
pub mod rtc;
pub mod schedule;
pub mod source;
mod target;
pub mod trace;
mod user_kernel;
pub mod vendor;

pub use execute::{Executor, Failure, Recovery, Workgroups};
pub use kernel::Kernel;
pub use library::{GemmRequest, Library, VendorBits};
pub use library_gemm::LibraryGemm;
pub use target::Target;
pub use user_kernel::UserKernel;
