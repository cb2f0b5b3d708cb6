//! `cargo xtask lines`: counts the lines of code of each folder, without comments and blank lines.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::tidy::without_comments;

/// Patterns of the files that are counted.
const SOURCES: [&str; 4] = ["*.rs", "*.h", "*.cu", "*.cpp"];

/// Options of `cargo xtask lines`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Root of another checkout, which is counted instead of this one.
    root: Option<PathBuf>,
}

/// Prints the number of lines of code in each folder, with the folders below it, and in total.
pub(crate) fn run(own: &Path, options: &Options) -> Result<()> {
    let root = options.root.as_deref().unwrap_or(own);
    let mut folders = BTreeMap::new();
    for path in tracked(root)? {
        let text = match std::fs::read_to_string(root.join(&path)) {
            // git tracks a removed file until the removal is staged.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            text => text.with_context(|| format!("reading {path}"))?,
        };
        let lines = code_lines(&text, path.ends_with(".rs"));
        for (at, _) in path.match_indices('/') {
            *folders.entry(path[..at].to_owned()).or_default() += lines;
        }
        // An upper-case name stands before the folders.
        *folders.entry("TOTAL".to_owned()).or_insert(0_usize) += lines;
    }
    for (folder, lines) in folders {
        println!("{lines:>7}  {folder}");
    }
    Ok(())
}

/// Paths of the source files that git tracks below `root`.
fn tracked(root: &Path) -> Result<Vec<String>> {
    let listed = git(root).args(["ls-files", "-z", "--"]).args(SOURCES).output();
    let listed = listed.context("git did not start")?;
    let why = String::from_utf8_lossy(&listed.stderr);
    ensure!(listed.status.success(), "git ls-files in {}: {}", root.display(), why.trim());
    let paths = String::from_utf8(listed.stdout).context("paths of git ls-files")?;
    Ok(paths.split_terminator('\0').map(str::to_owned).collect())
}

/// Command of git on the repository in `root`, even if a hook of another repository started it.
fn git(root: &Path) -> Command {
    let mut git = Command::new("git");
    git.current_dir(root);
    for variable in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"] {
        git.env_remove(variable);
    }
    git
}

/// Number of lines with code. Lines of a string count, so that source inside a string does.
fn code_lines(text: &str, rust: bool) -> usize {
    without_comments(text, rust, true).lines().filter(|line| !line.trim().is_empty()).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_blank_lines_do_not_count() {
        let rust = "//! Doc.\n\n/// Doc.\nfn f() { // why\n    /* a /* nested\n */ still\n */ g()\n  \t\n}\n";
        assert_eq!(code_lines(rust, true), 3);
        assert_eq!(code_lines("/* a /* b\n*/ int c;\n// d\n#define E(f) \\\n    f\n", false), 3);
        assert_eq!(code_lines("", true), 0);
    }

    #[test]
    fn markers_inside_strings_open_no_comment() {
        let strings = [
            r#"let a = "/*"; // "*/
            let b = '"'; /* ' */ let c = "\"//";"#,
            "let a = r#\"\"/*\n\"#;",
            "let a = b\"//\n\";",
            "fn f<'a>(_: &'a u8) { '\\'' } // '\n/* */ x",
        ];
        assert_eq!(strings.map(|text| code_lines(text, true)), [2; 4]);
        assert_eq!(code_lines("auto a = \"/*\";\nauto b = 1'000; // '\n", false), 2);
    }

    #[test]
    fn source_inside_strings_and_macros_counts() {
        let kernel = "const K: &str = r\"\n// a comment\n\n__global__ void k();\n\";\n";
        assert_eq!(code_lines(kernel, true), 4);
        assert_eq!(code_lines("macro_rules! m {\n    () => {\n        f()\n    };\n}\n", true), 5);
    }

    #[test]
    fn files_that_git_does_not_track_are_left_out() {
        let folder = tempfile::tempdir().expect("no temporary folder");
        let git = |arguments: &[&str]| {
            assert!(git(folder.path()).args(arguments).status().expect("git").success());
        };
        tracked(folder.path()).expect_err("a folder without a repository");
        git(&["init", "--quiet"]);
        std::fs::create_dir(folder.path().join("a")).expect("mkdir");
        for path in ["a/b.rs", "a/c.cu", "d.h", "e.cpp", "f.md", "not.rs"] {
            std::fs::write(folder.path().join(path), "x").expect("write");
        }
        git(&["add", "a", "d.h", "e.cpp", "f.md"]);
        assert_eq!(tracked(folder.path()).expect("listed"), ["a/b.rs", "a/c.cu", "d.h", "e.cpp"]);
    }
}
