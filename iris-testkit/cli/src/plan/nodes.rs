//! Predictions for several nodes: `iris plan --nodes N` for one operator, and the tables of
//! iris-ops/SCALING.md.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

use anyhow::Result;
use comfy_table::Table;
use iris_heap::{BackendKind, DType};
use iris_ops::{Device, Forecast, NetworkRate, Shard, Topology};
use iris_testkit::say;
use iris_testkit::suite::{self, Op, Options as OpOptions};

use super::{Options, sizes};
use crate::errors::usage;
use crate::gpu_bench;
use crate::problem::known_variant;
use crate::record;

/// Line rate of the network port of each rank, in Gbit/s: a DGX H200 has one ConnectX-7 of 400
/// Gbit/s for each GPU.
const GBIT: f64 = 400.0;

/// Prints predictions for calls of one operator, or for the shapes of a file.
pub(super) fn main(options: &Options, ranks: Topology) -> Result<bool> {
    let (nodes, size, device) = (options.nodes, ranks.size, ranks.device);
    if nodes == 0 || !size.is_multiple_of(nodes) {
        return Err(usage("--nodes", nodes, format!("a divisor of the {size} ranks")));
    }
    check_device(device)?;
    let gbit = options.gbit.unwrap_or(GBIT);
    if !(gbit.is_finite() && gbit > 0.0) {
        return Err(usage("--gbit", gbit, "a positive rate in Gbit/s"));
    }
    let network = NetworkRate::of_gbit(gbit);
    let ranks = ranks.on_nodes(nodes).network_gbit(gbit.round() as u32);
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::UTF8_FULL_CONDENSED);
    table.set_header([
        "operator",
        "M",
        "N",
        "K",
        "blocks",
        "in the node",
        "network",
        "fused",
        "unfused",
        "gain",
    ]);
    let mut add = |op: Op, variant: &str, call: &OpOptions| -> Result<()> {
        let row = match forecast((op, variant), call, ranks, &network)? {
            Some(it) => cells(op, call, &it),
            None => {
                return Err(usage(
                    "--nodes",
                    nodes,
                    format!("an operator with a prediction over several nodes; {op} has none"),
                ));
            }
        };
        table.add_row(row);
        Ok(())
    };
    if let Some(op) = options.op {
        let variant = options.variant.as_deref().unwrap_or("auto");
        known_variant("--variant", op, variant)?;
        let rows = options.rows.unwrap_or((1, options.m.unwrap_or(4096)));
        let nk = [options.n, options.k].map(|it| it.unwrap_or(4096));
        for m in sizes(op, rows) {
            add(op, variant, &options.call(m, nk, device))?;
        }
    } else {
        let file = options.cases.as_deref();
        for shape in gpu_bench::read(device.backend, file, None)? {
            if shape.op != Op::Matmul {
                add(shape.op, "auto", &shape.options)?;
            }
        }
    }
    say!(
        "{nodes} nodes of {} ranks on {device}, a port of {gbit} Gbit/s for each rank. All times are \
         predicted; none was measured on a network (iris-ops/SCALING.md).",
        size / nodes
    )?;
    say!("{table}")?;
    Ok(true)
}

/// Refuses devices for which the model of NCCL's collectives has no constants.
fn check_device(device: Device) -> Result<()> {
    match device.backend {
        BackendKind::Cuda => Ok(()),
        other => Err(usage(
            "--device",
            other,
            "an NVIDIA GPU such as h200, because predictions over nodes take NCCL's times",
        )),
    }
}

fn forecast(
    (op, variant): (Op, &str),
    call: &OpOptions,
    ranks: Topology,
    network: &NetworkRate,
) -> Result<Option<Forecast>> {
    Ok(suite::plan(op, variant, ranks, call)?.forecast(network, call.m))
}

fn cells(op: Op, call: &OpOptions, it: &Forecast) -> Vec<String> {
    let us = |us: f64| format!("{us:.1} us");
    vec![
        op.to_string(),
        call.m.to_string(),
        call.n.to_string(),
        if op.multiplies() { call.k } else { 0 }.to_string(),
        it.blocks.to_string(),
        us(it.node_us),
        us(it.network_us),
        us(it.total_us),
        us(it.unfused_us),
        format!("{:.2}", it.unfused_us / it.total_us),
    ]
}

/// Numbers of nodes for which the tables of SCALING.md have a column.
const NODES: [usize; 6] = [2, 4, 8, 16, 32, 64];
/// Number of GPUs of each node in the tables.
const PER_NODE: usize = 8;
/// Smallest ratio of unfused to fused time at which the tables say that fusing pays.
const PAYS: f64 = 1.05;

/// Replaces the tables of predictions in `file`, a copy of SCALING.md.
pub(super) fn write(file: &Path, device: Device) -> Result<()> {
    check_device(device)?;
    record::write_between("scaling", file, &tables(device)?)
}

/// The tables of SCALING.md as Markdown.
fn tables(device: Device) -> Result<String> {
    let network = NetworkRate::of_gbit(GBIT);
    let over = |nodes: usize| {
        Topology::new(0, PER_NODE * nodes).on_nodes(nodes).on_device(device).untuned()
    };
    let shapes = gpu_bench::read(device.backend, None, None)?;
    let shapes = shapes.iter().filter(|it| it.op != Op::Matmul && it.options.dtype == DType::BF16);
    let heads = NODES.map(|nodes| format!(" {nodes} nodes |")).concat();
    let line = "| ---: ".repeat(NODES.len());
    let mut text = format!("| operator | M x N x K |{heads}\n| --- | --- {line}|\n");
    let mut products: Vec<((String, usize, usize), Op, OpOptions)> = Vec::new();
    let mut seen = BTreeSet::new();
    for shape in shapes {
        let (op, call) = (shape.op, &shape.options);
        let by = if call.shard == Shard::Columns { ", by columns" } else { "" };
        let name = format!("`{op}`{by}");
        let k = if op.multiplies() { format!(" x {}", call.k) } else { String::new() };
        if !seen.insert((name.clone(), [call.m, call.n, call.k])) {
            continue;
        }
        write!(text, "| {name} | {} x {}{k} |", call.m, call.n)?;
        for nodes in NODES {
            match forecast((op, "auto"), call, over(nodes), &network)? {
                Some(it) => {
                    write!(text, " {:.0} ({:.2}) |", it.total_us, it.unfused_us / it.total_us)?
                }
                None => write!(text, " - |")?,
            }
        }
        text.push('\n');
        let product = (name, call.n, call.k);
        if op.multiplies() && !products.iter().any(|(it, ..)| *it == product) {
            products.push((product, op, call.clone()));
        }
    }
    write!(text, "\n| operator | N x K |{heads}\n| --- | --- {line}|\n")?;
    for ((name, n, k), op, call) in products {
        write!(text, "| {name} | {n} x {k} |")?;
        for nodes in NODES {
            let pays = |m: usize| -> Result<bool> {
                let call = call.clone().rows(m);
                let it = forecast((op, "auto"), &call, over(nodes), &network)?;
                Ok(it.is_some_and(|it| it.unfused_us >= PAYS * it.total_us))
            };
            let rows: Vec<usize> = (0..=16).map(|bits| 1 << bits).collect();
            let paying = rows.iter().map(|&m| pays(m)).collect::<Result<Vec<_>>>()?;
            // Finds the smallest number of rows from which on fusing always pays.
            let losing = paying.iter().rposition(|pays| !pays).map_or(0, |at| at + 1);
            match rows.get(losing) {
                Some(m) => write!(text, " {m} |")?,
                None => write!(text, " - |")?,
            }
        }
        text.push('\n');
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests that iris-ops/SCALING.md has the predicted tables. After a change of the model, run `iris
    /// plan --device h200 --write iris-ops/SCALING.md`.
    #[test]
    fn the_tables_are_those_of_the_model() {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../iris-ops/SCALING.md");
        let page = std::fs::read_to_string(page).unwrap();
        let tables = tables(Device::named("h200").unwrap()).unwrap();
        assert!(
            page.contains(&format!("<!-- scaling -->\n{tables}<!-- /scaling -->\n")),
            "{tables}"
        );
    }
}
