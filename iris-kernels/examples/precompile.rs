//! Compiles all kernels of the ops ahead of time: `precompile FOLDER ARCH..`, for example
//! `precompile kernels sm_90a`. A program that finds a folder `kernels` beside its executable uses
//! the kernels in this folder and needs no compiler.

use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let folder = words.next().ok_or("usage: precompile FOLDER ARCH..")?;
    let arches: Vec<String> = words.collect();
    let arches: Vec<&str> = arches.iter().map(String::as_str).collect();
    let count = iris_kernels::ahead::precompile(Path::new(&folder), &arches, |build, arch| {
        println!("{} {arch} {:?}", build.source.name, build.options.defines);
    })?;
    println!("{count} kernels in {folder}");
    Ok(())
}
