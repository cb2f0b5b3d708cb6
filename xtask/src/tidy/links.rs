//! Rule: local links in the documents must have existing targets.

use super::Finding;
use super::tree::{File, Tree};

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.files().iter().filter(|file| file.extension() == "md") {
        for (line, target) in links(&file.text) {
            if !resolves(tree, file, &target) {
                findings.push(Finding::new(&file.path, line, format!("{target} does not exist")));
            }
        }
    }
    findings
}

/// Targets of the links in a document (`[text](target)`, `[name]: target`) outside of code, each
/// with its line.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in prose(text) {
        let inline = line.split("](").skip(1).filter_map(|rest| rest.split([')', ' ']).next());
        let defined = line.strip_prefix('[').and_then(|rest| rest.split_once("]: "));
        let targets = inline.chain(defined.map(|(_, target)| target.trim()));
        found.extend(targets.map(|target| (number, target.to_owned())));
    }
    found
}

/// Lines of a document outside of fenced code blocks, numbered from 1, without inline code.
fn prose(text: &str) -> Vec<(usize, String)> {
    let mut fenced = false;
    let mut lines = Vec::new();
    for (number, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            lines.push((number + 1, line.split('`').step_by(2).collect()));
        }
    }
    lines
}

fn resolves(tree: &Tree, from: &File, target: &str) -> bool {
    if target.contains("://") || target.starts_with("mailto:") {
        return true;
    }
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    let path = match path {
        "" => Some(from.path.clone()),
        path => joined(&from.path, path),
    };
    let Some(path) = path else { return false };
    match tree.file(&path) {
        Some(file) if !anchor.is_empty() && file.extension() == "md" => {
            headings(&file.text).contains(&anchor.to_owned())
        }
        Some(_) => true,
        None => tree.has(&path),
    }
}

/// Path of the link target `target`, which is relative to the folder of `from`; `None` if it leaves
/// the tree.
fn joined(from: &str, target: &str) -> Option<String> {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// Anchors by which links can refer to the headings of a document.
fn headings(text: &str) -> Vec<String> {
    // Inline code in a heading belongs to its anchor, so only fenced blocks are left out.
    let outside: Vec<usize> = prose(text).into_iter().map(|(number, _)| number).collect();
    let lines = text.lines().enumerate().filter(|(i, _)| outside.contains(&(i + 1)));
    let titles = lines.filter_map(|(_, line)| line.strip_prefix('#'));
    titles.map(|title| anchor(title.trim_start_matches('#').trim())).collect()
}

fn anchor(title: &str) -> String {
    let kept = title.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::found;

    #[test]
    fn broken_links_are_found() {
        let text = "[a](b.md) [c](gone.md), ![d](../top.png)\n[e]: docs/none\n[f](#title-two)\n[g](../../out.md)\n[h](b.md#none)";
        let files = [("docs/a.md", text), ("docs/b.md", "# One"), ("top.md", "")];
        let expected = [
            "docs/a.md:1",
            "docs/a.md:1",
            "docs/a.md:2",
            "docs/a.md:3",
            "docs/a.md:4",
            "docs/a.md:5",
        ];
        assert_eq!(found(check, &files), expected);
    }

    #[test]
    fn good_links_pass() {
        let text = "# Title `two`: more\n[a](docs/) [b](docs/b.md \"title\") [c](docs/b.md#one-thing)\n[d](#title-two-more) [e](https://x.y/z) `[f](gone)`\n```\n[g](gone)\n```\n";
        let files = [("README.md", text), ("docs/b.md", "## One thing\n[up](../README.md)")];
        assert_eq!(found(check, &files), [""; 0]);
    }
}
