//! Rule: each protocol file exists in Rust and as device header, under the same name and with the
//! same public names.
//!
//! Long because every name that exists in only one of the two files is listed here.

use std::collections::BTreeSet;

use super::Finding;
use super::tree::{File, Tree, code_of};

/// Rust file and its device header, with the names that only one of them has.
struct Twins {
    rust: &'static str,
    header: &'static str,
    /// Public names that only the Rust file has.
    only_rust: &'static [&'static str],
    /// Public names that only the header has.
    only_header: &'static [&'static str],
    /// Whether public names are compared at all.
    names: bool,
}

const SYNC: &str = "iris-sync/src/";
const CRATE: &str = "iris-sync/src/lib.rs";
const KERNELS: &str = "iris-kernels/src/";
const BODIES: &str = "iris-kernels/src/cpu/body/";
const HEADERS: &str = "iris-kernels/kernels/iris/";

/// Headers without a Rust counterpart: device-only helpers, host-interface types, and headers that
/// only include others.
const ALONE: &[&str] = &["copy.h", "flow.h", "flow/launch.h", "sym.h", "sync.h", "tiles.h"];

/// Rust files without a header: the crate's root, the common part of all skeletons, and the list of
/// bodies.
const ALONE_IN_RUST: &[&str] = &["lib.rs", "flow/mod.rs", "mod.rs"];

/// Entry for a protocol: two files of one name with equal public names, except the listed ones.
const fn sync(
    rust: &'static str,
    header: &'static str,
    only_rust: &'static [&'static str],
    only_header: &'static [&'static str],
) -> Twins {
    Twins { rust, header, only_rust, only_header, names: true }
}

/// Entry for two files with the same contents whose names are not compared.
const fn stem(rust: &'static str, header: &'static str) -> Twins {
    Twins { rust, header, only_rust: &[], only_header: &[], names: false }
}

/// All pairs of files. Header functions take addresses instead of rank and index; functions that a
/// Rust trait requires of a body are listed in a comment of the header.
const TWINS: &[Twins] = &[
    sync("barrier.rs", "barrier.h", &["bits", "from_bits"], &[]),
    sync("call.rs", "call.h", &["new"], &[]),
    sync(
        "channel.rs",
        "channel.h",
        &["PRIVATE_SEQUENCE", "Shape", "lay_out", "peers", "peers_in_turn"],
        &["abort", "call_word", "finished_word", "peer", "peer_in_turn", "sequence_word"],
    ),
    sync("entry.rs", "entry.h", &[], &["mismatch", "number", "own_field"]),
    sync("epoch.rs", "epoch.h", &[], &[]),
    sync(
        "fault.rs",
        "fault.h",
        &["ALL", "Stop", "differing", "from_number", "from_words"],
        &["FIELDS", "PEER_LOST"],
    ),
    sync(
        "ll.rs",
        "ll.h",
        &["Data", "items"],
        // A thread's share of the work, which Rust's Workgroup computes itself, and positions
        // relative to others.
        &[
            "ITEMS",
            "RowShare",
            "Share",
            "behind",
            "bytes_behind",
            "has",
            "in_groups",
            "item",
            "next",
            "push_item",
            "stamp",
        ],
    ),
    sync("lock.rs", "lock.h", &[], &[]),
    sync(
        "memory.rs",
        "memory.h",
        // Names that are in port.h, sym.h or trace.h instead, and functions of the table for
        // models.
        &[
            "ALL",
            "DevWord",
            "Limit",
            "LlWord",
            "Order",
            "Scope",
            "Span",
            "SymPair",
            "SymWord",
            "begin",
            "diverge",
            "divergent",
            "end",
            "expired",
            "from_bits",
            "get",
            "thread",
            "threads",
            "name",
            "order",
            "pause",
            "put",
            "reconverge",
            "scope",
            "to_bits",
            "vote",
        ],
        &["AccessRow", "Hold", "deadline", "hold"],
    ),
    sync("tile_flags.rs", "tile_flags.h", &[], &["stamp"]),
    sync(
        "wait.rs",
        "wait.h",
        &[],
        // Items that are crate-private in Rust, and the waits for users' kernels.
        &[
            "Absent",
            "Equal",
            "Missing",
            "ReachedBy",
            "fault",
            "find_absent",
            "give_up",
            "has_given_up",
            "poll",
            "wait_until",
            "wait_signal",
            "raise_signal",
        ],
    ),
    sync(
        "workgroup.rs",
        "workgroup.h",
        &["batch_of_all", "batch_of_row", "begin", "share"],
        &["Launch", "peer", "peer_in_turn", "rank", "size"],
    ),
    sync("flow/accumulate.rs", "flow/accumulate.h", &["AccumulateTiles", "produce"], &[]),
    sync("flow/copied.rs", "flow/copied.h", &["CopiedTiles", "copy", "begin"], &[]),
    sync(
        "flow/deliver.rs",
        "flow/deliver.h",
        &["DeliverTiles", "Delivery", "produced", "push", "sent", "take"],
        &["peers_that", "receive", "send"],
    ),
    sync(
        "flow/gather.rs",
        "flow/gather.h",
        &[
            "GatherTiles",
            "StagedTiles",
            "Staging",
            "fetch",
            "fetched",
            "multiply",
            "multiply_unit",
            "needs",
            "push_part",
            "source",
            "store",
            "tiles",
            "units",
        ],
        &[],
    ),
    sync(
        "flow/ll.rs",
        "flow/ll.h",
        &[
            "Exchange", "LlRows", "LlTile", "LlTiles", "begin", "end", "give", "multiply", "row",
            "sent", "take",
        ],
        &["ITEMS", "exchange_steps", "push_batch", "row_steps", "tile_steps"],
    ),
    sync(
        "flow/reduce.rs",
        "flow/reduce.h",
        &[
            "Owners",
            "ReduceTiles",
            "at_once",
            "keep",
            "produce",
            "push",
            "push_result",
            "reduce",
            "take_result",
        ],
        &["reduce_at_owners"],
    ),
];

/// Pairs of files of the kernels besides the protocols.
const IN_KERNELS: &[Twins] = &[
    stem("args.rs", "args.h"),
    stem("gemm_config.rs", "gemm_config.h"),
    // Schedules: assignment of tiles and units.
    sync(
        "schedule.rs",
        "schedule.h",
        &["blocks", "most", "own_first", "shard_of"],
        &[
            "Block",
            "Range",
            "Turn",
            "div_up",
            "groups_of",
            "in_turns",
            "len",
            "min_of",
            "need",
            "owner_of",
            "row_blocks_of",
            "shard_cols",
            "shard_rows",
        ],
    ),
    stem("trace.rs", "trace.h"),
    stem("cpu/view.rs", "view.h"),
    sync(
        "cpu/body/accumulate.rs",
        "body/accumulate.h",
        &["Accumulate"],
        &["AccumulateBody", "run_add", "run_convert", "run_zero", "tiles"],
    ),
    sync(
        "cpu/body/deliver.rs",
        "body/deliver.h",
        &["Deliver", "Plan", "Sent", "copies"],
        &[
            "AllGatherPlan",
            "AllToAllPlan",
            "BroadcastPlan",
            "DeliverBody",
            "area",
            "own",
            "place",
            "relays",
            "run_copies",
            "run_deliver",
            "run_relay",
            "signals_of_blocks",
            "source_row",
            "target_row",
        ],
    ),
    sync("cpu/body/epilogue.rs", "body/epilogue.h", &[], &["erf", "gelu"]),
    sync(
        "cpu/body/norm.rs",
        "body/norm.h",
        &["run"],
        &[
            "COUNT",
            "sum_in_turns",
            "HELD",
            "Norm",
            "PARTIALS",
            "Squares",
            "squares_of",
            "norm_elements",
            "norm_singles",
            "norm_vectors",
            "of",
            "run_norm",
            "scale_of",
            "scaled",
            "sum_of_threads",
        ],
    ),
    sync(
        "cpu/body/sums.rs",
        "body/sums.h",
        &["run"],
        &[
            "BYTES",
            "DEEP",
            "Sources",
            "add_deep",
            "add_to",
            "add_vectors",
            "add_whole",
            "run_sums",
            "source_in_turn",
        ],
    ),
    sync(
        "cpu/body/gather.rs",
        "body/gather.h",
        &["Gather", "Staged"],
        &[
            "GatherBody",
            "GatheredBody",
            "Shards",
            "StagingPlan",
            "block_of",
            "inbox",
            "need",
            "own",
            "parts",
            "staging",
            "units_of",
        ],
    ),
    sync(
        "cpu/body/ll.rs",
        "body/ll.h",
        &["run", "sent"],
        &[
            "Elements",
            "ExchangeBody",
            "ItemValues",
            "ItemsOf",
            "PairBody",
            "ResidualBody",
            "VectorBody",
            "VectorSquares",
            "add_residual_pieces",
            "add",
            "at",
            "finish",
            "finish_item",
            "finish_item_sum",
            "finish_sum",
            "load",
            "load_items_pieces",
            "me",
            "of_mine",
            "of_result",
            "pack",
            "run_exchange",
            "rows_of",
            "run_exchange_norm",
            "run_exchange_norm_items",
            "run_exchange_norm_vectors",
            "run_exchange_of",
            "run_exchange_of_pair",
            "store",
            "store_items_pieces",
            "store_sum",
            "store_value_pieces",
            "takes",
            "unpack",
        ],
    ),
    sync(
        "cpu/body/partial.rs",
        "body/partial.h",
        &["Partial", "bytes", "epilogue", "finish", "in_slot", "ld", "new", "tile_at"],
        &[
            "LoadProducer",
            "Places",
            "Shared",
            "apart",
            "count_bytes",
            "emit",
            "grid_of",
            "run_local",
            "split_of",
            "workspace",
            "write_to",
        ],
    ),
    sync(
        "cpu/body/reduce.rs",
        "body/reduce.h",
        &["Plan", "Reduce", "at_once"],
        &[
            "OneShotPlan",
            "ReduceBody",
            "ScatterPlan",
            "TwoShotPlan",
            "place",
            "result",
            "run_one_shot",
            "run_reduce_scatter",
            "run_two_shot",
            "tile",
            "tiles",
        ],
    ),
];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    // A tree that contains only device source, as in tests, has nothing to compare.
    if tree.file(CRATE).is_none() {
        return findings;
    }
    let of = |root: &'static str, all: &'static [Twins]| {
        all.iter().map(move |twins| (format!("{root}{}", twins.rust), twins))
    };
    let pairs: Vec<(String, &Twins)> = of(SYNC, TWINS).chain(of(KERNELS, IN_KERNELS)).collect();
    for (rust, twins) in &pairs {
        let header = format!("{HEADERS}{}", twins.header);
        match (tree.file(rust), tree.file(&header)) {
            (Some(_), Some(_)) if !twins.names => {}
            (Some(rust), Some(header)) => findings.extend(compare(twins, rust, header)),
            (None, None) => {}
            (Some(_), None) => findings.push(alone(rust, &header)),
            (None, Some(_)) => findings.push(alone(&header, rust)),
        }
    }
    for file in tree.files() {
        let path = file.path.as_str();
        let listed = if let Some(name) = path.strip_prefix(HEADERS) {
            // Vendor-specific headers are not protocols.
            ["port", "gemm/"].iter().any(|it| name.starts_with(it))
                || ALONE.contains(&name)
                || pairs.iter().any(|(_, twins)| twins.header == name)
        } else if let Some(name) = path.strip_prefix(SYNC).or_else(|| path.strip_prefix(BODIES)) {
            !name.ends_with(".rs")
                || ALONE_IN_RUST.contains(&name)
                || pairs.iter().any(|(rust, _)| rust == path)
        } else {
            true
        };
        if !listed {
            findings.push(alone(path, "xtask's table of twins"));
        }
    }
    findings
}

fn alone(path: &str, other: &str) -> Finding {
    Finding::new(path, 0, format!("has no twin: {other} does not exist, or does not define it"))
}

fn compare(twins: &Twins, rust: &File, header: &File) -> Vec<Finding> {
    let (ours, theirs) = (rust_names(rust), header_names(header));
    let sides = [
        (&rust.path, &ours, &header.path, &theirs, twins.only_rust),
        (&header.path, &theirs, &rust.path, &ours, twins.only_header),
    ];
    let mut findings = Vec::new();
    for (path, own, other, others, only) in sides {
        for name in own.difference(others).filter(|name| !only.contains(&name.as_str())) {
            findings.push(Finding::new(path, 0, format!("{name} is not in its twin {other}")));
        }
        for name in only.iter().filter(|&&name| !own.contains(name) || others.contains(name)) {
            let message = format!("{name} is listed as missing in its twin {other}, but is there");
            findings.push(Finding::new(path, 0, message));
        }
    }
    findings
}

/// Identifier at the beginning of a text.
fn identifier(text: &str) -> Option<String> {
    let end = text.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(text.len());
    (end > 0).then(|| text[..end].to_owned())
}

/// Public names of a Rust file: items, methods, and functions of public traits. In iris-kernels
/// also crate-public names, and the functions that bodies implement for their skeletons.
fn rust_names(file: &File) -> BTreeSet<String> {
    const ITEMS: [&str; 8] =
        ["const fn ", "fn ", "struct ", "enum ", "const ", "trait ", "type ", "static "];
    let inside = file.path.starts_with(KERNELS);
    let mut names = BTreeSet::new();
    let mut in_trait = false;
    for line in code_of(&file.text, true).lines() {
        let begins = line.starts_with("pub trait ")
            || inside && line.starts_with("impl") && line.contains(" for ");
        in_trait = begins || in_trait && line != "}";
        let text = line.trim();
        let shown = text
            .strip_prefix("pub ")
            .or_else(|| text.strip_prefix("pub(crate) ").filter(|_| inside));
        let text = match shown {
            Some(item) => item,
            None if in_trait && text.starts_with("fn ") => text,
            None => continue,
        };
        names.extend(ITEMS.iter().find_map(|item| identifier(text.strip_prefix(item)?)));
    }
    names
}

/// Public names of a header: types, constants and device functions.
fn header_names(file: &File) -> BTreeSet<String> {
    let code = code_of(&file.text, false);
    let lines: Vec<&str> = code.lines().collect();
    let mut names = BTreeSet::new();
    let mut private = false;
    for (at, line) in lines.iter().enumerate() {
        match line.trim() {
            "private:" => private = true,
            "public:" => private = false,
            _ if *line == "};" => private = false,
            _ => {}
        }
        if private || line.starts_with('#') {
            continue;
        }
        let text = line.trim();
        // Template parameters precede the declaration on the same line.
        let text = match text.strip_prefix("template <") {
            Some(_) => text.split_once("> ").map_or("", |(_, rest)| rest),
            None => text,
        };
        for kind in ["struct ", "class ", "enum class "] {
            names.extend(text.strip_prefix(kind).and_then(identifier));
        }
        if let Some((before, _)) = text.strip_prefix("constexpr ").and_then(|it| it.split_once('='))
        {
            names.extend(before.split_whitespace().next_back().and_then(identifier));
        }
        for mark in ["IRIS_DEVICE ", "IRIS_COLD "] {
            let Some((_, declared)) = text.split_once(mark) else { continue };
            let more = lines.get(at + 1).map_or("", |next| next.trim());
            let whole =
                if declared.contains('(') { declared.into() } else { format!("{declared} {more}") };
            let before = whole.split('(').next().unwrap_or_default();
            let name = before.rsplit(|c: char| !(c.is_alphanumeric() || c == '_')).next();
            // Constructors have the name of their type, which is listed already; operators have no
            // name.
            let is_name = |name: &&str| name.starts_with(|c: char| c.is_ascii_lowercase());
            names.extend(name.filter(is_name).filter(|&it| it != "operator").map(str::to_owned));
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests;

    /// Violations in these files together with the root of iris-sync.
    fn found(files: &[(&str, &str)]) -> Vec<String> {
        tests::found(check, &[&[(CRATE, "")], files].concat())
    }

    const RUST: (&str, &str) = (
        "iris-sync/src/lock.rs",
        "pub const FREE: i32 = 0;\n\
        pub fn take<M>(m: &M) {}\n/// pub fn no() {}\nfn own() {}\npub(crate) fn crates() {}\n\
        pub fn give() {}\n",
    );
    const HEADER: (&str, &str) = (
        "iris-kernels/kernels/iris/lock.h",
        "namespace iris::lock {\nconstexpr i32 FREE = 0;\n\
         template <class M>\nIRIS_DEVICE bool\n    take(M m) {}\nIRIS_DEVICE void give() {}\n\
         class Held {\n  private:\n    IRIS_DEVICE void secret() {}\n};\n}",
    );

    /// Violations if `old` is replaced by `new` in one of the two files.
    fn with(file: (&'static str, &str), old: &str, new: &str) -> Vec<String> {
        assert!(file.1.contains(old));
        let text = file.1.replace(old, new);
        let other = if file.0 == RUST.0 { HEADER } else { RUST };
        found(&[(file.0, &text), other])
    }

    #[test]
    fn names_that_differ_are_found() {
        // A class is a public name, too.
        assert_eq!(found(&[RUST, HEADER]), [format!("{}:0", HEADER.0)]);
        assert!(with(HEADER, "class Held", "// class Held").is_empty());
        assert_eq!(
            with(HEADER, "class Held", "// class Held\nIRIS_DEVICE void more() {}").len(),
            1
        );
        assert_eq!(with(RUST, "pub fn give", "pub fn release").len(), 3);
        assert_eq!(with(RUST, "fn own", "pub fn own").len(), 2);
    }

    #[test]
    fn a_file_without_its_twin_is_found() {
        for (path, text) in [
            RUST,
            HEADER,
            ("iris-sync/src/team.rs", ""),
            ("iris-kernels/kernels/iris/team.h", ""),
            ("iris-kernels/kernels/iris/flow/team.h", ""),
            ("iris-kernels/kernels/iris/body/team.h", ""),
            ("iris-kernels/src/cpu/body/team.rs", ""),
            ("iris-kernels/src/trace.rs", ""),
        ] {
            assert_eq!(found(&[(path, text)]).len(), 1, "{path}");
        }
        assert!(found(&[("iris-kernels/kernels/iris/gemm/team.h", "")]).is_empty());
    }

    #[test]
    fn a_list_says_only_what_is_so() {
        // `bits` is in both files, and `from_bits` in neither.
        let rust = ("iris-sync/src/barrier.rs", "pub fn bits() {}\n");
        let header = ("iris-kernels/kernels/iris/barrier.h", "IRIS_DEVICE u64 bits() {}\n");
        assert_eq!(found(&[rust, header]).len(), 2);
    }
}
