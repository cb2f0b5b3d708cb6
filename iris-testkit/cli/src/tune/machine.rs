//! `iris tune` without shapes: measures the parameters of this machine from which times are
//! predicted.

use anyhow::Result;
use iris_heap::{BackendKind, DType};
use iris_ops::{CostParameters, Topology, TuningFile, Variant};
use iris_testkit::suite::{Op, Options as OpOptions};
use iris_testkit::{note, say};

use super::fit::fitted;
use super::measured::of_line;
use super::options::Options;
use super::regret::{errors, quantile};
use super::timed_on_host;
use crate::gpu_bench;

/// Case to time: an operator, its options, and names of variants.
pub(crate) type Case = (Op, OpOptions, Vec<String>);

/// Cases that determine the parameters: messages with little and with much data, GEMMs limited by
/// memory and by arithmetic, and products with messages of each kind. On the CPU the cases have an
/// eighth of the rows.
fn cases(kind: BackendKind, ranks: Topology) -> Vec<Case> {
    use Variant::*;
    let host = kind.traits().host_threads;
    let dtype = if host { DType::F32 } else { DType::BF16 };
    let columns = if host { 1024 } else { 4096 };
    let mut cases = Vec::new();
    let mut add = |op: Op, [m, n, k]: [usize; 3], dtype, variants: &[Variant]| {
        let options = OpOptions::new(m, n, k).dtype(dtype).backend(kind).uniform_shape(true);
        let able = op.variants_on(ranks.device);
        let variants = variants.iter().filter(|variant| able.contains(variant));
        cases.push((op, options, variants.map(|it| it.name().to_owned()).collect()));
    };
    add(Op::Barrier, [0, 0, 0], dtype, &[Flat]);
    for rows in [1, 32] {
        add(Op::AllReduce, [rows, columns, 0], dtype, &[Ll, TwoShotLl, OneShot, TwoShot]);
        for op in [Op::AllGather, Op::ReduceScatter] {
            add(op, [rows.max(ranks.size), columns, 0], dtype, &[Ll, Push]);
        }
        add(Op::Broadcast, [rows, columns, 0], dtype, &[Ll, Push]);
    }
    for rows in if host { [128, 1024] } else { [1024, 8192] } {
        add(Op::AllReduce, [rows, columns, 0], dtype, &[OneShot, TwoShot]);
        add(Op::AllGather, [rows, columns, 0], dtype, &[Push]);
        add(Op::ReduceScatter, [rows, columns, 0], dtype, &[Push]);
        add(Op::Broadcast, [rows, columns, 0], dtype, &[Push, TwoShot]);
    }
    let deep = if host { 512 } else { 4096 };
    for rows in [16, deep] {
        add(Op::Matmul, [rows, columns, deep], dtype, &[Local]);
    }
    if !host {
        add(Op::Matmul, [1024, 2048, 2048], DType::F32, &[Local]);
    }
    let products = [Push, Unfused, CopyEngine, Epilogue];
    for rows in if host { [64, 256] } else { [1024, 4096] } {
        add(Op::MatmulReduceScatter, [rows, columns, deep], dtype, &products);
        add(Op::AllGatherMatmul, [rows, columns, deep], dtype, &[Baseline, Unfused, CopyEngine]);
    }
    if !host {
        // Cases whose message takes longer than their product, so that the rates of copy engines and
        // stores decide the time.
        add(Op::MatmulReduceScatter, [8192, columns, 512], dtype, &[CopyEngine, Epilogue]);
        add(Op::AllGatherMatmul, [8192, 512, columns], dtype, &[CopyEngine]);
    }
    cases
}

/// Tuning file for these ranks, with its measurements if they are of this machine. Fails if the file
/// cannot be written.
pub(super) fn file_of(ranks: Topology) -> Result<TuningFile> {
    let path = TuningFile::check_place(ranks)?;
    Ok(TuningFile::of(ranks).unwrap_or_else(|error| {
        note!("{} is replaced: {error}", path.display());
        TuningFile::empty(ranks)
    }))
}

/// Measures the parameters of this machine, writes its tuning file, and prints the results; returns
/// whether all were measured.
pub(crate) fn measure(options: &Options, ranks: usize) -> Result<bool> {
    let kind = options.backend;
    let ranks = Topology::new(0, ranks).on(kind);
    let mut file = file_of(ranks)?;
    let cases = cases(kind, ranks);
    let lines = match kind.traits().host_threads {
        true => timed_on_host(&cases, ranks.size, options.iters.unwrap_or(30))?,
        false => gpu_bench::timed(kind, ranks.size, &cases)?,
    };
    let wanted: usize = cases.iter().map(|(_, _, variants)| variants.len()).sum();
    let rows = lines.into_iter().filter_map(|mut line| {
        line["ranks"] = ranks.size.into();
        of_line(line, ranks)
    });
    let rows: Vec<_> = rows.collect();
    let start = CostParameters::of(ranks.device);
    let machine = fitted(&rows.iter().collect::<Vec<_>>(), &start);
    for (name, (value, before)) in
        CostParameters::NAMES.iter().zip(machine.values().into_iter().zip(start.values()))
    {
        say!("{name:24} {value:>14.4}   built in {before:>14.4}")?;
    }
    let [found, built_in] = [&machine, &start].map(|it| 100.0 * quantile(&errors(&rows, it), 0.5));
    say!(
        "{} ranks on {}: {} calls timed; median error of predicted times: {found:.1} %, with built-in parameters \
         {built_in:.1} %",
        ranks.size,
        ranks.device,
        rows.len()
    )?;
    if rows.len() < wanted {
        note!(
            "{} of {wanted} calls could not be measured: the parameters that they determine keep their built-in values",
            wanted - rows.len()
        );
    }
    file.machine = Some(machine);
    say!("{}", file.save(ranks)?.display())?;
    Ok(rows.len() == wanted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use iris_ops::Device;
    use serde_json::json;

    /// Tests that each rate decides at least a tenth of the time of one of the cases for `ranks`.
    /// The fit finds no value for a rate that decides none. The rate between two GPUs counts only
    /// where no switch connects them.
    #[track_caller]
    fn every_rate_is_in_a_case(ranks: usize) {
        let ranks = Topology::new(0, ranks).on_device(Device::named("h200").unwrap());
        let cases = cases(BackendKind::Cuda, ranks);
        let line = |(op, options, variants): &Case| {
            let (m, n, k, dtype) = (options.m, options.n, options.k, options.dtype.to_string());
            let op = op.name();
            let lines = variants.iter().map(|variant| {
                of_line(
                    json!({"op": op, "variant": variant, "dtype": dtype, "m": m, "n": n, "k": k, "ranks": ranks.size, "us": 1.0}),
                    ranks,
                )
            });
            lines.map(|line| line.expect("a plan")).collect::<Vec<_>>()
        };
        let rows: Vec<_> = cases.iter().flat_map(line).collect();
        let values = CostParameters::of(ranks.device).values();
        let mut unseen = Vec::new();
        for (at, name) in CostParameters::NAMES.iter().enumerate() {
            let time = |factor: f64| {
                let mut values = values.clone();
                values[at] *= factor;
                let machine = CostParameters::of_values(&values);
                rows.iter().map(|row| row.predicted(&machine).expect("a time")).collect::<Vec<_>>()
            };
            let share = |(more, now): (f64, f64)| ((more / now).ln() / 0.01f64.ln_1p()).abs();
            let largest = time(1.01).into_iter().zip(time(1.0)).map(share).fold(0.0, f64::max);
            println!("{name}: {largest:.2}");
            if name.ends_with("_per_us") && largest < 0.1 {
                unseen.push(*name);
            }
        }
        assert_eq!(unseen, ["peer_link_bytes_per_us"]);
    }

    #[test]
    fn every_rate_of_two_gpus_is_in_a_case() {
        every_rate_is_in_a_case(2);
    }

    #[test]
    fn every_rate_of_four_gpus_is_in_a_case() {
        every_rate_is_in_a_case(4);
    }
}
