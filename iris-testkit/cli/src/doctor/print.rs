//! Formats the findings of `iris doctor`: as lines for people, as JSON for programs.

use serde_json::json;

use super::{Finding, Section, State, Verdict};

/// Maximum number of columns of a line, except for details.
const COLUMNS: usize = 100;

/// Number of columns at the start of a finding's first line that hold its state and name; further
/// lines are indented by as many.
const INDENT: usize = 20;

/// Lines of all sections and their findings, with the verdict as the last line.
pub(super) fn lines(sections: &[Section], verdicts: &[Verdict], verbose: bool) -> Vec<String> {
    let mut lines = Vec::new();
    for Section { title, findings } in sections {
        lines.push((*title).to_string());
        for finding in findings {
            lines.extend(finding_lines(finding));
            if verbose {
                let details = finding.details.iter().flat_map(|detail| detail.lines());
                lines.extend(details.map(|detail| format!("{:INDENT$}{detail}", "")));
            }
        }
    }
    lines.push(String::new());
    lines.extend(wrapped(&verdict(verdicts), 0));
    lines
}

/// Lines of one finding with its remedy, wrapped to [`COLUMNS`].
fn finding_lines(finding: &Finding) -> Vec<String> {
    let state = match finding.state {
        State::Ok => "ok",
        State::None => "-",
        State::Warning => "warn",
        State::Error => "ERROR",
    };
    let remedy = match finding.remedy.as_str() {
        "" => String::new(),
        remedy => format!(": {remedy}"),
    };
    let mut lines = wrapped(&format!("{}{remedy}", finding.found), INDENT);
    let head = format!("  {state:5} {:11} ", finding.what);
    lines[0].replace_range(..INDENT, &head[..INDENT]);
    lines
}

/// Wraps text to lines of at most [`COLUMNS`], each indented by `indent` spaces.
fn wrapped(text: &str, indent: usize) -> Vec<String> {
    let mut lines = vec![" ".repeat(indent)];
    for word in text.split_whitespace() {
        let at = lines.len() - 1;
        let (used, len) = (lines[at].chars().count(), word.chars().count());
        let is_first = lines[at].trim().is_empty();
        if !is_first && used + 1 + len > COLUMNS {
            lines.push(format!("{}{word}", " ".repeat(indent)));
        } else {
            if !is_first {
                lines[at].push(' ');
            }
            lines[at].push_str(word);
        }
    }
    lines
}

/// Verdict as text, such as `CPU works; CUDA does not: no driver`.
fn verdict(verdicts: &[Verdict]) -> String {
    let text = |verdict: &Verdict| {
        let name = verdict.backend.to_uppercase();
        match &verdict.obstacle {
            None => format!("{name} works"),
            Some(obstacle) => format!("no {name}: {obstacle}"),
        }
    };
    verdicts.iter().map(text).collect::<Vec<_>>().join("; ")
}

/// All sections, findings and verdicts as one JSON object.
pub(super) fn json(sections: &[Section], verdicts: &[Verdict]) -> anyhow::Result<String> {
    let verdicts: Vec<_> = verdicts
        .iter()
        .map(|it| json!({"backend": it.backend, "works": it.works(), "why": it.obstacle}))
        .collect();
    Ok(serde_json::to_string(&json!({"sections": sections, "verdicts": verdicts}))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_findings_are_wrapped_and_details_are_left_out() {
        let long = "word ".repeat(40);
        let found = Finding::new(State::Warning, "thing", long).remedy("mend it").details(["/a"]);
        let sections = [Section { title: "host", findings: vec![found] }];
        let verdicts = [
            Verdict { backend: "cpu", obstacle: None },
            Verdict { backend: "cuda", obstacle: Some("no driver".into()) },
        ];
        let text = lines(&sections, &verdicts, false);
        assert!(text.iter().all(|line| line.chars().count() <= COLUMNS), "{text:#?}");
        assert!(text[1].starts_with("  warn  thing       word") && text[3].ends_with(": mend it"));
        assert_eq!(text.last().map(String::as_str), Some("CPU works; no CUDA: no driver"));
        assert!(lines(&sections, &verdicts, true).iter().any(|line| line.trim() == "/a"));
        let object = json(&sections, &verdicts).unwrap();
        assert!(object.contains(r#""state":"warning""#), "{object}");
        let expected = json!([
            {"backend": "cpu", "works": true, "why": null},
            {"backend": "cuda", "works": false, "why": "no driver"},
        ]);
        let object: serde_json::Value = serde_json::from_str(&object).unwrap();
        assert_eq!(object["verdicts"], expected);
    }
}
