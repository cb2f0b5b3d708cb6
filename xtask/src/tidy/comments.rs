//! Rule: comments of the source begin with a noun or a verb.

use super::Finding;
use super::tree::{File, Tree};

/// Opening words after which a reader cannot tell whether a comment names a thing or an action.
const OPENINGS: &[&str] = &[
    "What", "How", "Who", "Of", "Those", "As", "Such", "The same", "Likewise", "Which", "Nobody",
    "Whoever",
];

/// Lines of a file that begin a comment, from 1, each with its text. A comment is a block of adjacent
/// lines with the same marker; comments that follow code on a line do not count.
fn comments(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut last = None;
    text.lines().enumerate().filter_map(move |(number, line)| {
        let line = line.trim();
        let marker = ["///", "//!", "//"].into_iter().find(|marker| line.starts_with(marker));
        let before = std::mem::replace(&mut last, marker);
        (marker.is_some() && marker != before)
            .then(|| (number + 1, line.trim_start_matches(['/', '!']).trim()))
    })
}

fn opens_badly(text: &str) -> bool {
    let is_opening = |rest: &str| rest.starts_with([' ', ',', ':']);
    OPENINGS.iter().any(|opening| text.strip_prefix(opening).is_some_and(is_opening))
}

/// Reports the comments with one of [`OPENINGS`].
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let sources = tree.files().iter().filter(|file| file.extension() == "rs" || file.is_device());
    let of_file = |file: &'_ File| {
        let bad = comments(&file.text).filter(|(_, text)| opens_badly(text));
        let finding = |(line, text): (usize, &str)| {
            let message = format!("a comment opens with a noun or a verb, not with {text:?}");
            Finding::new(&file.path, line, message)
        };
        bad.map(finding).collect::<Vec<_>>()
    };
    sources.flat_map(of_file).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::found;

    #[test]
    fn an_opening_that_names_nothing_is_found() {
        let text = "//! Files.\n\n/// What it is.\nstruct A;\n// As above.\nlet a = 1; // What\n/// Asks.\nfn a();\n/// How so.\nfn b();\n";
        assert_eq!(found(check, &[("a.rs", text)]), ["a.rs:3", "a.rs:5", "a.rs:9"]);
        assert_eq!(found(check, &[("a.md", "// What it is.\n")]), [""; 0]);
    }
}
