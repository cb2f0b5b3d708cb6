//! `iris record`: prints a record of benchmarks as a table, draws charts, and compares two records.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::Result;
use iris_heap::DType;
use iris_testkit::say;

use crate::errors::usage;
use crate::tune::regret;
use line::Line;

pub(crate) use compare::print as compare;

pub(crate) mod chart;
mod compare;
pub(crate) mod line;

/// Name of the record that docs/performance.md shows.
const SHOWN: &str = "h200.jsonl";

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Record, as `iris bench --record` writes it for GPUs [default: the one that
    /// docs/performance.md shows, bench/record/h200.jsonl of the workspace, and of it the last
    /// commit].
    file: Option<PathBuf>,
    /// Use only lines of commits that begin with this text.
    #[arg(long, value_name = "COMMIT")]
    commit: Option<String>,
    /// Print the differences from another record, instead of the table.
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
    /// Print, for each commit with variants by name, errors of predicted times and the cost of
    /// choosing by them.
    #[arg(long)]
    regret: bool,
    /// Fit the machine's parameters to these commits first, and print them; then as --regret.
    #[arg(long, value_name = "COMMITS")]
    fit: Option<String>,
    /// Draw a chart of each operator into this folder, as OP.svg.
    #[arg(long, value_name = "FOLDER")]
    charts: Option<PathBuf>,
    /// Replace the table between the lines <!-- record --> and <!-- /record --> of this file.
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
}

/// Path of this file in the folder bench/record of the workspace that contains the current folder,
/// or of the current folder if there is no workspace.
pub(crate) fn kept(name: &str) -> PathBuf {
    let folder = Path::new("bench/record");
    let here = std::env::current_dir().unwrap_or_default();
    let found = here.ancestors().map(|above| above.join(folder)).find(|it| it.is_dir());
    found.unwrap_or_else(|| folder.into()).join(name)
}

/// Subject of a measurement: operator, matrices, number of ranks and devices, but not the variant.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Subject {
    pub(crate) device: String,
    pub(crate) op: String,
    pub(crate) dtype: String,
    pub(crate) columns: bool,
    /// Fields in sorting order: rows of a table differ by N and K, their cells by M.
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) m: usize,
}

impl Subject {
    /// Element type after a comma if it is not bf16, the usual one; else empty.
    pub(crate) fn other_type(&self) -> String {
        if self.dtype == "bf16" { String::new() } else { format!(", {}", self.dtype) }
    }
}

impl Line {
    pub(crate) fn subject(&self) -> Subject {
        let Line { op, dtype, columns, m, n, k, ranks, .. } = self.clone();
        let device = match self.device.starts_with(&format!("{ranks} x ")) {
            true => self.device.clone(),
            false => format!("{ranks} ranks on {}", self.device),
        };
        Subject { device, op, dtype, columns, n, k, m }
    }

    /// Names of the baseline's libraries, by vendor.
    pub(crate) fn baseline(&self) -> &'static str {
        if self.rccl.is_some() { "RCCL with hipBLASLt" } else { "NCCL with cuBLASLt" }
    }

    /// Time divided by that of the vendor's libraries: the recorded ratio, if there is one, because
    /// it was taken sample by sample.
    pub(crate) fn ratio(&self) -> Option<f64> {
        self.ratio.or_else(|| self.baseline_us.map(|base| self.us / base))
    }

    /// Whether the number of workgroups was set on the command line or in the case file, so that
    /// the plan did not choose everything.
    fn is_tuned_by_hand(&self) -> bool {
        self.workgroups.is_some()
    }
}

/// Lines of the record file `path` that describe operators, in the order of the file.
pub(crate) fn read(path: &Path) -> Result<Vec<Line>> {
    let name = path.display().to_string();
    let text = iris_heap::read_file(path).map_err(|e| usage(&name, e, "a readable record"))?;
    parse(&text).map_err(|(line, error)| usage(format!("{name}, line {line}"), error, "JSON"))
}

/// Lines of a run that has just finished, from its JSON values.
pub(crate) fn of_values(values: Vec<serde_json::Value>) -> Vec<Line> {
    values.into_iter().filter_map(line_of).collect()
}

/// Line of an operator with a library baseline; `None` for other lines, and for lines with an
/// RMSNorm, a list of tensors or weighted parts.
fn line_of(value: serde_json::Value) -> Option<Line> {
    let line: Option<Line> = serde_json::from_value(value).ok();
    line.filter(|line| line.rms_norm.is_none() && !line.has_parts())
}

fn parse(text: &str) -> Result<Vec<Line>, (usize, serde_json::Error)> {
    let mut lines = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let value: serde_json::Value =
            serde_json::from_str(line).map_err(|error| (number + 1, error))?;
        lines.extend(line_of(value));
    }
    Ok(lines)
}

/// Latest line of each subject whose variant `auto` chose. Old records do not say whether `auto`
/// chose the variant; in an old record the fastest line of a run is taken.
pub(crate) fn automatic(lines: &[Line]) -> Vec<Line> {
    let mut found: BTreeMap<Subject, Line> = BTreeMap::new();
    for line in lines.iter().filter(|line| !line.is_tuned_by_hand()) {
        let subject = line.subject();
        let asked = line.asked.as_deref().is_none_or(|asked| asked == "auto");
        let before = found.get(&subject);
        let better = before.is_none_or(|known| {
            known.commit != line.commit || known.asked.is_none() && line.us < known.us
        });
        if asked && (better || line.asked.is_some()) {
            found.insert(subject, line.clone());
        }
    }
    found.into_values().collect()
}

pub(crate) fn main(options: &Options) -> Result<bool> {
    let only = |mut lines: Vec<Line>| {
        let commit = options.commit.as_deref().unwrap_or_default();
        lines.retain(|line| line.commit.starts_with(commit));
        lines
    };
    let file = options.file.clone().unwrap_or_else(|| kept(SHOWN));
    if options.regret || options.fit.is_some() {
        return regret::print(&file, options.fit.as_deref()).map(|()| true);
    }
    let mut lines = only(read(&file)?);
    if options.file.is_none() && options.commit.is_none() {
        newest(&mut lines);
    }
    if lines.is_empty() {
        let file = file.display();
        let commit = options.commit.as_deref().map(|it| format!(" of {it}")).unwrap_or_default();
        let expected = "a record of GPUs that has some";
        return Err(usage(file, format!("without an operator{commit}"), expected));
    }
    if let Some(old) = &options.compare {
        return compare(&read(old)?, &lines).map(|()| true);
    }
    let automatic = automatic(&lines);
    if let Some(folder) = &options.charts {
        for path in chart::draw_all(&automatic, folder)? {
            say!("{}", path.display())?;
        }
    }
    let table = table(&automatic);
    match &options.write {
        Some(path) => write_between("record", path, &table)?,
        None if options.charts.is_none() => say!("{table}")?,
        None => {}
    }
    Ok(true)
}

/// Marks of the table `name`: the lines of a Markdown file before and after it.
fn marks(name: &str) -> [String; 2] {
    [format!("<!-- {name} -->"), format!("<!-- /{name} -->")]
}

/// Returns `text` with the part between the marks replaced by `table`; `None` if a mark is missing.
fn replaced(text: &str, [begin, end]: &[String; 2], table: &str) -> Option<String> {
    let (before, rest) = text.split_once(begin)?;
    let (_, after) = rest.split_once(end)?;
    Some(format!("{before}{begin}\n{table}{end}{after}"))
}

/// Replaces the table `table_name` in the file `path`.
pub(crate) fn write_between(table_name: &str, path: &Path, table: &str) -> Result<()> {
    let (name, marks) = (path.display().to_string(), marks(table_name));
    let text = iris_heap::read_file(path).map_err(|e| usage(&name, e, "a readable file"))?;
    let text = replaced(&text, &marks, table)
        .ok_or_else(|| usage(&name, "no table", format!("the lines {}", marks.join(" and "))))?;
    std::fs::write(path, text).map_err(|e| usage(&name, e, "a file that can be written"))
}

/// Formats a number of bytes with a unit.
fn bytes(bytes: usize) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        _ if bytes < 1 << 20 => format!("{} KiB", bytes >> 10),
        _ => format!("{} MiB", bytes >> 20),
    }
}

/// Size in bytes of the message of `subject`, m x n elements.
pub(crate) fn message_bytes(subject: &Subject) -> usize {
    let size = subject.dtype.parse().map(DType::size).unwrap_or_default();
    subject.m * subject.n * size
}

/// Names of the libraries that served as baselines of these lines.
fn baselines(lines: &[Line]) -> String {
    let all: BTreeSet<&str> = lines.iter().map(Line::baseline).collect();
    all.into_iter().collect::<Vec<_>>().join(" or ")
}

/// Table as Markdown: a row for each operator, N and K, and devices, with ratios to the vendor's
/// libraries by M or by size.
pub(crate) fn table(automatic: &[Line]) -> String {
    // Each row is one device and operator; for an operator with a product, also one N and K.
    let mut rows: BTreeMap<(String, String, String), Vec<&Line>> = BTreeMap::new();
    for line in automatic.iter().filter(|line| line.ratio().is_some()) {
        let other = line.subject().other_type();
        let Subject { device, op, columns, n, k, .. } = line.subject();
        let factors = match k {
            0 => String::new(),
            _ => format!("{n} x {k}{}{other}", if columns { ", columns" } else { "" }),
        };
        rows.entry((op, device, factors)).or_default().push(line);
    }
    let beside = baselines(automatic);
    let mut text = format!(
        "| operator | on | N x K | by M, or size: ratio (1 is the time of {beside}; less is faster) |\n\
         | --- | --- | --- | --- |\n",
    );
    for ((op, device, factors), mut lines) in rows {
        lines.sort_by_key(|line| line.subject());
        lines.sort_by_key(|line| line.m * line.n);
        let cell = |line: &&Line| {
            let size = match line.k {
                0 if op == "barrier" => format!("{:.1} us", line.us),
                0 => bytes(message_bytes(&line.subject())),
                _ => line.m.to_string(),
            };
            format!("{size}: {:.2}", line.ratio().unwrap_or_default())
        };
        let cells: Vec<String> = lines.iter().map(cell).collect();
        let mut commits: Vec<_> =
            lines.iter().map(|line| line.commit.chars().take(7).collect::<String>()).collect();
        commits.dedup();
        let on = format!("{device} ({})", commits.join(", "));
        // Writing to a String cannot fail.
        let _ = writeln!(text, "| `{op}` | {on} | {factors} | {} |", cells.join(", "));
    }
    text
}

/// Leaves only the lines of the last line's commit.
fn newest(lines: &mut Vec<Line>) {
    let newest = lines.last().map(|line| line.commit.clone());
    lines.retain(|line| Some(&line.commit) == newest.as_ref());
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn line(op: &str, m: usize, us: f64, base: f64) -> Line {
        Line {
            op: op.into(),
            variant: "v".into(),
            dtype: "bf16".into(),
            m,
            n: 4096,
            k: if op.contains("matmul") { 512 } else { 0 },
            ranks: 2,
            device: "2 x X".into(),
            commit: "abcdef012".into(),
            us,
            baseline_us: Some(base),
            ..Line::default()
        }
    }

    #[test]
    fn what_is_beside_no_library_is_left_out() {
        let plain = r#"{"op": "all_reduce", "variant": "ll", "m": 1, "n": 8, "k": 0, "ranks": 2, "us": 5.0}"#;
        let normed = plain.replace("2,", "2, \"rms_norm\": 1e-5,");
        let list = plain.replace("2,", "2, \"list\": [[\"i32\", 8]],");
        let parts = plain.replace("2,", "2, \"combine\": 8,");
        let lines = parse(&[plain, &normed, &list, &parts].join("\n")).unwrap();
        assert_eq!(lines.len(), 1);
        assert!(lines[0].rms_norm.is_none());
    }

    #[test]
    fn the_automatic_line_is_the_one_that_says_so_or_the_fastest() {
        let first = line("all_reduce", 1, 10.0, 10.0);
        let named = Line { asked: Some("one_shot".into()), us: 8.0, ..first.clone() };
        let auto = Line { asked: Some("auto".into()), us: 9.0, ..first.clone() };
        let of = |lines: &[Line]| automatic(lines).iter().map(|line| line.us).collect::<Vec<_>>();
        assert_eq!(of(&[first.clone(), Line { us: 7.0, ..first.clone() }]), [7.0]);
        assert_eq!(of(&[first.clone(), named.clone(), auto.clone()]), [9.0]);
        let later = Line { commit: "12".into(), us: 5.0, ..first.clone() };
        assert_eq!(of(&[first.clone(), auto.clone(), later]), [5.0]);
        let by_hand = Line { workgroups: Some(8), commit: "13".into(), ..first.clone() };
        assert_eq!(of(&[first, by_hand]), [10.0]);
        assert!(of(&[named]).is_empty());
    }

    #[test]
    fn a_table_has_a_row_for_each_operator_and_its_factors() {
        let lines = [
            line("matmul_all_reduce", 64, 30.0, 20.0),
            line("matmul_all_reduce", 1, 10.0, 20.0),
            line("all_reduce", 32, 10.0, 10.0),
            line("all_reduce", 1, 12.0, 10.0),
        ];
        let text = table(&automatic(&lines));
        let rows: Vec<&str> = text.lines().skip(2).collect();
        assert_eq!(rows[0], "| `all_reduce` | 2 x X (abcdef0) |  | 8 KiB: 1.20, 256 KiB: 1.00 |");
        assert_eq!(
            rows[1],
            "| `matmul_all_reduce` | 2 x X (abcdef0) | 4096 x 512 | 1: 0.50, 64: 1.50 |"
        );
        assert_eq!(rows.len(), 2);
        // The recorded ratio, taken sample by sample, is preferred to the quotient of two medians.
        let paired = Line { ratio: Some(1.3), ..line("all_reduce", 1, 12.0, 10.0) };
        assert!(table(&[paired]).contains("8 KiB: 1.30"));
        // The table's heading names the vendor's libraries.
        let amd = Line { rccl: Some("2.27.7".into()), ..line("all_reduce", 1, 12.0, 10.0) };
        let beside = |lines: &[Line]| table(lines).lines().next().unwrap_or_default().to_owned();
        assert!(beside(std::slice::from_ref(&amd)).contains("time of RCCL with hipBLASLt;"));
        let both = "time of NCCL with cuBLASLt or RCCL with hipBLASLt;";
        assert!(beside(&[amd, lines[0].clone()]).contains(both));
        assert!(beside(&lines).contains("time of NCCL with cuBLASLt;"));
    }

    #[test]
    fn a_table_is_replaced_between_its_marks() {
        let marks = marks("record");
        let [begin, end] = &marks;
        let text = format!("a\n{begin}\nold\n{end}\nb\n");
        let new = format!("a\n{begin}\nnew\n{end}\nb\n");
        assert_eq!(replaced(&text, &marks, "new\n"), Some(new));
        assert_eq!(replaced("a\n", &marks, "new\n"), None);
    }

    /// Tests that docs/performance.md has the table of the record's last commit. After a change of the
    /// record, run `iris record --write docs/performance.md`.
    #[test]
    fn the_readmes_table_is_that_of_the_record() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut lines = read(&kept(SHOWN)).unwrap();
        newest(&mut lines);
        let page = std::fs::read_to_string(root.join("docs/performance.md")).unwrap();
        let table = table(&automatic(&lines));
        let [begin, end] = marks("record");
        assert!(
            page.contains(&format!("{begin}\n{table}{end}\n")),
            "not in docs/performance.md:\n{table}"
        );
    }
}
