//! What the compilers make of every access and operation of the device headers. The same probes as
//! in `cargo xtask check-protocols`, which compiles the kernels too. A compiler that is missing is
//! reported.

use iris_testkit::check::device_code::{ARCHS, Outcome, Source, check};

#[test]
fn every_access_is_compiled_to_its_order_and_scope() {
    let source = Source { kernels: Vec::new(), ..Source::embedded() };
    for arch in ARCHS {
        match check(arch, &source).outcome {
            Outcome::Done { compiler, probes, twice, .. } => {
                println!("{}: {probes} probes, {twice} twice, {compiler}", arch.name);
                assert!(probes > 170, "only {probes} probes");
            }
            Outcome::Skipped(why) => println!("skipped: {}: {why}", arch.name),
            Outcome::Failed(findings) => panic!("{}: {findings:#?}", arch.name),
        }
    }
}
