//! Rule: a package depends only on the packages that are allowed for it, and has no dependency
//! without a use.

use std::collections::BTreeSet;

use toml::{Table, Value};

use super::Finding;
use super::tree::{File, Tree};

/// Packages of the workspace, each with the packages of the workspace on which it may depend. A
/// library may also have iris-testkit as dev-dependency.
const LAYERS: &[(&str, &[&str])] = &[
    ("iris-sync", &[]),
    ("iris-heap", &["iris-sync"]),
    ("iris-kernels", &["iris-sync", "iris-heap"]),
    ("iris-ops", &["iris-sync", "iris-heap", "iris-kernels"]),
    ("iris-testkit", &["iris-sync", "iris-heap", "iris-kernels", "iris-ops"]),
    // The package iris-models does not depend on iris-ops, so that users can check a protocol of
    // their own without the operators.
    ("iris-models", &["iris-sync", "iris-kernels"]),
    ("iris-cli", &["iris-sync", "iris-heap", "iris-kernels", "iris-ops", "iris-testkit"]),
    ("xtask", &[]),
];

/// Crate that only tests and programs may use.
const TESTKIT: &str = "iris-testkit";

/// Members whose external dependencies are restricted too, because their protocols run inside a
/// model checker.
const OUTSIDE: &[(&str, &[&str])] = &[("iris-sync", &["bytemuck"])];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    let Some(root) = tree.file("Cargo.toml") else { return findings };
    let root = match parse(&root.path, &root.text) {
        Ok(table) => table,
        Err(finding) => return vec![finding],
    };
    let workspace = table(&root, "workspace");
    let members = workspace.and_then(|it| it.get("members")).and_then(Value::as_array);
    let members: Vec<&str> = members.into_iter().flatten().filter_map(Value::as_str).collect();
    for member in &members {
        let path = format!("{member}/Cargo.toml");
        let manifest = match tree.file(&path).map(|file| parse(&path, &file.text)) {
            None => {
                findings.push(Finding::new(&path, 0, "the member has no manifest"));
                continue;
            }
            Some(Err(finding)) => {
                findings.push(finding);
                continue;
            }
            Some(Ok(manifest)) => manifest,
        };
        let package = table(&manifest, "package").and_then(|it| it.get("name"));
        let package = package.and_then(Value::as_str).unwrap_or(member);
        let Some((_, may)) = LAYERS.iter().find(|(name, _)| *name == package) else {
            let message = format!("{package} is missing from the table LAYERS of xtask");
            findings.push(Finding::new(&path, 0, message));
            continue;
        };
        let shared = workspace.and_then(|it| table(it, "dependencies"));
        let words = words(tree, member, &members);
        for Dependency { kind, key, package: name, .. } in dependencies(&manifest, shared) {
            if let Some(message) = refused(package, may, kind, &name) {
                findings.push(Finding::new(&path, 0, message));
            }
            if !words.contains(&key.replace('-', "_")) {
                let message = format!("{key} is among the {kind}, and no source names it");
                findings.push(Finding::new(&path, 0, message));
            }
        }
    }
    findings
}

/// Identifiers in the Rust sources of a member, without the folders of other members inside it.
fn words(tree: &Tree, member: &str, members: &[&str]) -> BTreeSet<String> {
    let inside = |path: &str, folder: &str| {
        path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'))
    };
    let nested: Vec<_> = members.iter().filter(|&&it| inside(it, member)).collect();
    let own = tree.files().iter().filter(|file| {
        file.extension() == "rs"
            && inside(&file.path, member)
            && !nested.iter().any(|it| inside(&file.path, it))
    });
    own.flat_map(File::identifiers).map(|(_, word)| word).collect()
}

/// Reason for which `member` may not have a dependency of this kind on `name`; `None` if it may.
fn refused(member: &str, may: &[&str], kind: &str, name: &str) -> Option<String> {
    let ours = LAYERS.iter().any(|(layer, _)| *layer == name);
    let test_only = kind == "dev-dependencies";
    if ours {
        let for_tests = test_only && name == TESTKIT && member != "xtask";
        let allowed = may.contains(&name) || for_tests || (test_only && name == member);
        return (!allowed).then(|| format!("{member} must not have {name} among its {kind}"));
    }
    let (_, only) = OUTSIDE.iter().find(|(layer, _)| *layer == member)?;
    (!test_only && !only.contains(&name))
        .then(|| format!("{member} may have only {only:?} among its {kind}, not {name}"))
}

/// Dependency that a manifest lists.
pub(super) struct Dependency {
    /// Name of the manifest's table that lists the dependency.
    pub(super) kind: &'static str,
    /// Name by which the sources refer to the package.
    key: String,
    pub(super) package: String,
    pub(super) optional: bool,
}

/// All dependencies that a manifest lists, including target-specific ones.
pub(super) fn dependencies(manifest: &Table, shared: Option<&Table>) -> Vec<Dependency> {
    let targets = table(manifest, "target").into_iter().flat_map(Table::values);
    let tables = targets.filter_map(Value::as_table).chain([manifest]);
    let mut found = Vec::new();
    for place in tables {
        for kind in ["dependencies", "dev-dependencies", "build-dependencies"] {
            for (key, value) in table(place, kind).into_iter().flatten() {
                let optional = value.get("optional").and_then(Value::as_bool) == Some(true);
                let inherited = value.get("workspace").and_then(Value::as_bool) == Some(true);
                let value = if inherited { shared.and_then(|it| it.get(key)) } else { Some(value) };
                let package = value.and_then(|it| it.get("package")).and_then(Value::as_str);
                let package = package.unwrap_or(key).to_owned();
                found.push(Dependency { kind, key: key.clone(), package, optional });
            }
        }
    }
    found
}

pub(super) fn parse(path: &str, text: &str) -> Result<Table, Finding> {
    text.parse().map_err(|error| Finding::new(path, 0, format!("not TOML: {error}")))
}

pub(super) fn table<'a>(table: &'a Table, key: &str) -> Option<&'a Table> {
    table.get(key).and_then(Value::as_table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::found;

    /// Number of violations if the member `name` has this manifest. Its source uses every
    /// dependency that the tests name.
    fn member(name: &str, manifest: &str) -> usize {
        const USES: &str = "use iris_ops; use ops; use iris_heap; use iris_kernels; use iris_sync;
            use iris_testkit; use rayon; use loom; use bytemuck; use x;";
        member_with(name, manifest, USES)
    }

    fn member_with(name: &str, manifest: &str, source: &str) -> usize {
        let root = format!(
            "[workspace]\nmembers = ['{name}']\n[workspace.dependencies]\nops = {{ package = 'iris-ops', path = 'iris-ops' }}\niris-sync.path = 'iris-sync'"
        );
        let (path, source_path) = (format!("{name}/Cargo.toml"), format!("{name}/src/lib.rs"));
        found(check, &[("Cargo.toml", &root), (&path, manifest), (&source_path, source)]).len()
    }

    #[test]
    fn a_dependency_without_a_use_is_found() {
        let manifest = "[dependencies]\nserde-json = '1'";
        assert_eq!(member_with("iris-heap", manifest, "use serde_json::Value;"), 0);
        assert_eq!(member_with("iris-heap", manifest, "// serde_json\nuse serde::Value;"), 1);
    }

    /// Tests a package in another package's folder: it is checked by its own layer, and its sources
    /// do not count as uses of the outer package's dependencies.
    #[test]
    fn a_nested_package_is_one_of_its_own() {
        let root = "[workspace]\nmembers = ['iris-testkit', 'iris-testkit/models']";
        let models = "[package]\nname = 'iris-models'\n[dependencies]\n";
        let nested = |outer: &str, inner: &str| {
            let manifest = format!("{models}{inner} = '1'");
            let outer = format!("[dependencies]\n{outer} = '1'");
            let files = [
                ("Cargo.toml", root),
                ("iris-testkit/Cargo.toml", &*outer),
                ("iris-testkit/src/lib.rs", "use iris_ops;"),
                ("iris-testkit/models/Cargo.toml", &*manifest),
                ("iris-testkit/models/src/lib.rs", "use {iris_sync, iris_ops, loom};"),
            ];
            found(check, &files)
        };
        assert_eq!(nested("iris-ops", "iris-sync"), [""; 0]);
        assert_eq!(nested("iris-ops", "iris-ops"), ["iris-testkit/models/Cargo.toml:0"]);
        assert_eq!(nested("loom", "iris-sync"), ["iris-testkit/Cargo.toml:0"]);
    }

    #[test]
    fn the_direction_is_kept() {
        assert_eq!(member("iris-heap", "[dependencies]\niris-sync.workspace = true"), 0);
        assert_eq!(member("iris-heap", "[dependencies]\nrayon = '1'"), 0);
        assert_eq!(member("iris-sync", "[dependencies]\niris-heap.path = '../iris-heap'"), 1);
        assert_eq!(member("iris-kernels", "[build-dependencies]\niris-ops = '1'"), 1);
        assert_eq!(member("xtask", "[dev-dependencies]\niris-testkit = '1'"), 1);
    }

    #[test]
    fn another_name_or_place_hides_nothing() {
        assert_eq!(member("iris-heap", "[dependencies]\nops.workspace = true"), 1);
        assert_eq!(
            member("iris-heap", "[dependencies]\nx = { package = 'iris-kernels', path = '' }"),
            1
        );
        assert_eq!(member("iris-heap", "[target.'cfg(unix)'.dependencies]\niris-ops = '1'"), 1);
    }

    #[test]
    fn the_testkit_is_for_tests() {
        assert_eq!(member("iris-ops", "[dev-dependencies]\niris-testkit = '1'"), 0);
        assert_eq!(member("iris-ops", "[dependencies]\niris-testkit = '1'"), 1);
    }

    #[test]
    fn the_protocols_stay_small() {
        assert_eq!(
            member("iris-sync", "[dependencies]\nbytemuck = '1'\n[dev-dependencies]\nloom = '1'"),
            0
        );
        assert_eq!(member("iris-sync", "[dependencies]\nloom = '1'"), 1);
    }

    #[test]
    fn a_new_member_needs_a_layer() {
        assert_eq!(member("iris-more", ""), 1);
        assert_eq!(found(check, &[("Cargo.toml", "[workspace]\nmembers = ['xtask']")]).len(), 1);
        assert_eq!(found(check, &[("Cargo.toml", "[workspace")]).len(), 1);
    }
}
