//! Where vendors' libraries lie on a machine.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// The names in a folder that match, the latest version first.
pub(crate) fn named(folder: &Path, matches: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_str().is_some_and(&matches))
        .map(|entry| entry.path())
        .collect();
    found.sort_by_key(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.split(|c: char| !c.is_ascii_digit())
            .map(|part| part.parse::<u32>().unwrap_or(0))
            .collect::<Vec<_>>()
    });
    found.reverse();
    found
}

/// The folder that a variable names.
pub(crate) fn variable(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// The folders of Python packages: of the environments in use, of the interpreter on the path, of
/// the user and of the system.
pub(crate) fn python_packages() -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|name| variable(name)).collect();
    let path = env::var_os("PATH").unwrap_or_default();
    for folder in env::split_paths(&path) {
        // An interpreter in an environment is a link; the environment is where the link is.
        if folder.join("python3").exists()
            && let Some(root) = folder.parent()
        {
            roots.push(root.to_path_buf());
        }
    }
    let home = variable("HOME");
    roots.extend(home.iter().map(|home| home.join(".local")));
    roots.extend(["/usr/local", "/usr"].map(PathBuf::from));
    if let Some(home) = &home {
        roots.extend(named(&home.join(".pyenv/versions"), |_| true));
    }
    let mut packages = Vec::new();
    for root in roots {
        for lib in named(&root.join("lib"), |name| name.starts_with("python3")) {
            for folder in ["site-packages", "dist-packages"].map(|name| lib.join(name)) {
                if folder.is_dir() && !packages.contains(&folder) {
                    packages.push(folder);
                }
            }
        }
    }
    packages
}
