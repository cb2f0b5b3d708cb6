//! A driver's functions by name, and the library that they are in: what the tables of the vendors share.

use std::path::Path;

use libloading::Library;

use crate::error::{Error, Result};

/// Makes `Api`: the functions of a driver that are called, as the library has them. Those of every
/// release come first, then those that only some have. What a function returns is a number of 32 bits,
/// its outcome, if nothing else is said.
macro_rules! table {
    (
        { $($name:ident($($arg:ty),* $(,)?) $(-> $of:ty)?;)* }
        sometimes { $($(#[$doc:meta])* $may:ident($($with:ty),* $(,)?) $(-> $gives:ty)?;)* }
    ) => {
        /// The functions of the driver that are called.
        #[allow(non_snake_case)]
        pub(crate) struct Api {
            $(pub(crate) $name: unsafe extern "C" fn($($arg),*) -> $crate::backend::gpu::outcome!($($of)?),)*
            $(
                $(#[$doc])*
                pub(crate) $may: Option<
                    unsafe extern "C" fn($($with),*) -> $crate::backend::gpu::outcome!($($gives)?),
                >,
            )*
            /// Never called: keeps the functions.
            _library: ::libloading::Library,
        }

        impl Api {
            #[allow(non_snake_case)]
            fn of(library: ::libloading::Library) -> std::result::Result<Api, String> {
                $(
                    let $name = {
                        let name = concat!(stringify!($name), "\0");
                        // SAFETY: the type is that of the driver's header of this version of the
                        // function, with handles, addresses and enumerations as their numbers.
                        let symbol = unsafe { library.get(name.as_bytes()) };
                        *symbol.map_err(|e| format!("it has no {}: {e}", stringify!($name)))?
                    };
                )*
                $(
                    let $may = {
                        let name = concat!(stringify!($may), "\0");
                        // SAFETY: as above, of the releases that have it.
                        unsafe { library.get(name.as_bytes()) }.ok().map(|symbol| *symbol)
                    };
                )*
                Ok(Api { $($name,)* $($may,)* _library: library })
            }
        }
    };
}
pub(in crate::backend) use table;

/// What a function of a table returns.
macro_rules! outcome {
    () => {
        u32
    };
    ($of:ty) => {
        $of
    };
}
pub(in crate::backend) use outcome;

/// Loads a driver's library: by these names where the loader looks, then from these folders, and makes
/// `of` of it. `what` says whose it is.
///
/// # Errors
/// [`Error::Library`], with where it was looked for and what was wrong last.
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
        // SAFETY: a driver's library is made to be loaded by any program.
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
