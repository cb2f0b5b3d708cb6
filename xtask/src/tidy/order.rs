//! Rule: files of iris-ops import files of their own layer and of layers below it. ARCHITECTURE.md
//! prints the layers.

use super::Finding;
use super::circles::{Module, files};
use super::tree::Tree;

/// Folder of the sources that are in layers.
const SOURCES: &str = "iris-ops/src/";

/// Page that prints the layers.
const PAGE: &str = "ARCHITECTURE.md";

/// Layers from the ground up, each with its modules. A module in no layer is in that of its parent.
const LAYERS: &[(&str, &[&str])] = &[
    ("facts", &["counters", "device", "error", "op_label", "op_names", "split"]),
    ("data of devices", &["cost::machine", "cost::network", "topology", "tune::data"]),
    ("matrices of a call", &["args", "matrix", "operand"]),
    ("rows of operators", &["memory_needs", "op_row", "programs"]),
    ("options", &["ll_items", "options"]),
    ("cost", &["cost"]),
    ("tune", &["tune"]),
    ("plan", &["nodes::exchange", "plan"]),
    ("checks and memory", &["check", "workspace"]),
    ("operator", &["operator"]),
    ("nodes", &["nodes"]),
    ("operators", &["operator_macros", "ops"]),
    ("communicator", &["any_op", "comm", "heap_reserve", "session"]),
];

/// Imports of a module of a higher layer, each with the reason.
const UPWARDS: &[(&str, &str, &str)] =
    &[("plan::composed", "ops", "an operator over several nodes is made of other operators' rows")];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let files = files(tree, SOURCES);
    let mut findings = unprinted(tree);
    let mut unused: Vec<_> = UPWARDS.iter().collect();
    for (module, (path, imports)) in &files {
        let Some(own) = layer(module) else {
            findings.push(Finding::new(path, 0, "is in no layer of the table LAYERS of xtask"));
            continue;
        };
        for import in imports.iter().filter(|it| layer(it) > Some(own)) {
            let row = (module.join("::"), import.join("::"));
            if UPWARDS.iter().any(|(from, to, _)| (*from, *to) == (&row.0, &row.1)) {
                unused.retain(|(from, to, _)| (*from, *to) != (&row.0, &row.1));
                continue;
            }
            let above = layer(import).map_or("", |at| LAYERS[at].0);
            let message = format!(
                "imports {}, of the layer `{above}` above its own, `{}`",
                files[import].0, LAYERS[own].0
            );
            findings.push(Finding::new(path, 0, message));
        }
    }
    if !files.is_empty() {
        findings.extend(unused.into_iter().map(|(from, to, _)| {
            let message = format!("{from} does not import {to}: remove the row of UPWARDS");
            Finding::new("xtask/src/tidy/order.rs", 0, message)
        }));
    }
    findings
}

/// Findings for the rows of [`LAYERS`] that ARCHITECTURE.md does not print.
fn unprinted(tree: &Tree) -> Vec<Finding> {
    let Some(page) = tree.file(PAGE) else { return Vec::new() };
    let lines = LAYERS.iter().enumerate().map(|(at, (name, modules))| {
        let modules: Vec<_> =
            modules.iter().map(|it| format!("`{}`", it.replace("::", "/"))).collect();
        format!("| {} | {name} | {} |", at + 1, modules.join(", "))
    });
    let missing = lines.filter(|line| !page.text.lines().any(|it| it == line));
    missing.map(|line| Finding::new(PAGE, 0, format!("lacks the row {line:?}"))).collect()
}

/// Index of the layer of a module; `None` if it is in no layer.
fn layer(module: &Module) -> Option<usize> {
    let known = (1..=module.len()).rev().map(|len| module[..len].join("::"));
    known.into_iter().find_map(|name| LAYERS.iter().position(|(_, all)| all.contains(&&*name)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::found;

    /// Findings for iris-ops with the import that must run upwards, and with another file.
    fn with(path: &str, text: &str) -> Vec<String> {
        let files = [
            ("iris-ops/src/lib.rs", "mod ops;"),
            ("iris-ops/src/ops/mod.rs", "use crate::op_names::Op;"),
            ("iris-ops/src/plan/composed.rs", "use crate::ops::row;"),
            ("iris-ops/src/op_names.rs", "use crate::error::Error;"),
            ("iris-ops/src/error.rs", "#[cfg(test)]\nmod texts;"),
            ("iris-ops/src/error/texts.rs", "use crate::ops::row;"),
            (path, text),
        ];
        found(check, &files)
    }

    #[test]
    fn an_import_of_a_higher_layer_is_found() {
        assert_eq!(with("iris-ops/src/options.rs", "use crate::op_names::Op;"), [""; 0]);
        assert_eq!(
            with("iris-ops/src/options.rs", "use crate::ops::row;"),
            ["iris-ops/src/options.rs:0"]
        );
        // A child may stand in a lower layer than its parent.
        let data = "iris-ops/src/tune/data.rs";
        assert_eq!(with(data, "use crate::topology::Topology;"), [""; 0]);
        let options = ("iris-ops/src/options.rs", "");
        let tune = (data, "use crate::options::Request;");
        let composed = ("iris-ops/src/plan/composed.rs", "use crate::ops::row;");
        let ops = ("iris-ops/src/ops/mod.rs", "");
        assert_eq!(found(check, &[options, tune, composed, ops]), [format!("{data}:0")]);
    }

    #[test]
    fn a_file_in_no_layer_is_found() {
        assert_eq!(with("iris-ops/src/more.rs", ""), ["iris-ops/src/more.rs:0"]);
    }

    #[test]
    fn a_row_without_its_import_is_found() {
        let files = [("iris-ops/src/op_names.rs", "")];
        assert_eq!(found(check, &files), ["xtask/src/tidy/order.rs:0"]);
    }

    #[test]
    fn a_layer_that_is_not_printed_is_found() {
        let found = found(check, &[("ARCHITECTURE.md", "| 1 | facts | `error` |")]);
        assert_eq!(found, vec![format!("{PAGE}:0"); LAYERS.len()]);
    }
}
