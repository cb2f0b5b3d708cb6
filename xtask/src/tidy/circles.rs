//! Rule: no circles between the files of a package. A reader who follows the names in a file from
//! file to file never comes back to it.
//!
//! A file names another file by `use`, or by a path in its code or its macros. Paths from a module
//! to one of its parents do not count. A path to a name that the crate's root exports counts as a
//! path to the file that defines the name.

use std::collections::{BTreeMap, BTreeSet};

use super::Finding;
use super::tree::{Tree, code_of};

/// Path of a module: the names of the modules from the root of its crate on.
pub(super) type Module = Vec<String>;

/// Files of a crate by module, each with the modules of other files that it names.
pub(super) type Files<'a> = BTreeMap<Module, (&'a str, BTreeSet<Module>)>;

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let roots = ["lib.rs", "main.rs"];
    let folders = tree.files().iter().filter_map(|file| {
        let folder = roots.iter().find_map(|root| file.path.strip_suffix(root))?;
        folder.ends_with("src/").then_some(folder)
    });
    let folders: BTreeSet<_> = folders.collect();
    folders.into_iter().flat_map(|folder| circles(&files(tree, folder))).collect()
}

/// Files of the crate whose sources are in `folder`, without test modules, which may import
/// everything, and without the root of the crate, which names all files.
pub(super) fn files<'a>(tree: &'a Tree, folder: &str) -> Files<'a> {
    let mut tests = Vec::new();
    let mut all: BTreeMap<Module, (&str, Vec<Module>)> = tree
        .files()
        .iter()
        .filter_map(|file| {
            let module = module_of(file.path.strip_prefix(folder)?.strip_suffix(".rs")?);
            let (code, names) = without_tests(&code_of(&file.text, true));
            tests.extend(names.into_iter().map(|name| [&module[..], &[name]].concat()));
            let mut paths = imports(&code);
            paths.extend(named(&code));
            Some((module, (file.path.as_str(), paths)))
        })
        .collect();
    all.retain(|module, _| !tests.iter().any(|test| module.starts_with(test)));
    let root = exports(&all);
    let others = all.iter().filter(|(module, _)| !module.is_empty());
    let named = others.map(|(module, (path, paths))| {
        let to = paths.iter().filter_map(|path| target(&all, &root, module, path));
        let to = to.filter(|to| !module.starts_with(to)).cloned().collect();
        (module.clone(), (*path, to))
    });
    named.collect()
}

fn circles(files: &Files<'_>) -> Vec<Finding> {
    let all: BTreeMap<&Module, _> =
        files.keys().map(|module| (module, reached(files, module))).collect();
    let mut findings = Vec::new();
    let mut said = BTreeSet::new();
    for (&module, to) in all.iter().filter(|(module, to)| to.contains(*module)) {
        if !said.insert(module) {
            continue;
        }
        let others = to.iter().filter(|&&other| other != module && all[other].contains(module));
        let others: Vec<&Module> = others.copied().collect();
        said.extend(&others);
        let names: Vec<&str> = others.iter().map(|other| files[*other].0).collect();
        let message = format!("a circle of imports with {}", names.join(", "));
        findings.push(Finding::new(files[module].0, 0, message));
    }
    findings
}

/// Code without its test modules, and the names of these modules.
fn without_tests(code: &str) -> (String, Vec<String>) {
    const ATTRIBUTE: &str = "#[cfg(test)]";
    let (mut kept, mut names, mut rest) = (String::new(), Vec::new(), code);
    while let Some(at) = rest.find(ATTRIBUTE) {
        let (before, from) = rest.split_at(at);
        let item = &from[ATTRIBUTE.len()..];
        let head = &item[..item.find([';', '{']).unwrap_or(item.len())];
        let mut words = head.split_whitespace().rev();
        let name = words.next().filter(|_| words.next() == Some("mod"));
        kept.push_str(before);
        names.extend(name.map(str::to_owned));
        rest = if name.is_some() { &item[module_end(item)..] } else { item };
    }
    (kept + rest, names)
}

/// Index after the first item in `code`: after its `;`, or after the brace that closes its first one.
fn module_end(code: &str) -> usize {
    let mut depth = 0;
    let end = code.find(|c| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        depth == 0 && matches!(c, ';' | '}')
    });
    end.map_or(code.len(), |at| at + 1)
}

/// Modules that `from` imports, directly or through other modules.
fn reached<'a>(files: &'a Files<'_>, from: &'a Module) -> BTreeSet<&'a Module> {
    let (mut seen, mut left) = (BTreeSet::new(), vec![from]);
    while let Some(at) = left.pop() {
        let next = files.get(at).into_iter().flat_map(|(_, to)| to);
        left.extend(next.filter(|&to| seen.insert(to)));
    }
    seen
}

/// Module that a file defines, from the file's path in the crate.
fn module_of(path: &str) -> Module {
    let parts = path.split('/').filter(|part| !["mod", "lib", "main"].contains(part));
    parts.map(str::to_owned).collect()
}

/// File to which an import of `module` refers; `None` if it is no file of this crate.
fn target<'a>(
    files: &'a BTreeMap<Module, (&str, Vec<Module>)>,
    root: &BTreeMap<String, Module>,
    module: &Module,
    path: &[String],
) -> Option<&'a Module> {
    let mut from: Module = match path.first()?.as_str() {
        "crate" => Vec::new(),
        "self" => module.clone(),
        "super" => module[..module.len().checked_sub(1)?].to_vec(),
        child => {
            let mut own = module.clone();
            own.push(child.to_owned());
            files.contains_key(&own).then_some(own)?
        }
    };
    for part in &path[1..] {
        if part == "super" {
            from.pop();
        } else {
            from.push(part.clone());
        }
    }
    let known = (1..=from.len()).rev().find_map(|len| files.get_key_value(&from[..len]));
    known.map(|(module, _)| module).or_else(|| {
        let (module, _) = files.get_key_value(root.get(from.first()?)?)?;
        Some(module)
    })
}

/// Names that the crate's root exports, each with the file that defines the name.
fn exports(files: &BTreeMap<Module, (&str, Vec<Module>)>) -> BTreeMap<String, Module> {
    let Some((_, paths)) = files.get(&Vec::new()) else { return BTreeMap::new() };
    let exported = paths.iter().filter_map(|path| {
        let to = target(files, &BTreeMap::new(), &Vec::new(), path)?;
        let name = path.last().filter(|name| *name != "*")?;
        Some((name.clone(), to.clone()))
    });
    exported.collect()
}

/// Paths of modules that the `use` declarations in `code` import.
fn imports(code: &str) -> Vec<Module> {
    let mut paths = Vec::new();
    let mut rest = code;
    while let Some(at) = rest.find("use ") {
        let begins = rest[..at].chars().next_back().is_none_or(char::is_whitespace);
        rest = &rest[at + "use ".len()..];
        if let (true, Some(end)) = (begins, rest.find(';')) {
            let text: String = rest[..end].split(" as ").next().unwrap_or_default().to_owned();
            let text = if text.contains('{') { &rest[..end] } else { &text };
            expand(&text.split_whitespace().collect::<String>(), &[], &mut paths);
        }
    }
    paths
}

/// Paths of modules in `code`, macros included, that begin with `crate`, `super` or `self` and so
/// need no `use`.
fn named(code: &str) -> Vec<Module> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut paths = Vec::new();
    for start in ["crate", "super", "self"] {
        for (at, _) in code.match_indices(&format!("{start}::")) {
            let before = code[..at].chars().next_back();
            if before.is_some_and(|c| is_word(c) || c == ':') {
                continue;
            }
            let end = code[at..].find(|c| !is_word(c) && c != ':').unwrap_or(code.len() - at);
            let parts = code[at..at + end].split("::").filter(|part| !part.is_empty());
            paths.push(parts.map(str::to_owned).collect());
        }
    }
    paths
}

/// Adds the paths that the `use` tree `text` names after the prefix `before` to `paths`.
fn expand(text: &str, before: &[String], paths: &mut Vec<Module>) {
    let (head, group) = match text.split_once('{') {
        Some((head, rest)) => (head, Some(rest.strip_suffix('}').unwrap_or(rest))),
        None => (text, None),
    };
    let parts = head.split("::").filter(|part| !part.is_empty()).map(str::to_owned);
    let path: Module = before.iter().cloned().chain(parts).collect();
    let Some(group) = group else { return paths.push(path) };
    let (mut depth, mut begin) = (0, 0);
    for (at, c) in group.char_indices().chain([(group.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                if begin < at {
                    expand(&group[begin..at], &path, paths);
                }
                begin = at + 1;
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::found;

    /// Findings for a library that consists of two modules, `a` and `b`, with these texts.
    fn two(a: &str, b: &str) -> Vec<String> {
        let lib = "pub mod a;\npub mod b;\npub use b::Thing;\n";
        let files =
            [("iris-ops/src/lib.rs", lib), ("iris-ops/src/a.rs", a), ("iris-ops/src/b/mod.rs", b)];
        found(check, &files)
    }

    #[test]
    fn a_circle_is_found_however_it_is_written() {
        assert_eq!(two("use crate::b::X;\n", ""), [""; 0]);
        assert_eq!(
            two("// crate::b::X\nfn f() { x::super_b(\"crate::b\") }", "use crate::a::A;"),
            [""; 0]
        );
        for a in [
            "use crate::b::X;",
            "use crate::{other, b::{self, Y}};",
            "use super::b::X as Z;",
            "pub(crate) use super::{\n    b,\n};",
            "use crate::Thing;",
            "fn f() -> Vec<crate::b::X> {}",
            "fn f() { super::b::g() }",
            "macro_rules! m { () => { $crate::b::g() } }",
        ] {
            assert_eq!(two(a, "use crate::a::{A, B};\n"), ["iris-ops/src/a.rs:0"], "{a}");
        }
    }

    #[test]
    fn a_longer_one_is_found_once() {
        let files = [
            ("iris-heap/src/lib.rs", "mod a;"),
            ("iris-heap/src/a.rs", "use crate::b::B;"),
            ("iris-heap/src/b.rs", "use crate::c::C;"),
            ("iris-heap/src/c.rs", "use crate::a::A;"),
            ("iris-heap/src/d.rs", "use crate::a::A;"),
        ];
        assert_eq!(found(check, &files), ["iris-heap/src/a.rs:0"]);
    }

    #[test]
    fn imports_around_test_modules_count() {
        for tests in [
            "#[cfg(test)]\nmod tests;",
            "#[cfg(test)]\npub(crate) mod tests {\n fn f() { if a { b } }\n use crate::c::C;\n}",
            "#[cfg(test)]\nfn f() {}",
        ] {
            let a = format!("{tests}\nuse crate::b::B;");
            assert_eq!(two(&a, "use crate::a::A;"), ["iris-ops/src/a.rs:0"], "{a}");
            let b = format!("use crate::a::A;\n{tests}");
            assert_eq!(two("", &b), [""; 0], "{b}");
        }
        let of_test = "#[cfg(test)]\nmod tests { mod m { use crate::b::B; } use crate::b::B; }\n";
        assert_eq!(two(of_test, "use crate::a::A;"), [""; 0]);
    }

    #[test]
    fn a_module_and_its_children_are_one() {
        let files = [
            ("iris-heap/src/a.rs", "mod child;\nuse child::C;"),
            ("iris-heap/src/a/child.rs", "use super::A;\nuse super::super::b::B;"),
            (
                "iris-heap/src/b.rs",
                "use std::fmt;\n#[cfg(test)]\nmod tests {\n use crate::a::A;\n}",
            ),
        ];
        assert_eq!(found(check, &files), [""; 0]);
    }
}
