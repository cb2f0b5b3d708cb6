//! `cargo xtask tidy`: the project's rules as code.
//!
//! A rule is a function from the source tree to a list of violations. Each has a test that plants a
//! violation and checks that it is found.

mod circles;
mod comments;
mod kernels;
mod layers;
mod links;
mod locks;
mod names;
mod order;
mod sizes;
mod tree;
mod twins;
mod words;

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use tree::Tree;
pub(crate) use tree::without_comments;

/// Violation of a rule at a place in the tree.
#[derive(Debug, PartialEq, Eq)]
struct Finding {
    path: String,
    /// Line number from 1; 0 if the violation concerns the whole file.
    line: usize,
    message: String,
}

impl Finding {
    fn new(path: &str, line: usize, message: impl Into<String>) -> Finding {
        Finding { path: path.to_owned(), line, message: message.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(out, "{}: {}", self.path, self.message),
            line => write!(out, "{}:{line}: {}", self.path, self.message),
        }
    }
}

/// Options of `cargo xtask tidy`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Root of another tree, which is checked instead of this one.
    root: Option<PathBuf>,
}

impl Options {
    /// Checks the tree.
    pub(crate) fn main(&self, own: &Path) -> Result<()> {
        run(self.root.as_deref().unwrap_or(own))
    }
}

type Rule = fn(&Tree) -> Vec<Finding>;

/// All rules that tidy checks, by name.
const RULES: &[(&str, Rule)] = &[
    ("layers", layers::check),
    ("locks", locks::check),
    ("circles", circles::check),
    ("order", order::check),
    ("kernels", kernels::check),
    ("assembly", kernels::check_assembly),
    ("headers", kernels::check_layers),
    ("twins", twins::check),
    ("comments", comments::check),
    ("words", words::check),
    ("python", words::check_python),
    ("sizes", sizes::check),
    ("names", names::check),
    ("links", links::check),
];

/// Checks the tree at `root` against all rules; prints the long files and all violations.
pub(crate) fn run(root: &Path) -> Result<()> {
    let tree = Tree::read(root)?;
    for (lines, path) in sizes::long(&tree) {
        println!("{lines:>6} lines  {path}");
    }
    let mut broken = 0;
    for (name, rule) in RULES {
        for finding in rule(&tree) {
            eprintln!("{name}: {finding}");
            broken += 1;
        }
    }
    if broken > 0 {
        bail!("tidy found {broken} fault(s) in {} files", tree.files().len());
    }
    println!("tidy: {} files, {} rules, nothing found", tree.files().len(), RULES.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Violations that `rule` finds in a tree that consists of `files` (path and text), each as
    /// `path:line`.
    pub(super) fn found(rule: Rule, files: &[(&str, &str)]) -> Vec<String> {
        let folder = tempfile::tempdir().expect("no temporary folder");
        for (path, text) in files {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a file has a folder")).expect("mkdir");
            std::fs::write(path, text).expect("write");
        }
        let tree = Tree::read(folder.path()).expect("the planted tree is readable");
        rule(&tree).into_iter().map(|it| format!("{}:{}", it.path, it.line)).collect()
    }

    #[test]
    fn a_finding_fails_the_task() {
        let folder = tempfile::tempdir().expect("no temporary folder");
        run(folder.path()).expect("an empty tree breaks no rule");
        std::fs::write(folder.path().join("tool.py"), "").expect("write");
        run(folder.path()).expect_err("a planted Python file was not found");
    }
}
