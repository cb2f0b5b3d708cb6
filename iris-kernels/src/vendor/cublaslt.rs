//! cuBLASLt: products of one device.

#![allow(unsafe_code, reason = "functions of a C library, on memory of the device")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};

use iris_heap::DType;

use super::problem::{Addresses, ByColumns, Problem, Stored};
use super::{Error, Result, find, library};

/// What the library calls an object of its, or the driver a stream.
type Handle = *mut c_void;

/// An algorithm that the library chose: a `cublasLtMatmulHeuristicResult_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Algorithm {
    algorithm: [u64; 8],
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

impl Algorithm {
    const NONE: Algorithm =
        Algorithm { algorithm: [0; 8], workspace: 0, state: 0, waves: 0.0, reserved: [0; 4] };

    /// Bytes of the workspace that it uses.
    pub fn workspace(&self) -> u64 {
        self.workspace as u64
    }
}

library! { Table,
    cublasLtGetVersion() -> usize;
    cublasLtGetStatusName(c_int) -> *const c_char;
    cublasLtCreate(*mut Handle) -> c_int;
    cublasLtDestroy(Handle) -> c_int;
    cublasLtMatmulDescCreate(*mut Handle, c_int, c_int) -> c_int;
    cublasLtMatmulDescSetAttribute(Handle, c_int, *const c_void, usize) -> c_int;
    cublasLtMatmulDescDestroy(Handle) -> c_int;
    cublasLtMatrixLayoutCreate(*mut Handle, c_int, u64, u64, i64) -> c_int;
    cublasLtMatrixLayoutDestroy(Handle) -> c_int;
    cublasLtMatmulPreferenceCreate(*mut Handle) -> c_int;
    cublasLtMatmulPreferenceSetAttribute(Handle, c_int, *const c_void, usize) -> c_int;
    cublasLtMatmulPreferenceDestroy(Handle) -> c_int;
    cublasLtMatmulAlgoGetHeuristic(
        Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut Algorithm, *mut c_int,
    ) -> c_int;
    cublasLtMatmul(
        Handle, Handle, *const c_void, u64, Handle, u64, Handle, *const c_void, u64, Handle, u64,
        Handle, *const Algorithm, u64, usize, Handle,
    ) -> c_int;
}

// What the library's header calls them.
const COMPUTE_32F: c_int = 68;
const R_32F: c_int = 0;
const R_16F: c_int = 2;
const R_16BF: c_int = 14;
const DESC_TRANSA: c_int = 3;
const DESC_TRANSB: c_int = 4;
const DESC_EPILOGUE: c_int = 7;
const DESC_BIAS_POINTER: c_int = 8;
const OP_T: c_int = 1;
const EPILOGUE_BIAS: c_int = 4;
const PREF_MAX_WORKSPACE_BYTES: c_int = 1;
const PREF_REDUCTION_SCHEME_MASK: c_int = 3;
/// No reduction, or one in the type of sums.
const REDUCTION_COMPUTE_TYPE: u32 = 2;
/// Of A, B, C and D, one behind the other.
const PREF_MIN_ALIGNMENT_BYTES: [c_int; 4] = [5, 6, 7, 8];
pub(super) const STATUS_NOT_SUPPORTED: c_int = 15;

impl Table {
    fn check(&self, function: &'static str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: takes any number.
        let name = unsafe { (self.cublasLtGetStatusName)(code) };
        let name = if name.is_null() {
            "unknown".into()
        } else {
            // SAFETY: a string of the library's own, which lives as long as the library.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        };
        Err(Error::Call { function, code, name })
    }
}

/// cuBLASLt, loaded.
pub struct Blas {
    table: Table,
}

impl std::fmt::Debug for Blas {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.title())
    }
}

impl Blas {
    /// The library of this machine, loaded the first time: `IRIS_CUBLASLT`, else where it usually is.
    ///
    /// # Errors
    /// [`Error::NotFound`] says where it was looked for.
    pub fn get() -> Result<Arc<Blas>> {
        static LOADED: OnceLock<Result<Arc<Blas>>> = OnceLock::new();
        LOADED.get_or_init(|| Blas::load(&[]).map(Arc::new)).clone()
    }

    /// The library, first looked for in `folders`.
    ///
    /// # Errors
    /// [`Error::NotFound`] says where it was looked for.
    pub fn load(folders: &[PathBuf]) -> Result<Blas> {
        let open = |file: &Path| {
            // SAFETY: the vendor's library is made to be loaded by any program.
            let library = unsafe { libloading::Library::new(file) };
            library.map_err(|e| e.to_string()).and_then(Table::of)
        };
        let bare = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];
        let wheels = ["nvidia/cu13/lib", "nvidia/cublas/lib", "nvidia/cu12/lib"];
        let names = ("cuBLASLt (libcublasLt.so)", "IRIS_CUBLASLT");
        let table = find(names, folders, &wheels, ("libcublasLt.so", &bare), open)?;
        Ok(Blas { table })
    }

    /// Its name and version: results are the same bits for one of them on one device.
    pub fn title(&self) -> String {
        format!("cuBLASLt {}", self.version())
    }

    /// Its version.
    pub fn version(&self) -> String {
        // SAFETY: a function without arguments.
        let version = unsafe { (self.table.cublasLtGetVersion)() };
        // 13.1.2 is 130102.
        format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
    }
}

/// The library on one device.
pub struct Multiplier {
    blas: Arc<Blas>,
    handle: Handle,
}

// SAFETY: the library's handle may be used by any thread.
unsafe impl Send for Multiplier {}
// SAFETY: as for Send; the library does its own locking.
unsafe impl Sync for Multiplier {}

impl std::fmt::Debug for Multiplier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Multiplier({:?})", self.blas)
    }
}

/// What a call describes to the library: destroyed when dropped.
struct Described<'a> {
    table: &'a Table,
    desc: Handle,
    /// Left, right, result.
    layouts: [Handle; 3],
    seen: ByColumns,
}

impl Multiplier {
    /// On the device whose context is current.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub fn new(blas: &Arc<Blas>) -> Result<Multiplier> {
        let mut handle = null_mut();
        // SAFETY: `handle` is where the answer goes.
        let code = unsafe { (blas.table.cublasLtCreate)(&mut handle) };
        blas.table.check("cublasLtCreate", code)?;
        Ok(Multiplier { blas: blas.clone(), handle })
    }

    /// The library.
    pub fn blas(&self) -> &Arc<Blas> {
        &self.blas
    }

    /// The first `most` algorithms for a problem that the heuristic names, the one it expects to be
    /// fastest first. The context of the device is current.
    ///
    /// # Errors
    /// [`Error::NoAlgorithm`] if there is none; [`Error::Call`].
    pub fn algorithms(&self, problem: &Problem, most: usize) -> Result<Vec<Algorithm>> {
        let none =
            || Error::NoAlgorithm { library: self.blas.title(), problem: problem.to_string() };
        // The bias lies along the rows of what the library sees.
        let odd = problem.bias && problem.c.transposed;
        if odd || problem.shape.contains(&0) {
            return Err(none());
        }
        let table = &self.blas.table;
        // No address is known yet: one that is aligned as all will be.
        let described = Described::new(table, problem, u64::from(problem.alignment))?;
        let preference = Preference::new(table, problem)?;
        let mut found = vec![Algorithm::NONE; most];
        let mut count = 0;
        let [left, right, result] = described.layouts;
        // SAFETY: all handles are alive; there is room for as many answers as are asked for.
        let code = unsafe {
            (table.cublasLtMatmulAlgoGetHeuristic)(
                self.handle,
                described.desc,
                left,
                right,
                result,
                result,
                preference.handle,
                most as c_int,
                found.as_mut_ptr(),
                &mut count,
            )
        };
        if code == STATUS_NOT_SUPPORTED {
            return Err(none());
        }
        table.check("cublasLtMatmulAlgoGetHeuristic", code)?;
        found.truncate(count.max(0) as usize);
        found.retain(|it| it.state == 0 && it.workspace as u64 <= problem.workspace);
        if found.is_empty() { Err(none()) } else { Ok(found) }
    }

    /// Enqueues a product by an algorithm that the heuristic named for it, or for one that differs
    /// only in a larger m or other leading dimensions of the same alignment.
    ///
    /// # Errors
    /// [`Error::Call`].
    ///
    /// # Safety
    /// The context of the device is current and `stream` is a `CUstream` of it. The addresses are
    /// those of matrices of the problem, and of its workspace, on the device; they are multiples of
    /// its alignment, and live until the stream has finished the product, and every replay of a graph
    /// that it is captured in.
    pub unsafe fn enqueue(
        &self,
        problem: &Problem,
        algorithm: &Algorithm,
        at: Addresses,
        stream: u64,
    ) -> Result<()> {
        let table = &self.blas.table;
        let described = Described::new(table, problem, at.bias)?;
        let (one, beta) = (1.0_f32, if problem.accumulates { 1.0_f32 } else { 0.0 });
        let [left, right, result] = described.layouts;
        let (a, b) = if described.seen.swapped { (at.b, at.a) } else { (at.a, at.b) };
        // SAFETY: the caller vouches for the addresses and the stream; the scales are f32, as the
        // description says, and are read before the call returns; all handles are alive.
        let code = unsafe {
            (table.cublasLtMatmul)(
                self.handle,
                described.desc,
                (&raw const one).cast(),
                a,
                left,
                b,
                right,
                (&raw const beta).cast(),
                at.c,
                result,
                at.c,
                result,
                algorithm,
                at.workspace,
                problem.workspace as usize,
                stream as usize as Handle,
            )
        };
        table.check("cublasLtMatmul", code)
    }
}

impl Drop for Multiplier {
    fn drop(&mut self) {
        // SAFETY: the handle is this value's.
        unsafe { (self.blas.table.cublasLtDestroy)(self.handle) };
    }
}

impl<'a> Described<'a> {
    fn new(table: &'a Table, problem: &Problem, bias: u64) -> Result<Described<'a>> {
        let seen = problem.by_columns();
        let mut new = Described { table, desc: null_mut(), layouts: [null_mut(); 3], seen };
        // SAFETY: the first argument is where the answer goes.
        let code = unsafe { (table.cublasLtMatmulDescCreate)(&mut new.desc, COMPUTE_32F, R_32F) };
        table.check("cublasLtMatmulDescCreate", code)?;
        for (attribute, of) in [(DESC_TRANSA, seen.left), (DESC_TRANSB, seen.right)] {
            if of.transpose {
                new.set(attribute, &OP_T)?;
            }
        }
        if problem.bias {
            new.set(DESC_EPILOGUE, &EPILOGUE_BIAS)?;
            new.set(DESC_BIAS_POINTER, &bias)?;
        }
        for (to, of) in new.layouts.iter_mut().zip([seen.left, seen.right, seen.result]) {
            let Stored { dtype, rows, cols, ld, .. } = of;
            let kind = kind(dtype).ok_or_else(|| Error::NoAlgorithm {
                library: "cuBLASLt".into(),
                problem: problem.to_string(),
            })?;
            // SAFETY: the first argument is where the answer goes.
            let code =
                unsafe { (table.cublasLtMatrixLayoutCreate)(to, kind, rows, cols, ld as i64) };
            table.check("cublasLtMatrixLayoutCreate", code)?;
        }
        Ok(new)
    }

    fn set<T>(&self, attribute: c_int, value: &T) -> Result<()> {
        let (at, bytes) = (std::ptr::from_ref(value).cast(), size_of::<T>());
        // SAFETY: the description is alive; the attribute is as long as the value.
        let code =
            unsafe { (self.table.cublasLtMatmulDescSetAttribute)(self.desc, attribute, at, bytes) };
        self.table.check("cublasLtMatmulDescSetAttribute", code)
    }
}

impl Drop for Described<'_> {
    fn drop(&mut self) {
        for layout in self.layouts.into_iter().filter(|it| !it.is_null()) {
            // SAFETY: the handle is this value's.
            unsafe { (self.table.cublasLtMatrixLayoutDestroy)(layout) };
        }
        if !self.desc.is_null() {
            // SAFETY: the handle is this value's.
            unsafe { (self.table.cublasLtMatmulDescDestroy)(self.desc) };
        }
    }
}

/// What the heuristic is asked for.
struct Preference<'a> {
    table: &'a Table,
    handle: Handle,
}

impl<'a> Preference<'a> {
    fn new(table: &'a Table, problem: &Problem) -> Result<Preference<'a>> {
        let mut new = Preference { table, handle: null_mut() };
        // SAFETY: the argument is where the answer goes.
        let code = unsafe { (table.cublasLtMatmulPreferenceCreate)(&mut new.handle) };
        table.check("cublasLtMatmulPreferenceCreate", code)?;
        new.set(PREF_MAX_WORKSPACE_BYTES, &problem.workspace)?;
        if problem.rounds_once {
            new.set(PREF_REDUCTION_SCHEME_MASK, &REDUCTION_COMPUTE_TYPE)?;
        }
        for attribute in PREF_MIN_ALIGNMENT_BYTES {
            new.set(attribute, &problem.alignment)?;
        }
        Ok(new)
    }

    fn set<T>(&self, attribute: c_int, value: &T) -> Result<()> {
        let (at, bytes) = (std::ptr::from_ref(value).cast(), size_of::<T>());
        // SAFETY: the preference is alive; the attribute is as long as the value.
        let code = unsafe {
            (self.table.cublasLtMatmulPreferenceSetAttribute)(self.handle, attribute, at, bytes)
        };
        self.table.check("cublasLtMatmulPreferenceSetAttribute", code)
    }
}

impl Drop for Preference<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle is this value's.
        unsafe { (self.table.cublasLtMatmulPreferenceDestroy)(self.handle) };
    }
}

/// The library's number of an element type, of those that it is asked for.
fn kind(dtype: DType) -> Option<c_int> {
    match dtype {
        DType::F32 => Some(R_32F),
        DType::F16 => Some(R_16F),
        DType::BF16 => Some(R_16BF),
        _ => None,
    }
}

/// A product with its algorithm, to be enqueued any number of times.
#[derive(Debug)]
pub struct Product {
    of: Arc<Multiplier>,
    problem: Problem,
    algorithm: Algorithm,
}

impl Product {
    /// By the first algorithm of the heuristic. The context of the device is current.
    ///
    /// # Errors
    /// As [`Multiplier::algorithms`].
    pub fn new(of: &Arc<Multiplier>, problem: Problem) -> Result<Product> {
        let algorithm = of.algorithms(&problem, 1)?[0];
        Ok(Product { of: of.clone(), problem, algorithm })
    }

    /// By each of the first algorithms of the heuristic, at most so many: for whoever times them.
    ///
    /// # Errors
    /// As [`Multiplier::algorithms`].
    pub fn all(of: &Arc<Multiplier>, problem: Problem, most: usize) -> Result<Vec<Product>> {
        let product = |algorithm| Product { of: of.clone(), problem, algorithm };
        Ok(of.algorithms(&problem, most)?.into_iter().map(product).collect())
    }

    /// What it multiplies.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Enqueues it.
    ///
    /// # Errors
    /// [`Error::Call`].
    ///
    /// # Safety
    /// As for [`Multiplier::enqueue`].
    pub unsafe fn enqueue(&self, at: Addresses, stream: u64) -> Result<()> {
        // SAFETY: the caller vouches for it.
        unsafe { self.of.enqueue(&self.problem, &self.algorithm, at, stream) }
    }
}
