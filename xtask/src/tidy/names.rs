//! Rule: a public type name of iris-ops means one thing in the workspace, so that a reader who meets
//! it in another crate need not ask which type it is.

use std::collections::BTreeMap;

use super::Finding;
use super::tree::{File, Tree, code_of};

const CRATE: &str = "iris-ops/";

/// Table of operators.
const OPERATORS: &str = "iris-ops/src/ops/mod.rs";

/// Files whose exports are public: the crate, its communicator, and the table of operators.
const EXPORTS: [&str; 3] = ["iris-ops/src/lib.rs", "iris-ops/src/comm.rs", OPERATORS];

/// Names that every library, operator or command may have.
const COMMON: [&str; 4] = ["Error", "Options", "Result", "Variant"];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let names = public(tree);
    let mut defined: BTreeMap<&str, Vec<(&File, usize)>> = BTreeMap::new();
    let others = tree.files().iter().filter(|file| !file.path.starts_with(CRATE));
    for file in others.filter(|file| file.extension() == "rs") {
        for (line, name) in definitions(file) {
            if let Some((name, _)) = names.get_key_value(&name) {
                defined.entry(name).or_default().push((file, line));
            }
        }
    }
    // The definition of a type that the crate exports for another one is its only one.
    let twice = defined.into_iter().filter(|(name, places)| places.len() > names[*name].into());
    let finding = |name: &str, (file, line): (&File, usize)| {
        let message = format!("{name} is a public type of iris-ops: choose another name");
        Finding::new(&file.path, line, message)
    };
    twice.flat_map(|(name, places)| places.into_iter().map(move |it| finding(name, it))).collect()
}

/// Public type names of the crate, and whether each is defined in another crate.
fn public(tree: &Tree) -> BTreeMap<String, bool> {
    let mut names = BTreeMap::new();
    for file in EXPORTS.iter().filter_map(|path| tree.file(path)) {
        for statement in code_of(&file.text, true).split(';') {
            if let Some((_, exported)) = statement.rsplit_once("pub use ") {
                let words = exported.replace(|c: char| !(c.is_alphanumeric() || c == '_'), " ");
                let words: Vec<&str> = words.split_whitespace().collect();
                let kept =
                    words.iter().enumerate().filter(|(at, _)| words.get(at + 1) != Some(&"as"));
                let foreign = exported.starts_with("iris_");
                names.extend(kept.map(|(_, word)| ((*word).to_owned(), foreign)));
            }
        }
        if file.path == OPERATORS {
            // Rows of the table: `module: Type,`.
            let row =
                |line: &str| Some(line.trim().strip_suffix(',')?.split_once(": ")?.1.to_owned());
            names.extend(file.text.lines().filter_map(row).map(|name| (name, false)));
        }
        names.extend(definitions(file).into_iter().map(|(_, name)| (name, false)));
    }
    names.retain(|name, _| {
        let is_type = name.starts_with(|c: char| c.is_ascii_uppercase());
        is_type && !COMMON.contains(&name.as_str())
    });
    names
}

/// Types that a file defines, each with its line.
fn definitions(file: &File) -> Vec<(usize, String)> {
    let words = file.identifiers();
    let defines = |word: &str| ["struct", "enum", "union", "trait", "type"].contains(&word);
    let pairs = words.windows(2).filter(|pair| defines(&pair[0].1));
    pairs.map(|pair| pair[1].clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests;

    /// Findings for a crate with these exports, and a file of another crate with this text.
    fn found(text: &str) -> Vec<String> {
        let library = "pub use plan::{Choice, Plan};\npub use error::{Error as OpError};\n\
                       pub use iris_kernels::Library;\nuse other::Hidden;";
        let table = "each! {\n    all_gather: AllGather,\n    barrier: Barrier,\n}";
        let communicator = "pub struct Comm;\npub use options::Options;";
        let files = [library, communicator, table];
        let files: Vec<_> = EXPORTS.into_iter().zip(files).collect();
        tests::found(check, &[&files[..], &[("iris-kernels/src/a.rs", text)]].concat())
    }

    #[test]
    fn a_second_meaning_is_found() {
        for text in [
            "struct Plan;",
            "pub(crate) enum Choice { A }",
            "\ntype OpError = u32;",
            "trait Comm {}",
            "struct AllGather(u32);",
            "enum Library {}\nmod a {\n    struct Library;\n}",
        ] {
            assert!(!found(text).is_empty(), "{text}");
        }
        assert_eq!(found("\nstruct Plan;"), ["iris-kernels/src/a.rs:2"]);
    }

    #[test]
    fn other_names_are_free() {
        for text in [
            "pub enum Library {}",
            "struct Options;",
            "enum Error {}",
            "struct Hidden;",
            "struct Planned(Plan);",
            "// struct Plan;",
            "enum Op { Plan }",
        ] {
            assert_eq!(found(text), [""; 0], "{text}");
        }
    }
}
