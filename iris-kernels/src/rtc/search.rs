//! Search for the libraries of GPU vendors on this machine.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use libloading::Library;

/// Defines a struct with the functions of a C library, which are loaded by name. `of` loads them;
/// its argument `prefix` is the prefix that all names share.
///
/// The library stays loaded until the process ends, because threads that it has started may still
/// run its code. An example are threads of an NCCL communicator that was not destroyed because a
/// call had failed.
macro_rules! library {
    ($table:ident, $($name:ident($($arg:ty),* $(,)?) -> $ret:ty;)*) => {
        /// Functions of the library, as the vendor's header declares them.
        #[allow(non_snake_case, reason = "names of the library's functions")]
        pub(super) struct $table {
            $($name: unsafe extern "C" fn($($arg),*) -> $ret,)*
        }

        impl $table {
            #[allow(non_snake_case, reason = "names of the library's functions")]
            pub(super) fn of(
                library: libloading::Library,
                prefix: &str,
            ) -> ::std::result::Result<$table, String> {
                $(
                    let name = format!("{prefix}{}", stringify!($name));
                    // SAFETY: the function has this type in the vendor's header.
                    let $name = unsafe { $crate::rtc::search::function(&library, &name) }?;
                )*
                std::mem::forget(library);
                Ok($table { $($name,)* })
            }
        }
    };
}
pub(crate) use library;

/// Function `name` of `library`.
///
/// # Errors
/// Text that says that the library has no such function.
///
/// # Safety
/// `T` is the function's type, a function pointer.
pub(crate) unsafe fn function<T: Copy>(library: &Library, name: &str) -> Result<T, String> {
    // SAFETY: the caller guarantees that `T` is the type of the function.
    let found = unsafe { library.get::<T>(name.as_bytes()) };
    found.map(|found| *found).map_err(|why| format!("it has no {name}: {why}"))
}

/// Opens the first usable file of a vendor's library: at the path that the environment variable
/// `variable_name` gives, otherwise in `folders`, otherwise by its bare name on the loader's path.
/// The error lists every place that was searched, each with the reason why no file there was used.
pub(crate) fn first<T, E: std::fmt::Display>(
    variable_name: &str,
    folders: &[PathBuf],
    bare: &[&str],
    is_library: impl Fn(&str) -> bool,
    open: impl Fn(&Path) -> Result<T, E>,
) -> Result<T, Vec<String>> {
    let mut looked = Vec::new();
    let told = variable(variable_name);
    let files: Vec<PathBuf> = match &told {
        Some(file) if !file.is_dir() => vec![file.clone()],
        _ => {
            let all = told.as_ref().map_or(folders, std::slice::from_ref);
            looked.extend(all.iter().map(|folder| folder.display().to_string()));
            all.iter().flat_map(|folder| named(folder, &is_library)).collect()
        }
    };
    let mut bare: Vec<PathBuf> = bare.iter().map(PathBuf::from).collect();
    if told.is_some() {
        looked.insert(0, format!("the path in {variable_name}"));
        bare.clear();
    }
    for file in files.into_iter().chain(bare) {
        match open(&file) {
            Ok(library) => return Ok(library),
            Err(why) => looked.push(format!("{} ({why})", file.display())),
        }
    }
    Err(looked)
}

/// Folders with CUDA's libraries: folders of CUDA toolkits, and the folders `wheels` inside
/// Python's package folders.
pub(crate) fn cuda_folders(wheels: &[&str]) -> Vec<PathBuf> {
    let inside = ["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"];
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|name| variable(name));
    let installed = named("/usr/local".as_ref(), |name| name.starts_with("cuda"));
    let mut folders: Vec<PathBuf> =
        toolkits.chain(installed).flat_map(|root| inside.map(|folder| root.join(folder))).collect();
    for packages in python_packages() {
        folders.extend(wheels.iter().map(|wheel| packages.join(wheel)));
    }
    folders
}

/// Paths of files that are mapped into this process (loaded libraries, for example) and whose names
/// begin with `name`.
pub(crate) fn loaded(name: &str) -> Vec<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let files = maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
    let named = |file: &&Path| {
        file.file_name().and_then(|own| own.to_str()).is_some_and(|own| own.starts_with(name))
    };
    let mut found: Vec<PathBuf> = files.filter(named).map(Path::to_path_buf).collect();
    found.sort();
    found.dedup();
    found
}

/// Paths of the files in a folder for whose names `matches` returns true, latest version first.
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

/// Path that an environment variable holds; `None` if it is unset or empty.
pub(crate) fn variable(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Package folders of Python: those of active environments, of the interpreters on PATH, of the
/// user and of the system.
pub(crate) fn python_packages() -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|name| variable(name)).collect();
    let path = env::var_os("PATH").unwrap_or_default();
    for folder in env::split_paths(&path) {
        // The interpreter of a virtual environment is a link. The folder that contains the link is
        // used, not the folder of the link's target.
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
