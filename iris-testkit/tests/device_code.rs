//! What the compilers make of every access and operation of the device headers. The same probes as
//! in `cargo xtask check-protocols`, which compiles the kernels too. Without a vendor's compiler its
//! tests are ignored; an architecture that it need not know is reported.

use std::process::ExitCode;

use iris_kernels::rtc::Compiler;
use iris_testkit::check::device_code::{ARCHS, Outcome, Source, check, has_clang};
use iris_testkit::harness::{self, Group, named};

fn main() -> ExitCode {
    let no_nvrtc = Compiler::nvrtc().err().map(|error| error.to_string());
    let no_clang = (!has_clang()).then(|| "no clang with a target amdgcn".into());
    harness::run_together(vec![
        Group::new(no_nvrtc, named![accesses_have_their_order_and_scope_on_nvidia]),
        Group::new(no_clang, named![accesses_have_their_order_and_scope_on_amd]),
    ])
}

fn accesses_have_their_order_and_scope_on_nvidia() {
    every_access("sm_");
}

fn accesses_have_their_order_and_scope_on_amd() {
    every_access("gfx");
}

/// Of all architectures whose names begin so.
fn every_access(vendor: &str) {
    let source = Source { kernels: Vec::new(), ..Source::embedded() };
    for arch in ARCHS.into_iter().filter(|arch| arch.name.starts_with(vendor)) {
        match check(arch, &source).outcome {
            Outcome::Done { compiler, probes, twice, .. } => {
                println!("{}: {probes} probes, {twice} twice, {compiler}", arch.name);
                assert!(probes > 170, "only {probes} probes");
            }
            Outcome::Skipped(why) if arch.required => panic!("{}: {why}", arch.name),
            Outcome::Skipped(why) => println!("{} skipped: {why}", arch.name),
            Outcome::Failed(findings) => panic!("{}: {findings:#?}", arch.name),
        }
    }
}
