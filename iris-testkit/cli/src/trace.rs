//! Traces of all ranks on the host's clock: as JSON for Chrome's tracing page and Perfetto (a
//! process per rank, a thread per workgroup), or one call as a chart.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Result;
use iris_ops::TraceSpan;
use iris_sync::Span;
use iris_testkit::note;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::errors::usage;

pub(crate) use chart::chart;

mod chart;

/// Number of spans that each workgroup of an op has room for. Further spans are dropped with a
/// warning.
pub(crate) const SPANS: u32 = 2048;

/// Spans of one op on one rank, by workgroup.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub(crate) struct RankTrace {
    pub(crate) op: String,
    pub(crate) rank: usize,
    /// Spans of each workgroup: kind, number of the unit or tile, begin and end in nanoseconds of
    /// the host's clock.
    groups: Vec<Vec<(u32, u32, u64, u64)>>,
}

impl RankTrace {
    pub(crate) fn new(op: &str, rank: usize, groups: &[Vec<TraceSpan>]) -> RankTrace {
        let span = |span: &TraceSpan| (span.kind, span.what, span.begin, span.end);
        let groups = groups.iter().map(|spans| spans.iter().map(span).collect()).collect();
        RankTrace { op: op.into(), rank, groups }
    }

    /// Workgroups that have spans, each with its index.
    fn lanes(&self) -> impl Iterator<Item = (usize, &Vec<(u32, u32, u64, u64)>)> {
        self.groups.iter().enumerate().filter(|(_, spans)| !spans.is_empty())
    }
}

/// Whether a trace written to `path` is a chart of one call (.svg) instead of JSON.
pub(crate) fn is_chart(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("svg"))
}

/// Spans of `now` that were added after `before` was read, by workgroup.
pub(crate) fn since(
    before: &[Vec<TraceSpan>],
    mut now: Vec<Vec<TraceSpan>>,
) -> Vec<Vec<TraceSpan>> {
    for (now, before) in now.iter_mut().zip(before) {
        now.drain(..before.len());
    }
    now
}

/// Kind of a span: its name, the unit that its number counts, and its colour in charts.
struct Kind {
    span: Span,
    name: &'static str,
    counts: &'static str,
    colour: usize,
}

const KINDS: [Kind; 5] = [
    Kind { span: Span::Fetch, name: "fetch", counts: "unit", colour: 5 },
    Kind { span: Span::Gemm, name: "gemm", counts: "tile", colour: 0 },
    Kind { span: Span::Wait, name: "wait", counts: "for", colour: 4 },
    Kind { span: Span::Signal, name: "signal", counts: "tile", colour: 1 },
    Kind { span: Span::Reduce, name: "reduce", counts: "tile", colour: 2 },
];

/// Kind of the span with this number; a generic kind if the number is unknown.
fn kind(number: u32) -> Kind {
    let unknown = Kind { span: Span::Wait, name: "span", counts: "number", colour: 3 };
    KINDS.into_iter().find(|kind| kind.span as u32 == number).unwrap_or(unknown)
}

/// Begin of the earliest span, in nanoseconds of the host's clock.
fn origin(traces: &[RankTrace]) -> u64 {
    let spans = traces.iter().flat_map(|trace| trace.groups.iter().flatten());
    spans.map(|span| span.2).min().unwrap_or(0)
}

/// Trace as a JSON document; times count from the begin of the first span.
pub(crate) fn document(traces: &[RankTrace]) -> serde_json::Value {
    let origin = origin(traces);
    let micros = |nanos: u64| nanos as f64 / 1000.0;
    let mut events = Vec::new();
    for trace in traces {
        let RankTrace { op, rank, .. } = trace;
        let name = |what: &str, tid: usize, name: String| json!({"ph": "M", "name": what, "pid": rank, "tid": tid, "args": {"name": name}});
        events.push(name("process_name", 0, format!("rank {rank}")));
        for (group, spans) in trace.lanes() {
            events.push(name("thread_name", group, format!("workgroup {group}")));
            events.extend(spans.iter().map(|&(number, what, begin, end)| {
                let Kind { name, counts, .. } = kind(number);
                json!({
                    "ph": "X", "name": name, "cat": op, "pid": rank, "tid": group,
                    "ts": micros(begin - origin), "dur": micros(end.saturating_sub(begin)),
                    "args": {"op": op, counts: what},
                })
            }));
        }
    }
    json!({"traceEvents": events, "displayTimeUnit": "ns"})
}

/// File for a trace. It is opened before the run, so that an error of its path is reported before
/// any work is done.
pub(crate) struct TraceFile {
    path: PathBuf,
    file: File,
}

impl TraceFile {
    /// Creates the file at `path`, or empties it.
    pub(crate) fn open(path: &Path) -> Result<TraceFile> {
        let file = File::create(path).map_err(|error| unwritable(path, error))?;
        Ok(TraceFile { path: path.into(), file })
    }

    fn write(mut self, text: &str) -> Result<()> {
        self.file.write_all(text.as_bytes()).map_err(|error| unwritable(&self.path, error))
    }
}

fn unwritable(path: &Path, error: io::Error) -> anyhow::Error {
    usage(format!("trace {}", path.display()), error, "a file that can be written")
}

/// Ends a run after its result has been printed: writes the trace, if `file` is given. Returns
/// `ok`. If the check failed, an error of the trace is only printed.
pub(crate) fn finish(
    file: Option<TraceFile>,
    text: impl FnOnce() -> Result<String>,
    ok: bool,
) -> Result<bool> {
    match file.map_or(Ok(()), |file| file.write(&text()?)) {
        Err(error) if !ok => note!("iris: {error:#}"),
        written => written?,
    }
    Ok(ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ranks_are_on_one_clock() {
        let span = |kind, begin| TraceSpan { begin, end: begin + 500, kind, what: 3 };
        let traces = [
            RankTrace::new("all_reduce", 0, &[vec![span(Span::Wait as u32, 7000)], vec![]]),
            RankTrace::new("all_reduce", 1, &[vec![], vec![span(Span::Gemm as u32, 5000)]]),
        ];
        let document = document(&traces);
        let events = document["traceEvents"].as_array().unwrap();
        let spans: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
        let seen: Vec<_> = spans
            .iter()
            .map(|e| (e["pid"].as_u64(), e["tid"].as_u64(), e["ts"].as_f64(), &e["name"]))
            .collect();
        let (wait, gemm) = (json!("wait"), json!("gemm"));
        assert_eq!(seen[0], (Some(0), Some(0), Some(2.0), &wait));
        assert_eq!(seen[1], (Some(1), Some(1), Some(0.0), &gemm));
        assert_eq!(spans[1]["dur"].as_f64(), Some(0.5));
        assert_eq!(spans[1]["args"]["tile"], 3);
    }
}
