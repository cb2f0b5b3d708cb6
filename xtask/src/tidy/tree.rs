//! Source tree: every file of the workspace, read once, and its text without comments.

use std::path::Path;

use anyhow::{Context, Result};

/// Folders that are skipped, because they hold no source files of the project.
const SKIPPED: &[&str] = &[".git", "target", "dist"];

/// File of the source tree, with its text.
pub(super) struct File {
    /// Path relative to the root, with `/` between folders.
    pub(super) path: String,
    /// Text of the file; empty if it is not UTF-8.
    pub(super) text: String,
}

impl File {
    pub(super) fn extension(&self) -> &str {
        let name = self.path.rsplit('/').next().unwrap_or_default();
        name.rsplit_once('.').map_or("", |(_, extension)| extension)
    }

    /// Whether the rules of device source apply to this file.
    pub(super) fn is_device(&self) -> bool {
        matches!(self.extension(), "h" | "cu" | "cpp" | "cc" | "hpp" | "cuh")
    }

    /// Identifiers in the code, without comments and strings, each with its line from 1.
    pub(super) fn identifiers(&self) -> Vec<(usize, String)> {
        let code = code_of(&self.text, self.extension() == "rs");
        let mut found = Vec::new();
        for (number, line) in code.lines().enumerate() {
            let words = line.split(|c: char| !(c.is_alphanumeric() || c == '_'));
            let words = words.filter(|word| word.starts_with(|c: char| !c.is_ascii_digit()));
            found.extend(words.map(|word| (number + 1, word.to_owned())));
        }
        found
    }
}

/// All files of a source tree, in memory.
pub(super) struct Tree {
    files: Vec<File>,
}

impl Tree {
    /// Reads all files below `root`, ordered by path.
    pub(super) fn read(root: &Path) -> Result<Tree> {
        let mut files = Vec::new();
        read_folder(root, "", &mut files)?;
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(Tree { files })
    }

    pub(super) fn files(&self) -> &[File] {
        &self.files
    }

    pub(super) fn file(&self, path: &str) -> Option<&File> {
        self.files.iter().find(|file| file.path == path)
    }

    /// Whether the tree has a file or folder with this path.
    pub(super) fn has(&self, path: &str) -> bool {
        let inside = |file: &File| {
            file.path
                .strip_prefix(path)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        path.is_empty() || self.files.iter().any(inside)
    }
}

fn read_folder(folder: &Path, prefix: &str, files: &mut Vec<File>) -> Result<()> {
    let unread = || format!("{} can not be read", folder.display());
    for entry in std::fs::read_dir(folder).with_context(unread)? {
        let entry = entry.with_context(unread)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = format!("{prefix}{name}");
        let kind = entry.file_type().with_context(unread)?;
        if kind.is_dir() {
            if !SKIPPED.contains(&name.as_str()) {
                read_folder(&entry.path(), &format!("{path}/"), files)?;
            }
        } else if kind.is_file() && name != ".git" {
            let bytes =
                std::fs::read(entry.path()).with_context(|| format!("{path}: not readable"))?;
            files.push(File { path, text: String::from_utf8(bytes).unwrap_or_default() });
        }
    }
    Ok(())
}

/// Code of a Rust or C++ source: comments, strings and character literals become spaces; line
/// breaks stay.
pub(super) fn code_of(text: &str, rust: bool) -> String {
    without_comments(text, rust, false)
}

/// Rust or C++ source whose comments become spaces, and unless `literals` is true its strings and
/// character literals too; line breaks stay.
///
/// Raw strings are recognised in Rust only; the device sources contain none.
pub(crate) fn without_comments(text: &str, rust: bool, literals: bool) -> String {
    let chars: Vec<char> = text.chars().collect();
    let at = |i: usize| chars.get(i).copied().unwrap_or('\0');
    let mut code = String::with_capacity(text.len());
    let mut i = 0;
    while i < chars.len() {
        let in_word = i > 0 && (at(i - 1).is_alphanumeric() || at(i - 1) == '_');
        let end = match (at(i), at(i + 1)) {
            ('/', '/') => (i..chars.len()).find(|&k| at(k) == '\n').unwrap_or(chars.len()),
            ('/', '*') => comment_end(&chars, i, rust),
            ('"', _) => quote_end(&chars, i, '"'),
            ('r', '"' | '#') if rust && !in_word => raw_end(&chars, i, i),
            ('b', 'r') if rust && !in_word => raw_end(&chars, i, i + 1),
            // A lifetime or a digit separator is not a character literal: for example, `'a` has no
            // quote two characters later.
            ('\'', '\\') => quote_end(&chars, i, '\''),
            ('\'', _) if at(i + 2) == '\'' => i + 3,
            _ => i,
        };
        if end == i {
            code.push(at(i));
            i += 1;
        } else {
            let stays = |c| c == '\n' || (literals && at(i) != '/');
            code.extend((i..end).map(|k| if stays(at(k)) { at(k) } else { ' ' }));
            i = end;
        }
    }
    code
}

/// Index after the block comment that begins at `start`. If `nested` is true, as in Rust, a block
/// comment may contain others.
fn comment_end(chars: &[char], start: usize, nested: bool) -> usize {
    let mut depth = 1;
    let mut i = start + 2;
    while i < chars.len() && depth > 0 {
        match (chars[i], chars.get(i + 1)) {
            ('*', Some('/')) => (depth, i) = (depth - 1, i + 2),
            ('/', Some('*')) if nested => (depth, i) = (depth + 1, i + 2),
            _ => i += 1,
        }
    }
    i.min(chars.len())
}

/// Index after the string or character literal that begins at `start`.
fn quote_end(chars: &[char], start: usize, quote: char) -> usize {
    let mut i = start + 1;
    while i < chars.len() && chars[i] != quote {
        i += if chars[i] == '\\' { 2 } else { 1 };
    }
    (i + 1).min(chars.len())
}

/// Index after the raw string that begins at `start`, with its `r` at index `r`; `start` if there
/// is none.
fn raw_end(chars: &[char], start: usize, r: usize) -> usize {
    let hashes = chars[r + 1..].iter().take_while(|&&c| c == '#').count();
    let open = r + 1 + hashes;
    if chars.get(open) != Some(&'"') {
        return start;
    }
    let closes = |i: usize| {
        chars[i] == '"'
            && chars[i + 1..].iter().take(hashes).filter(|&&c| c == '#').count() == hashes
    };
    (open + 1..chars.len()).find(|&i| closes(i)).map_or(chars.len(), |i| i + 1 + hashes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(path: &str, text: &str) -> Vec<String> {
        let file = File { path: path.to_owned(), text: text.to_owned() };
        file.identifiers().into_iter().map(|(_, word)| word).collect()
    }

    #[test]
    fn comments_and_strings_are_no_code() {
        let rust = r###"
            /* a /* nested */ still */ one("b \" c", 'd', '\'', b"e") // f
            two::<'life>(r#"g " h"#, br"i \", r"j") raw r#fn break
        "###;
        assert_eq!(words("a.rs", rust), ["one", "b", "two", "life", "raw", "r", "fn", "break"]);
        let device = "/* a /* b */ one('c', 1'000, \"asm\"); // volatile\n#define two three";
        assert_eq!(words("a.cu", device), ["one", "define", "two", "three"]);
    }

    #[test]
    fn lines_stay_where_they_were() {
        let text = "/*\n*/\n\"\n\"\nlast";
        let file = File { path: "a.rs".into(), text: text.into() };
        assert_eq!(file.identifiers(), [(5, "last".to_owned())]);
    }

    #[test]
    fn an_unfinished_source_ends() {
        for text in ["/*", "\"\\", "r#\"", "'\\", "br", "r"] {
            code_of(text, true);
        }
    }
}
