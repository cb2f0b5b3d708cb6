//! Macro that defines the table of a driver's functions, and code that loads the driver's library;
//! common to all vendors.

use std::path::Path;

use libloading::Library;

use crate::error::{Error, Result};

/// Defines the struct `Api`: function pointers of a driver library, first the functions that every
/// release has, then functions that only some releases have. A function returns a 32-bit status
/// code unless its entry names another type.
macro_rules! table {
    (
        { $($name:ident($($arg:ty),* $(,)?) $(-> $of:ty)?;)* }
        sometimes { $($(#[$doc:meta])* $may:ident($($with:ty),* $(,)?) $(-> $gives:ty)?;)* }
    ) => {
        /// Functions of the driver, each in a field with the function's name.
        #[allow(non_snake_case, reason = "names of the library's functions")]
        pub(crate) struct Api {
            $(pub(crate) $name: unsafe extern "C" fn($($arg),*) -> $crate::backend::gpu::outcome!($($of)?),)*
            $(
                $(#[$doc])*
                pub(crate) $may: Option<
                    unsafe extern "C" fn($($with),*) -> $crate::backend::gpu::outcome!($($gives)?),
                >,
            )*
            /// Keeps the library loaded while its functions may be called.
            _library: ::libloading::Library,
        }

        impl Api {
            #[allow(non_snake_case, reason = "names of the library's functions")]
            fn of(library: ::libloading::Library) -> std::result::Result<Api, String> {
                $(
                    let $name = {
                        let name = concat!(stringify!($name), "\0");
                        // SAFETY: the type is the type of this version of the function in the
                        // driver's header, with integers for handles, addresses and enumerations.
                        let symbol = unsafe { library.get(name.as_bytes()) };
                        *symbol.map_err(|e| format!("the library has no {}: {e}", stringify!($name)))?
                    };
                )*
                $(
                    let $may = {
                        let name = concat!(stringify!($may), "\0");
                        // SAFETY: the function has this type in the headers of the releases that
                        // have the function.
                        unsafe { library.get(name.as_bytes()) }.ok().map(|symbol| *symbol)
                    };
                )*
                Ok(Api { $($name,)* $($may,)* _library: library })
            }
        }
    };
}
pub(in crate::backend) use table;

/// Defines the functions that interpret a driver's status codes. They use the constants of the
/// invoking module, and its function `name_of`, which returns the name of a code.
macro_rules! results {
    () => {
        /// Converts a status code into a result. `api` is the name of the driver's function, which
        /// errors show without a version suffix such as `_v2`.
        pub(crate) fn check(api: &str, code: u32) -> Result<()> {
            match code {
                SUCCESS => Ok(()),
                _ => {
                    let api = api.trim_end_matches("_v2").into();
                    Err(Error::Device { api, code, name: name_of(code) })
                }
            }
        }

        /// Converts a status code like [`check`]; the error also names the object `what` that the
        /// call concerned.
        pub(super) fn check_for(api: &str, what: impl FnOnce() -> String, code: u32) -> Result<()> {
            match code {
                SUCCESS => Ok(()),
                _ => {
                    let api = format!("{api} {}", what());
                    Err(Error::Device { api, code, name: name_of(code) })
                }
            }
        }

        /// Whether the queried work has ended, normally or by a device error, if a query returned
        /// `code`. False for errors about captures, which say nothing about the work.
        pub(super) fn has_ended(code: u32) -> bool {
            code != NOT_READY && !(FIRST_OF_CAPTURES..=LAST_OF_CAPTURES).contains(&code)
        }
    };
}
pub(in crate::backend) use results;

/// Return type of a function in the table: the type that its entry names, or `u32` (a status code)
/// if the entry names none.
macro_rules! outcome {
    () => {
        u32
    };
    ($of:ty) => {
        $of
    };
}
pub(in crate::backend) use outcome;

/// Loads a driver's library and calls `of` with it: tries each of `names` on the loader's path,
/// then in each of `folders`. `what` describes the library in errors.
///
/// # Errors
/// [`Error::Library`], with the places that were searched and the last problem.
pub(crate) fn load<T>(
    what: &str,
    names: &[&str],
    folders: &[String],
    of: impl Fn(Library) -> std::result::Result<T, String>,
) -> Result<T> {
    let bare = names.iter().map(ToString::to_string);
    let places = folders.iter().flat_map(|folder| {
        names
            .iter()
            .map(move |name| format!("{folder}/{name}"))
            .filter(|file| Path::new(file).exists())
    });
    let mut problem = "no such file".to_string();
    for candidate in bare.chain(places) {
        // SAFETY: a driver's library may be loaded by any program; its initialisers have no
        // preconditions.
        match unsafe { Library::new(&candidate) } {
            Ok(library) => match of(library) {
                Ok(loaded) => return Ok(loaded),
                Err(e) => problem = format!("{candidate}: {e}"),
            },
            Err(e) => problem = e.to_string(),
        }
    }
    let path = std::env::var("LD_LIBRARY_PATH").unwrap_or_else(|_| "not set".into());
    Err(Error::Library {
        library: format!("{} ({what})", names[0]),
        looked: format!(
            "the loader's path (LD_LIBRARY_PATH is {path}), then {}",
            folders.join(", ")
        ),
        problem,
    })
}
