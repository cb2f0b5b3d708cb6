//! Runs of a test with both forms of a kernel: in Rust, and the device source compiled for the host.

use std::ffi::c_int;

use iris_kernels::Kernel;
use iris_kernels::args::OpArgs;
use libloading::os::unix::Library;

use super::symbol;

/// Function that runs one workgroup of a launch, from (arguments, index of the workgroup, number of
/// workgroups).
pub(super) type Run<'a> = dyn Fn(&OpArgs, u32, u32) + Sync + 'a;

/// Runs `test` with the Rust form of `kernel`, with its device form, which is the function `function` of
/// `library`, and with both in one call: ranks of either form take part in it.
pub(super) fn in_each_form(
    library: &Library,
    (kernel, function): (Kernel, &str),
    test: impl Fn(&Run<'_>),
) {
    type HostRun = unsafe extern "C" fn(usize, *const OpArgs, u32, u32, c_int, u32, u64, u32);
    let run: HostRun = symbol(library, "iris_host_run");
    let entry: usize = symbol(library, function);
    let rust = |args: &OpArgs, index, count| {
        // SAFETY: `args` holds addresses of memory that outlives the calls.
        unsafe { iris_kernels::cpu::run(kernel, args, index, count) }.expect("a call");
    };
    // SAFETY: `entry` is a kernel of this library; every address in `args` is that of memory that
    // outlives the calls.
    let device =
        |args: &OpArgs, index, count| unsafe { run(entry, args, index, count, 0, 0, 0, 0) };
    let mixed = |args: &OpArgs, index, count| match args.channel.rank % 2 {
        0 => rust(args, index, count),
        _ => device(args, index, count),
    };
    for run in [&rust as &Run<'_>, &device, &mixed] {
        test(run);
    }
}
