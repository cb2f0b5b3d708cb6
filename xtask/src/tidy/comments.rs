//! Rule: comments of the source begin with a noun or a verb. Also draws random samples of comments,
//! for readers to rate.

use super::Finding;
use super::tree::{File, Tree};

/// Opening words after which a reader cannot tell whether a comment names a thing or an action.
const OPENINGS: &[&str] = &[
    "What", "How", "Who", "Of", "Those", "As", "Such", "The same", "Likewise", "Which", "Nobody",
    "Whoever",
];

/// Number of comments with one of [`OPENINGS`] that the tree may have without a violation.
const ALLOWED: usize = 0;

/// Prefixes of paths whose comments are not checked: GEMM code that is to be replaced.
const LEFT_OUT: &[&str] =
    &["iris-kernels/kernels/iris/gemm/", "iris-kernels/kernels/gemm_", "iris-kernels/src/gemm/"];

/// Number of lines of code that a sample shows below each comment.
const CODE_LINES: usize = 4;

/// Block of adjacent comment lines, with the code that it describes.
struct Comment<'a> {
    path: &'a str,
    /// Number of the first line in the file, from 1.
    line: usize,
    /// Text of the comment's lines, without slashes.
    text: Vec<&'a str>,
    /// First lines of the code below the comment; empty for a comment at the top of a file.
    code: Vec<&'a str>,
}

impl<'a> Comment<'a> {
    /// All comments of a file, except those that follow code on a line.
    fn all(file: &'a File) -> Vec<Comment<'a>> {
        let mut all: Vec<Comment<'_>> = Vec::new();
        // Comment marker of the previous line; `None` if that was no comment. A change of the
        // marker, such as from `//!` to `///`, begins another block.
        let mut last = None;
        for (number, line) in file.text.lines().enumerate() {
            let line = line.trim();
            let style = ["///", "//!", "//"].into_iter().find(|style| line.starts_with(style));
            match (style, all.last_mut()) {
                (Some(style), Some(comment)) if last == Some(style) => {
                    comment.text.push(line[style.len()..].trim());
                }
                (Some(style), _) => all.push(Comment {
                    path: &file.path,
                    line: number + 1,
                    text: vec![line[style.len()..].trim()],
                    code: Vec::new(),
                }),
                (None, Some(comment)) if !line.is_empty() && comment.is_short_of_code() => {
                    comment.code.push(line);
                }
                _ => {}
            }
            last = style;
        }
        all
    }

    fn is_short_of_code(&self) -> bool {
        self.code.len() < CODE_LINES
    }

    fn opens_badly(&self) -> bool {
        let text = self.text[0];
        OPENINGS.iter().any(|opening| {
            text.strip_prefix(opening).is_some_and(|rest| rest.starts_with([' ', ',', ':']))
        })
    }

    /// Number by which comments are ordered for a sample; it depends on the seed and on the
    /// comment's place.
    fn lot(&self, seed: &str) -> u64 {
        // FNV-1a hash, followed by the finalizer of SplitMix64, which spreads the last bytes to all
        // bits. Both stay the same from one release of Rust to the next.
        let name = format!("{seed} {} {}", self.path, self.line);
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        });
        let hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        hash ^ (hash >> 31)
    }
}

/// Source files whose comments are checked and can be drawn for samples.
fn files(tree: &Tree) -> impl Iterator<Item = &File> {
    let counts = |file: &&File| {
        (file.extension() == "rs" || file.is_device())
            && !LEFT_OUT.iter().any(|path| file.path.starts_with(path))
    };
    tree.files().iter().filter(counts)
}

/// Reports the comments with one of [`OPENINGS`] if there are more than [`ALLOWED`].
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    beyond(ALLOWED, tree)
}

/// Violations, if more than `allowed` comments have a bad opening; otherwise none.
fn beyond(allowed: usize, tree: &Tree) -> Vec<Finding> {
    let comments = files(tree).flat_map(Comment::all).filter(Comment::opens_badly);
    let finding = |it: Comment<'_>| {
        let message = format!("a comment opens with a noun or a verb, not with {:?}", it.text[0]);
        Finding::new(it.path, it.line, message)
    };
    let found: Vec<_> = comments.map(finding).collect();
    if found.len() > allowed { found } else { Vec::new() }
}

/// Draws `count` comments at random, and returns them with the code below each as numbered text. The
/// same seed draws the same comments from the same tree.
pub(super) fn sample(tree: &Tree, count: usize, seed: &str) -> String {
    let mut comments: Vec<_> = files(tree).flat_map(Comment::all).collect();
    comments.sort_by_key(|comment| (comment.lot(seed), comment.line));
    let mut text = String::new();
    for (number, comment) in comments.iter().take(count).enumerate() {
        text += &format!("{}. {}:{}\n", number + 1, comment.path, comment.line);
        text.extend(comment.text.iter().map(|line| format!("    // {line}\n")));
        text.extend(comment.code.iter().map(|line| format!("    {line}\n")));
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::found;

    fn beyond_none(tree: &Tree) -> Vec<Finding> {
        beyond(0, tree)
    }

    #[test]
    fn an_opening_that_names_nothing_is_found() {
        let text = "//! Files.\n\n/// What it is.\nstruct A;\n// As above.\nlet a = 1; // What\n/// Asks.\nfn a();\n";
        assert_eq!(found(beyond_none, &[("a.rs", text)]), ["a.rs:3", "a.rs:5"]);
        assert_eq!(found(beyond_none, &[("iris-kernels/src/gemm/a.rs", text)]), [""; 0]);
        assert_eq!(found(beyond_none, &[("a.md", "// What it is.\n")]), [""; 0]);
    }

    #[test]
    fn a_sample_has_the_code_below_and_depends_on_the_seed() {
        let text: String =
            (0..40).map(|at| format!("/// Number {at}.\nconst A{at}: u8 = {at};\n")).collect();
        let folder = tempfile::tempdir().expect("no temporary folder");
        std::fs::write(folder.path().join("a.rs"), text).expect("write");
        let tree = Tree::read(folder.path()).expect("a tree");
        let [one, again, other] = ["a", "a", "b"].map(|seed| sample(&tree, 3, seed));
        assert_eq!(one, again);
        assert_ne!(one, other);
        assert_eq!(one.matches("    const A").count(), 3);
        assert_eq!(one.lines().filter(|line| line.contains(". a.rs:")).count(), 3);
    }
}
