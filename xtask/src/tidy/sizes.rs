//! Rule: a long source file must give the reason for its length.

use super::Finding;
use super::tree::{File, Tree};

/// Number of lines above which a source file must give a reason for its length.
const LONG: usize = 500;

/// Beginning of the sentence with the reason, and the number of lines from the top of the file
/// within which the sentence must stand.
const WHY: (&str, usize) = ("is long because", 40);

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let silent = |file: &&File| !file.text.lines().take(WHY.1).any(|line| line.contains(WHY.0));
    let files = tree.files().iter().filter(|file| is_long(file)).filter(silent);
    let message = format!("over {LONG} lines, and no `{} ...` in the first {}", WHY.0, WHY.1);
    files.map(|file| Finding::new(&file.path, 0, message.clone())).collect()
}

/// Long files with their numbers of lines, longest first.
pub(super) fn long(tree: &Tree) -> Vec<(usize, &str)> {
    let files = tree.files().iter().filter(|file| is_long(file));
    let mut long: Vec<_> = files.map(|file| (lines(file), file.path.as_str())).collect();
    long.sort_by(|a, b| b.cmp(a));
    long
}

fn is_long(file: &File) -> bool {
    (file.extension() == "rs" || file.is_device()) && lines(file) > LONG
}

fn lines(file: &File) -> usize {
    file.text.lines().count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::found;

    #[test]
    fn a_long_file_says_why() {
        let long = "\n".repeat(LONG + 1);
        let said = format!("//! This file is long because it is a table.\n{long}");
        let late = format!("{long}// This file is long because nobody looked.\n");
        let files = [
            ("a.rs", long.as_str()),
            ("b.cu", &late),
            ("c.rs", &said),
            ("d.rs", &long[1..]),
            ("e.lock", &long),
        ];
        assert_eq!(found(check, &files), ["a.rs:0", "b.cu:0"]);
    }
}
