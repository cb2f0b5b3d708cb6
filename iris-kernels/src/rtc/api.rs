//! Table of the functions that NVRTC and hiprtc have in common, loaded by name.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use super::search::{self, library};
use super::{Error, KernelSource, Result};

/// Names by which the compiler library of one vendor and its functions are found.
pub(super) struct Names {
    pub(super) what: &'static str,
    /// Start of the names of all functions.
    pub(super) prefix: &'static str,
    /// Name, without the prefix, of the function that returns machine code.
    pub(super) code: &'static str,
    /// Name, without the prefix, of the function that returns PTX; `None` if there is no such
    /// function.
    pub(super) text: Option<&'static str>,
}

type Program = *mut c_void;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Bytes = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

library! { Table,
    CreateProgram(
        *mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
    ) -> c_int;
    DestroyProgram(*mut Program) -> c_int;
    CompileProgram(Program, c_int, *const *const c_char) -> c_int;
    Version(*mut c_int, *mut c_int) -> c_int;
    GetErrorString(c_int) -> *const c_char;
}

/// Pair of functions for one output of a compilation. One function returns the size of the output,
/// the other copies the bytes of the output.
#[derive(Clone, Copy, Debug)]
struct Output {
    name: &'static str,
    size: Size,
    bytes: Bytes,
}

/// Output of one compilation: machine code, and PTX if the compiler makes it.
pub(super) struct Compiled {
    /// PTX text; empty unless the compiler is NVRTC.
    pub(super) text: Vec<u8>,
    /// Machine code; empty for a virtual architecture of NVIDIA (`compute_..`).
    pub(super) code: Vec<u8>,
}

/// Loaded compiler library (NVRTC or hiprtc), with its functions.
pub(super) struct Api {
    path: PathBuf,
    prefix: &'static str,
    table: Table,
    log: Output,
    code: Output,
    text: Option<Output>,
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Api({})", self.path.display())
    }
}

impl Api {
    /// Finds the compiler library: at the path that the environment variable `variable` gives,
    /// otherwise in `folders`, otherwise by its bare name on the loader's path. Files in the
    /// library's folder for whose names `before` returns true are loaded before the library.
    pub(super) fn find(
        names: &Names,
        variable: &str,
        folders: &[PathBuf],
        bare: &[&str],
        is_library: impl Fn(&str) -> bool,
        before: impl Fn(&str) -> bool,
    ) -> Result<Self> {
        let open = |file: &Path| Self::open(names, file, &before);
        search::first(variable, folders, bare, is_library, open)
            .map_err(|looked| Error::NotFound { what: names.what, looked })
    }

    fn open(
        names: &Names,
        file: &Path,
        before: impl Fn(&str) -> bool,
    ) -> std::result::Result<Self, String> {
        let text_of = |error: libloading::Error| error.to_string();
        let mut others = Vec::new();
        for file in file.parent().map(|folder| search::named(folder, before)).unwrap_or_default() {
            // SAFETY: this file is part of the compiler and lies in its folder; the compiler itself
            // would load it in the same way.
            let other = unsafe { Library::open(Some(&file), RTLD_NOW | RTLD_GLOBAL) };
            others.push(other.map_err(text_of)?);
        }
        // SAFETY: this is the vendor's library, which has no special requirements for loading.
        let library = unsafe { Library::open(Some(file), RTLD_NOW) }.map_err(text_of)?.into();
        let output = |name: &'static str| {
            let full = format!("{}{name}", names.prefix);
            // SAFETY: these are the types in the vendors' headers.
            let size = unsafe { search::function::<Size>(&library, &format!("{full}Size")) }?;
            // SAFETY: as above.
            let bytes = unsafe { search::function::<Bytes>(&library, &full) }?;
            Ok::<_, String>(Output { name, size, bytes })
        };
        let (log, code) = (output("GetProgramLog")?, output(names.code)?);
        let text = names.text.map(output).transpose()?;
        let table = Table::of(library, names.prefix)?;
        // The libraries that were loaded before the compiler must also stay loaded.
        std::mem::forget(others);
        Ok(Self { path: file.to_path_buf(), prefix: names.prefix, table, log, code, text })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn version(&self) -> Result<(i32, i32)> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers refer to integers that receive the answer.
        let code = unsafe { (self.table.Version)(&mut major, &mut minor) };
        self.check("Version", code)?;
        Ok((major, minor))
    }

    /// Compiles a source with the given options; the source may include `headers`.
    pub(super) fn compile(
        &self,
        source: KernelSource<'_>,
        headers: &[KernelSource<'_>],
        options: &[String],
        arch: &str,
    ) -> Result<Compiled> {
        let program = self.create(source, headers)?;
        let options = c_strings(options.iter().map(String::as_str), "an option")?;
        let pointers = pointers(&options);
        // SAFETY: the program object is live, and the array has as many strings as the length says.
        let code = unsafe {
            (self.table.CompileProgram)(program.program, pointers.len() as c_int, pointers.as_ptr())
        };
        if code != 0 {
            let mut log = self.output(&program, self.log).unwrap_or_default();
            log.retain(|&byte| byte != 0);
            let log = String::from_utf8_lossy(&log).trim_end().to_string();
            let name = self.error_name(code);
            return Err(Error::Compile {
                source_name: source.name.into(),
                arch: arch.into(),
                log: if log.is_empty() { name } else { log },
            });
        }
        let mut text = self.text.map_or(Ok(Vec::new()), |text| self.output(&program, text))?;
        // Remove the zero byte that ends the PTX text.
        text.pop();
        Ok(Compiled { text, code: self.output(&program, self.code)? })
    }

    fn create(&self, source: KernelSource<'_>, headers: &[KernelSource<'_>]) -> Result<Handle<'_>> {
        let text = c_string(source.text, source.name)?;
        let name = c_string(source.name, "the name of a source")?;
        let bodies = c_strings(headers.iter().map(|header| header.text), "a header")?;
        let names = c_strings(headers.iter().map(|header| header.name), "the name of a header")?;
        let (bodies, names) = (pointers(&bodies), pointers(&names));
        let mut program = ptr::null_mut();
        // SAFETY: all strings live until the call returns, and the library copies them; both arrays
        // have the length that is passed.
        let code = unsafe {
            (self.table.CreateProgram)(
                &mut program,
                text.as_ptr(),
                name.as_ptr(),
                headers.len() as c_int,
                bodies.as_ptr(),
                names.as_ptr(),
            )
        };
        self.check("CreateProgram", code)?;
        Ok(Handle { program, api: self })
    }

    fn output(&self, program: &Handle<'_>, output: Output) -> Result<Vec<u8>> {
        let mut size = 0;
        // SAFETY: the program object is live, and `size` receives the number of bytes.
        let code = unsafe { (output.size)(program.program, &mut size) };
        self.check(output.name, code)?;
        if size == 0 {
            return Ok(Vec::new());
        }
        let mut bytes = vec![0_u8; size];
        // SAFETY: `bytes` has room for the size that the library has just returned.
        let code = unsafe { (output.bytes)(program.program, bytes.as_mut_ptr().cast()) };
        self.check(output.name, code)?;
        Ok(bytes)
    }

    fn check(&self, function: &str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let function = format!("{}{function}", self.prefix);
        Err(Error::Call { function, code, name: self.error_name(code) })
    }

    fn error_name(&self, code: c_int) -> String {
        // SAFETY: the library returns the name of an error for any code.
        let name = unsafe { (self.table.GetErrorString)(code) };
        if name.is_null() {
            return "unknown".into();
        }
        // SAFETY: the library returns a string that lives as long as the library.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}

/// Program object that the compiler library made. It is destroyed when this handle is dropped.
struct Handle<'a> {
    program: Program,
    api: &'a Api,
}

impl Drop for Handle<'_> {
    fn drop(&mut self) {
        // SAFETY: the program is live and not used afterwards. A failure is ignored, because a
        // destructor cannot return an error.
        let _ = unsafe { (self.api.table.DestroyProgram)(&mut self.program) };
    }
}

pub(super) fn c_string(text: &str, what: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::ZeroByte { what: what.into() })
}

fn c_strings<'a>(texts: impl Iterator<Item = &'a str>, what: &str) -> Result<Vec<CString>> {
    texts.map(|text| c_string(text, what)).collect()
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|string| string.as_ptr()).collect()
}
