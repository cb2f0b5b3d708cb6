//! Rule: the lock file of a program outside the workspace lists what the manifests of its path
//! dependencies require, because CI builds the program with `--locked`.

use std::collections::BTreeSet;

use toml::{Table, Value};

use super::Finding;
use super::layers::{dependencies, parse, table};
use super::tree::Tree;

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let named = |name: &'static str| {
        let ends = move |path: &str| path.rsplit('/').next() == Some(name) && path.contains('/');
        tree.files().iter().filter(move |file| ends(&file.path))
    };
    let manifests = named("Cargo.toml").filter_map(|file| parse(&file.path, &file.text).ok());
    let manifests: Vec<Table> = manifests.collect();
    let mut findings = Vec::new();
    for lock in named("Cargo.lock") {
        match parse(&lock.path, &lock.text) {
            Err(finding) => findings.push(finding),
            Ok(locked) => {
                let stale = stale(&locked, &manifests).into_iter();
                findings.extend(stale.map(|message| Finding::new(&lock.path, 0, message)));
            }
        }
    }
    findings
}

/// Messages about packages of the tree whose entry in a lock file differs from their manifest.
fn stale(lock: &Table, manifests: &[Table]) -> Vec<String> {
    let mut found = Vec::new();
    for entry in lock.get("package").and_then(Value::as_array).into_iter().flatten() {
        // A package from a registry has a source.
        let name = entry.get("name").and_then(Value::as_str).unwrap_or_default();
        let manifest = manifests.iter().find(|it| {
            let package = table(it, "package").and_then(|it| it.get("name"));
            package.and_then(Value::as_str) == Some(name)
        });
        let Some(manifest) = manifest.filter(|_| entry.get("source").is_none()) else { continue };
        let listed = entry.get("dependencies").and_then(Value::as_array);
        let listed = listed.into_iter().flatten().filter_map(Value::as_str);
        // An entry has a version after the name if the lock file has several versions.
        let listed: BTreeSet<&str> = listed.filter_map(|it| it.split(' ').next()).collect();
        let wanted = dependencies(manifest, None);
        let built = || wanted.iter().filter(|it| it.kind != "dev-dependencies");
        for missing in built().filter(|it| !it.optional && !listed.contains(&*it.package)) {
            found.push(format!(
                "{name} lacks {}; run cargo metadata in the folder",
                missing.package
            ));
        }
        for extra in listed.iter().filter(|it| built().all(|other| other.package != **it)) {
            found.push(format!(
                "{name} has no dependency {extra}; run cargo metadata in the folder"
            ));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::found;

    /// Number of violations if a lock file lists these dependencies of a package that requires
    /// `serde` and, with a feature, `cudarc`.
    fn listed(dependencies: &str) -> usize {
        let lock = format!(
            "[[package]]\nname = 'toml'\nsource = 'registry'\ndependencies = ['other']\n
             [[package]]\nname = 'iris-heap'\ndependencies = [{dependencies}]"
        );
        let manifest = "[package]\nname = 'iris-heap'\n[dependencies]\nserde.workspace = true
            cudarc = { workspace = true, optional = true }\n[dev-dependencies]\nproptest = '1'";
        let files = [("iris-heap/Cargo.toml", manifest), ("example/Cargo.lock", &*lock)];
        found(check, &files).len()
    }

    #[test]
    fn a_stale_lock_file_is_found() {
        assert_eq!(listed("'serde'"), 0);
        assert_eq!(listed("'serde 1.0.229', 'cudarc'"), 0);
        assert_eq!(listed("'cudarc'"), 1);
        assert_eq!(listed("'serde', 'libc'"), 1);
        assert_eq!(listed("'serde', 'proptest'"), 1);
        assert_eq!(found(check, &[("example/Cargo.lock", "[[package")]).len(), 1);
    }
}
