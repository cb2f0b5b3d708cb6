//! Checks of hiprtc for AMD architectures: it must compile the whole device source and, if
//! `llvm-objdump` is installed, produce the same instructions as clang.

use std::process::{Command, Stdio};

use iris_kernels::rtc::{Compiler, KernelSource, Options};

use super::{DeviceSource, Finding, Outcome, amd, compare, options, probes};

pub(super) fn check(arch: &str, source: &DeviceSource) -> Outcome {
    let compiler = match Compiler::hiprtc() {
        Ok(compiler) => compiler,
        Err(error) => return Outcome::Skipped(error.to_string()),
    };
    let name = compiler.title();
    if !compiler.knows(arch) {
        return Outcome::Skipped(format!("{name} does not know {arch}"));
    }
    let headers = source.headers();
    let compile = |name: &str, text: &str, options: &Options| {
        let source = KernelSource { name, text };
        let code = compiler.compile_with(source, &headers, options, arch);
        code.map_err(|error| Finding::new("type", error.to_string()))
    };
    let mut findings = Vec::new();
    let probes = [probes::all(), probes::at_loaded_addresses()].concat();
    let mut read = 0;
    match compile("probes.cu", &probes::source(&probes), &Options::new()) {
        Ok(code) => {
            if let Some(code) = disassembled(&code, arch) {
                let found = |entry: &str| amd::instructions(&code, entry);
                // Fences are not compared, because older compilers also write caches back at a
                // fence that only acquires.
                let strict = |probe: &probes::Probe| probe.kind != probes::Kind::Fence;
                let wanted =
                    |probe: &probes::Probe| amd::isa(probe, arch).filter(|_| strict(probe));
                read = compare("isa", &mut findings, &probes, found, wanted);
            }
        }
        Err(finding) => findings.push(finding),
    }
    for (name, text) in &source.kernels {
        findings.extend(compile(name, text, &options(arch)).err());
    }
    if findings.is_empty() {
        let kernels = source.kernels.len();
        Outcome::Done { compiler: name, kernels, probes: probes.len(), twice: read }
    } else {
        Outcome::Failed(findings)
    }
}

/// Disassembles a code object into the form of the compiler's assembly.
fn disassembled(code: &[u8], arch: &str) -> Option<String> {
    let folder = tempfile::tempdir().ok()?;
    let file = folder.path().join("code");
    std::fs::write(&file, code).ok()?;
    let output = ["llvm-objdump-19", "llvm-objdump"].into_iter().find_map(|name| {
        let mut command = Command::new(name);
        command.arg("-d").arg(format!("--mcpu={arch}")).arg(&file).stdin(Stdio::null());
        command.output().ok().filter(|output| output.status.success())
    })?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // Lines of the disassembler in the form of the compiler: labels `0000000000001900 <name>:`
    // become `name:`, and comments after instructions are dropped.
    let line = |line: &str| match line.split_once('<').and_then(|(_, it)| it.strip_suffix(">:")) {
        Some(label) => format!("{label}:"),
        None => line.split("//").next().unwrap_or_default().trim_end().to_string(),
    };
    Some(text.lines().map(line).collect::<Vec<_>>().join("\n"))
}
