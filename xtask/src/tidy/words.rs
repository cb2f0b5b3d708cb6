//! Rules: no words that are meaningless outside of one machine or conversation, and no Python.

use super::Finding;
use super::tree::Tree;

/// Words that mean something only on one machine or in one conversation, compared
/// case-insensitively. Each is written in two parts, so that this table does not match itself.
const WORDS: &[(&str, &str)] = &[
    ("/wor", "k/"),
    ("/ro", "ot/"),
    ("/tm", "p/bash"),
    ("shared/", "design"),
    ("shared/", "data"),
    ("me", "mo/"),
    ("this ses", "sion"),
    ("in a ses", "sion"),
    ("sub", "agent"),
    ("sub-", "agent"),
    ("issues ", "show"),
];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let words: Vec<_> = WORDS.iter().map(|(a, b)| format!("{a}{b}")).collect();
    let mut findings = Vec::new();
    for file in tree.files() {
        for (number, line) in file.text.lines().enumerate() {
            let line = line.to_lowercase();
            findings.extend(words.iter().filter(|word| line.contains(*word)).map(|word| {
                let message = format!("{word:?} is unknown outside the project");
                Finding::new(&file.path, number + 1, message)
            }));
        }
    }
    findings
}

/// Rule: no Python in the tree, neither source files nor files that Python tools leave.
pub(super) fn check_python(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.files() {
        let first = file.text.lines().next().unwrap_or_default();
        let by_name = matches!(file.extension(), "py" | "pyi" | "pyx" | "ipynb");
        if by_name || (first.starts_with("#!") && first.contains("python")) {
            findings.push(Finding::new(&file.path, 0, "the workspace has no Python"));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::found;

    #[test]
    fn each_word_is_found_in_any_file() {
        for (a, b) in WORDS {
            let text = format!("one\ntwo {}{b} three", a.to_uppercase());
            assert_eq!(found(check, &[("src/a.rs", &text)]), ["src/a.rs:2"], "{a}{b}");
            assert_eq!(found(check, &[("NOTES", &text)]), ["NOTES:2"], "{a}{b}");
        }
        assert!(found(check, &[("a.md", "the work of a session, shared data")]).is_empty());
    }

    #[test]
    fn python_is_found_by_name_and_by_first_line() {
        let files = [
            ("a.py", ""),
            ("b.ipynb", "{}"),
            ("tool", "#!/usr/bin/env python3\n"),
            ("c.rs", "// python\n"),
            ("d.sh", "#!/bin/sh\n"),
        ];
        assert_eq!(found(check_python, &files), ["a.py:0", "b.ipynb:0", "tool:0"]);
    }
}
