//! Rule: which members may depend on which.

use toml::{Table, Value};

use super::Finding;
use super::tree::Tree;

/// Each member with the members that it may depend on. A library may also have iris-testkit as
/// dev-dependency.
const LAYERS: &[(&str, &[&str])] = &[
    ("iris-sync", &[]),
    ("iris-heap", &["iris-sync"]),
    ("iris-kernels", &["iris-sync", "iris-heap"]),
    ("iris-ops", &["iris-sync", "iris-heap", "iris-kernels"]),
    ("iris-testkit", &["iris-sync", "iris-heap", "iris-kernels", "iris-ops"]),
    ("xtask", &[]),
];

/// Crate that only tests and programs may use.
const TESTKIT: &str = "iris-testkit";

/// Members whose external dependencies are restricted, too, because the protocols run inside a
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
    for member in members.into_iter().flatten().filter_map(Value::as_str) {
        let path = format!("{member}/Cargo.toml");
        let Some((_, may)) = LAYERS.iter().find(|(name, _)| *name == member) else {
            findings.push(Finding::new(
                "Cargo.toml",
                0,
                format!("{member} is missing from the table LAYERS of xtask"),
            ));
            continue;
        };
        match tree.file(&path).map(|file| parse(&path, &file.text)) {
            None => findings.push(Finding::new(&path, 0, "the member has no manifest")),
            Some(Err(finding)) => findings.push(finding),
            Some(Ok(manifest)) => {
                let shared = workspace.and_then(|it| table(it, "dependencies"));
                for (kind, name) in dependencies(&manifest, shared) {
                    if let Some(message) = refused(member, may, kind, &name) {
                        findings.push(Finding::new(&path, 0, message));
                    }
                }
            }
        }
    }
    findings
}

/// Reason why `member` may not have `name` among its dependencies of this kind; `None` if it may.
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

/// All dependencies of a manifest as (kind, package), including target-specific ones.
fn dependencies(manifest: &Table, shared: Option<&Table>) -> Vec<(&'static str, String)> {
    let targets = table(manifest, "target").into_iter().flat_map(Table::values);
    let tables = targets.filter_map(Value::as_table).chain([manifest]);
    let mut found = Vec::new();
    for place in tables {
        for kind in ["dependencies", "dev-dependencies", "build-dependencies"] {
            for (key, value) in table(place, kind).into_iter().flatten() {
                let inherited = value.get("workspace").and_then(Value::as_bool) == Some(true);
                let value = if inherited { shared.and_then(|it| it.get(key)) } else { Some(value) };
                let package = value.and_then(|it| it.get("package")).and_then(Value::as_str);
                found.push((kind, package.unwrap_or(key).to_owned()));
            }
        }
    }
    found
}

fn parse(path: &str, text: &str) -> Result<Table, Finding> {
    text.parse().map_err(|error| Finding::new(path, 0, format!("not TOML: {error}")))
}

fn table<'a>(table: &'a Table, key: &str) -> Option<&'a Table> {
    table.get(key).and_then(Value::as_table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::found;

    /// Number of violations if one member has this manifest.
    fn member(name: &str, manifest: &str) -> usize {
        let root = format!(
            "[workspace]\nmembers = ['{name}']\n[workspace.dependencies]\nops = {{ package = 'iris-ops', path = 'iris-ops' }}\niris-sync.path = 'iris-sync'"
        );
        found(check, &[("Cargo.toml", &root), (&format!("{name}/Cargo.toml"), manifest)]).len()
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
