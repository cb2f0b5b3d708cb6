//! Vendor's GEMM library, cuBLASLt or hipBLASLt: loading, heuristics and calls.

#![allow(unsafe_code, reason = "functions of a C library, on memory of the device")]

use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

use iris_heap::DType;

use super::dialect::{Dialect, Handle, Version, VersionApi};
use super::problem::{Addresses, Problem, Stored};
use super::{Error, Result, find, library, open};

/// Algorithm that the library's heuristic chose: opaque data in the library's format, and the
/// number of bytes of workspace that the algorithm needs.
#[derive(Clone, Copy, Debug)]
pub struct Algorithm {
    words: [u64; Algorithm::MOST],
    workspace: u64,
}

impl Algorithm {
    /// Largest number of 64-bit words that any library's algorithm format has.
    pub(super) const MOST: usize = 8;
    /// Number of 64-bit words that follow the algorithm in an answer of the heuristic. They contain
    /// the bytes of workspace, the state, the number of waves, and four reserved 32-bit words.
    pub(super) const BEHIND: usize = 4;

    /// Reads the algorithm from an answer of the heuristic; `None` if the answer reports an error.
    fn of(answer: &[u64]) -> Option<Algorithm> {
        let (algorithm, behind) = answer.split_at(answer.len() - Self::BEHIND);
        let mut words = [0; Self::MOST];
        words[..algorithm.len()].copy_from_slice(algorithm);
        let state = behind[1] as u32;
        (state == 0).then_some(Algorithm { words, workspace: behind[0] })
    }

    /// Bytes of workspace that the algorithm uses.
    pub fn workspace(&self) -> u64 {
        self.workspace
    }
}

library! { Table,
    Create(*mut Handle) -> c_int;
    Destroy(Handle) -> c_int;
    MatmulDescCreate(*mut Handle, c_int, c_int) -> c_int;
    MatmulDescSetAttribute(Handle, c_int, *const c_void, usize) -> c_int;
    MatmulDescDestroy(Handle) -> c_int;
    MatrixLayoutCreate(*mut Handle, c_int, u64, u64, i64) -> c_int;
    MatrixLayoutDestroy(Handle) -> c_int;
    MatmulPreferenceCreate(*mut Handle) -> c_int;
    MatmulPreferenceSetAttribute(Handle, c_int, *const c_void, usize) -> c_int;
    MatmulPreferenceDestroy(Handle) -> c_int;
    MatmulAlgoGetHeuristic(
        Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut u64, *mut c_int,
    ) -> c_int;
    Matmul(
        Handle, Handle, *const c_void, u64, Handle, u64, Handle, *const c_void, u64, Handle, u64,
        Handle, *const u64, u64, usize, Handle,
    ) -> c_int;
}

/// Vendor's GEMM library, loaded into this process.
pub struct Blas {
    table: Table,
    version_api: VersionApi,
    dialect: Dialect,
    path: PathBuf,
}

impl std::fmt::Debug for Blas {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.dialect.name, self.path.display())
    }
}

impl Blas {
    /// Loads the library, searching `folders` first.
    ///
    /// # Errors
    /// [`Error::NotFound`] with the places that were searched.
    pub fn load(dialect: &Dialect, folders: &[PathBuf]) -> Result<Blas> {
        let load = |file: &Path| {
            let table = Table::of(open(file)?, dialect.prefix)?;
            let version_api = (dialect.version_api)(open(file)?)?;
            Ok(Blas { table, version_api, dialect: *dialect, path: file.to_owned() })
        };
        let Dialect { what, variable, file, bare, .. } = *dialect;
        let usual = (dialect.folders)();
        find((what, variable), &[folders, &usual].concat(), (file, bare), load)
    }

    /// Name of the library, without a version.
    pub fn name(&self) -> &'static str {
        self.dialect.name
    }

    /// Version of the library. hipBLASLt reports its version only through a handle, so a device
    /// must be current.
    ///
    /// # Errors
    /// Errors of [`Multiplier::new`].
    pub fn version(self: &Arc<Self>) -> Result<String> {
        match &self.version_api {
            VersionApi::Global(table) => Ok(table.version().to_string()),
            VersionApi::ByHandle(_) => Ok(Multiplier::new(self)?.version.to_string()),
        }
    }

    /// Path of the file from which the library was loaded, or its bare name if the system's loader
    /// found it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn check(&self, function: &'static str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let function = format!("{}{function}", self.dialect.prefix);
        Err(Error::Call { function, code, name: self.version_api.name_of(code) })
    }
}

/// GEMM library together with its handle for one device.
pub struct Multiplier {
    blas: Arc<Blas>,
    handle: Handle,
    version: Version,
}

// SAFETY: the library allows its handle to be used by any thread.
unsafe impl Send for Multiplier {}
// SAFETY: any thread may use the handle, and the library does its own locking.
unsafe impl Sync for Multiplier {}

impl std::fmt::Debug for Multiplier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Multiplier({:?} {})", self.blas, self.version)
    }
}

/// Descriptors that the library made for a product and its matrices, destroyed on drop.
struct Described {
    blas: Arc<Blas>,
    desc: Handle,
    /// Layouts of the left factor, the right factor, the result, and the addend.
    layouts: [Handle; 4],
    /// Whether A and B are swapped: the library sees a row-major C as its transpose, so its left
    /// factor is B.
    swapped: bool,
}

// SAFETY: the descriptors are memory of this process that belongs to no thread.
unsafe impl Send for Described {}

impl Multiplier {
    /// Makes a handle on the current device.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub fn new(blas: &Arc<Blas>) -> Result<Multiplier> {
        let mut handle = null_mut();
        // SAFETY: `handle` is a valid place, into which the library writes the new handle.
        blas.check("Create", unsafe { (blas.table.Create)(&mut handle) })?;
        let oldest = blas.dialect.oldest;
        let mut new = Multiplier { blas: blas.clone(), handle, version: oldest };
        match blas.version_api.version(handle) {
            Ok(version) => new.version = version,
            Err(code) => blas.check("GetVersion", code)?,
        }
        if new.version < oldest {
            return Err(Error::TooOld { library: new.title(), oldest: oldest.to_string() });
        }
        Ok(new)
    }

    /// Library to which the handle belongs.
    pub fn blas(&self) -> &Arc<Blas> {
        &self.blas
    }

    /// Version of the library.
    pub fn version(&self) -> String {
        self.version.to_string()
    }

    /// Name and version of the library. Together with the device, they determine the bits of
    /// results.
    pub fn title(&self) -> String {
        format!("{} {}", self.blas.name(), self.version)
    }

    pub(super) fn dialect(&self) -> &Dialect {
        &self.blas.dialect
    }

    /// Returns up to `most` algorithms that the heuristic suggests for a problem, best first. The
    /// device must be current.
    ///
    /// # Errors
    /// [`Error::NoAlgorithm`] if there is none; [`Error::Call`].
    pub fn algorithms(&self, problem: &Problem, most: usize) -> Result<Vec<Algorithm>> {
        let none = || Error::NoAlgorithm { library: self.title(), problem: problem.to_string() };
        // The library sees a row-major C transposed and adds the bias along the rows of that view.
        // So it cannot add a bias to a column-major C.
        let odd = problem.bias && problem.c.transposed;
        let types = [problem.a, problem.b, problem.c].map(|it| (self.dialect().kind)(it.dtype));
        if odd || types.contains(&None) || problem.shape.contains(&0) {
            return Err(none());
        }
        let blas = &self.blas;
        // The address of the bias is not known yet. The alignment itself is passed as an address,
        // because it has the guaranteed alignment and no larger one.
        let described = Described::new(blas, problem, u64::from(problem.alignment))?;
        let preference = Preference::new(blas, problem)?;
        let answer = blas.dialect.algorithm_words + Algorithm::BEHIND;
        let mut found = vec![0; most * answer];
        let mut count = 0;
        let [left, right, result, _] = described.layouts;
        // The factor by which the addend is scaled is not part of the query, but the addend's
        // layout is. SAFETY: all handles are alive; the buffer has room for the requested number of
        // answers.
        let code = unsafe {
            (blas.table.MatmulAlgoGetHeuristic)(
                self.handle,
                described.desc,
                left,
                right,
                described.addend(),
                result,
                preference.handle,
                most as c_int,
                found.as_mut_ptr(),
                &mut count,
            )
        };
        if code == blas.dialect.not_supported || Some(code) == blas.dialect.no_kernels {
            return Err(none());
        }
        blas.check("MatmulAlgoGetHeuristic", code)?;
        let answers = found.chunks(answer).take(count.max(0) as usize);
        let mut found: Vec<Algorithm> = answers.filter_map(Algorithm::of).collect();
        found.retain(|it| it.workspace <= problem.workspace);
        if found.is_empty() { Err(none()) } else { Ok(found) }
    }
}

impl Drop for Multiplier {
    fn drop(&mut self) {
        // SAFETY: `Multiplier` owns the handle, and nothing uses it after the drop.
        unsafe { (self.blas.table.Destroy)(self.handle) };
    }
}

impl Described {
    fn new(blas: &Arc<Blas>, problem: &Problem, bias: u64) -> Result<Described> {
        let (table, dialect) = (&blas.table, &blas.dialect);
        let seen = problem.by_columns();
        let (of, layouts, swapped) = (blas.clone(), [null_mut(); 4], seen.swapped);
        let mut new = Described { blas: of, desc: null_mut(), layouts, swapped };
        let kind = |dtype| {
            let (library, problem) = (dialect.name.into(), problem.to_string());
            (dialect.kind)(dtype).ok_or(Error::NoAlgorithm { library, problem })
        };
        let sums = (dialect.compute_f32, kind(DType::F32)?);
        // SAFETY: `new.desc` is a valid place, into which the library writes the new descriptor.
        let code = unsafe { (table.MatmulDescCreate)(&mut new.desc, sums.0, sums.1) };
        blas.check("MatmulDescCreate", code)?;
        let [of_left, of_right] = dialect.desc_transposes;
        for (attribute, of) in [(of_left, seen.left), (of_right, seen.right)] {
            if of.transpose {
                new.set(attribute, &dialect.transpose)?;
            }
        }
        if problem.bias {
            new.set(dialect.desc_epilogue, &dialect.epilogue_bias)?;
            new.set_bias(bias)?;
            if let Some(attribute) = dialect.desc_bias_type {
                new.set(attribute, &kind(problem.c.dtype)?)?;
            }
        }
        let stored = [seen.left, seen.right, seen.result].into_iter().chain(seen.addend);
        for (to, of) in new.layouts.iter_mut().zip(stored) {
            let Stored { dtype, rows, cols, ld, .. } = of;
            let kind = kind(dtype)?;
            // SAFETY: `to` is a valid place, into which the library writes the new layout.
            let code = unsafe { (table.MatrixLayoutCreate)(to, kind, rows, cols, ld as i64) };
            blas.check("MatrixLayoutCreate", code)?;
        }
        Ok(new)
    }

    /// Layout of the addend; without an addend, the layout of the result.
    fn addend(&self) -> Handle {
        let [_, _, result, addend] = self.layouts;
        if addend.is_null() { result } else { addend }
    }

    /// Writes the address of the bias into the descriptor of a product that has a bias.
    fn set_bias(&self, address: u64) -> Result<()> {
        self.set(self.blas.dialect.desc_bias, &address)
    }

    fn set<T>(&self, attribute: c_int, value: &T) -> Result<()> {
        let (at, bytes) = (std::ptr::from_ref(value).cast(), size_of::<T>());
        let set = self.blas.table.MatmulDescSetAttribute;
        // SAFETY: the descriptor is alive; the value has the size that the attribute requires.
        let code = unsafe { set(self.desc, attribute, at, bytes) };
        self.blas.check("MatmulDescSetAttribute", code)
    }
}

impl Drop for Described {
    fn drop(&mut self) {
        for layout in self.layouts.into_iter().filter(|it| !it.is_null()) {
            // SAFETY: `Described` owns the layout, and nothing uses it after the drop.
            unsafe { (self.blas.table.MatrixLayoutDestroy)(layout) };
        }
        if !self.desc.is_null() {
            // SAFETY: `Described` owns the descriptor, and nothing uses it after the drop.
            unsafe { (self.blas.table.MatmulDescDestroy)(self.desc) };
        }
    }
}

/// Limits for a query of the library's heuristic, such as the bytes of workspace.
struct Preference<'a> {
    blas: &'a Blas,
    handle: Handle,
}

impl<'a> Preference<'a> {
    fn new(blas: &'a Blas, problem: &Problem) -> Result<Preference<'a>> {
        let mut new = Preference { blas, handle: null_mut() };
        // SAFETY: `new.handle` is a valid place, into which the library writes the new preference.
        let code = unsafe { (blas.table.MatmulPreferenceCreate)(&mut new.handle) };
        blas.check("MatmulPreferenceCreate", code)?;
        new.set(blas.dialect.pref_workspace, &problem.workspace)?;
        if let Some((attribute, scheme)) = blas.dialect.pref_reduction
            && problem.rounds_once
        {
            new.set(attribute, &scheme)?;
        }
        for attribute in blas.dialect.pref_alignment.into_iter().flatten() {
            new.set(attribute, &problem.alignment)?;
        }
        Ok(new)
    }

    fn set<T>(&self, attribute: c_int, value: &T) -> Result<()> {
        let (at, bytes) = (std::ptr::from_ref(value).cast(), size_of::<T>());
        let set = self.blas.table.MatmulPreferenceSetAttribute;
        // SAFETY: the preference is alive; the value has the size that the attribute requires.
        let code = unsafe { set(self.handle, attribute, at, bytes) };
        self.blas.check("MatmulPreferenceSetAttribute", code)
    }
}

impl Drop for Preference<'_> {
    fn drop(&mut self) {
        // SAFETY: `Preference` owns its handle, and nothing uses it after the drop.
        unsafe { (self.blas.table.MatmulPreferenceDestroy)(self.handle) };
    }
}

/// Matrix product with its algorithm, described to the library once and enqueued any number of
/// times.
pub struct Product {
    /// Descriptors of the product and its matrices. A call holds the lock while it sets the address
    /// of the bias and enqueues the product.
    described: Mutex<Described>,
    of: Arc<Multiplier>,
    problem: Problem,
    algorithm: Algorithm,
}

impl std::fmt::Debug for Product {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Product({} by {:?})", self.problem, self.of)
    }
}

impl Product {
    /// Makes a product with the first algorithm that the heuristic suggests. The device must be
    /// current.
    ///
    /// # Errors
    /// Errors of [`Multiplier::algorithms`].
    pub fn new(of: &Arc<Multiplier>, problem: Problem) -> Result<Product> {
        let algorithm = of.algorithms(&problem, 1)?[0];
        Product::by(algorithm, of, problem)
    }

    /// Makes a product with an algorithm that the heuristic named for this problem. If the library
    /// rejects unsuitable algorithms (cuBLASLt), the algorithm may also be one that was named for a
    /// problem with a larger m, or with other leading dimensions of the same alignment.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub(super) fn by(
        algorithm: Algorithm,
        of: &Arc<Multiplier>,
        problem: Problem,
    ) -> Result<Product> {
        let described = Mutex::new(Described::new(&of.blas, &problem, 0)?);
        Ok(Product { described, of: of.clone(), problem, algorithm })
    }

    /// Makes one product for each of the first `most` algorithms of the heuristic, so that the
    /// algorithms can be timed.
    ///
    /// # Errors
    /// Errors of [`Multiplier::algorithms`].
    pub fn all(of: &Arc<Multiplier>, problem: Problem, most: usize) -> Result<Vec<Product>> {
        let algorithms = of.algorithms(&problem, most)?;
        algorithms.into_iter().map(|algorithm| Product::by(algorithm, of, problem)).collect()
    }

    /// Problem for which the product was prepared.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Enqueues the product. The call creates and allocates nothing unless the library fails.
    ///
    /// # Errors
    /// [`Error::Call`].
    ///
    /// # Safety
    /// The device must be current, and `stream` one of its streams, as the driver's handle. The
    /// addresses must be device addresses of the problem's matrices and workspace, with the
    /// problem's alignment, and stay valid until the stream has finished the product and every
    /// replay of a graph that captures the product. An addend is either C itself, with C's leading
    /// dimension, or does not overlap C.
    pub unsafe fn enqueue(&self, at: Addresses, stream: u64) -> Result<()> {
        let Product { of, problem, algorithm, .. } = self;
        let described = self.described.lock().unwrap_or_else(PoisonError::into_inner);
        if problem.bias {
            described.set_bias(at.bias)?;
        }
        let one = 1.0_f32;
        let (beta, addend) = problem.addend.map_or((0.0_f32, at.c), |_| (one, at.addend));
        let [left, right, result, _] = described.layouts;
        let (a, b) = if described.swapped { (at.b, at.a) } else { (at.a, at.b) };
        // SAFETY: the caller guarantees that the addresses are valid and the stream is alive; the
        // scale factors are f32, as described, and are read before the call returns; all handles
        // are alive.
        let code = unsafe {
            (of.blas.table.Matmul)(
                of.handle,
                described.desc,
                (&raw const one).cast(),
                a,
                left,
                b,
                right,
                (&raw const beta).cast(),
                addend,
                described.addend(),
                at.c,
                result,
                algorithm.words.as_ptr(),
                at.workspace,
                problem.workspace as usize,
                stream as usize as Handle,
            )
        };
        of.blas.check("Matmul", code)
    }
}
