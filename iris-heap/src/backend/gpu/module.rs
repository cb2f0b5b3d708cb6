//! Compiled kernels on a GPU: loading, occupancy, launching.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, OnceLock};

use super::driver::{Driver, RawFunction, RawModule};
use super::stream::GpuStream;
use crate::backend::{BackendKind, LaunchOrder, LaunchShape, StreamBackend};
use crate::encoding::hash;
use crate::error::{Error, Result};
use crate::util::lock;

/// Loaded image of kernels. It stays loaded until the process ends, because unloading would wait
/// for the whole device, and the next op of the same kind needs it again.
#[derive(Clone)]
pub(crate) struct GpuModule(Arc<Loaded>);

struct Loaded {
    device: Arc<dyn Driver>,
    raw: RawModule,
}

/// Kernel of a loaded image.
#[derive(Clone)]
pub(crate) struct GpuFunction {
    module: Arc<Loaded>,
    raw: RawFunction,
    name: Arc<str>,
}

impl GpuModule {
    /// Loads an image once per process and device; later calls with an equal image return the
    /// loaded one.
    pub(crate) fn load(device: &Arc<dyn Driver>, image: &[u8]) -> Result<GpuModule> {
        type Key = (BackendKind, i32, u128);
        static LOADED: OnceLock<Mutex<HashMap<Key, Arc<Loaded>>>> = OnceLock::new();
        let key = (device.kind(), device.ordinal(), hash(&[image]));
        let mut loaded = lock(LOADED.get_or_init(Mutex::default));
        if let Some(module) = loaded.get(&key) {
            return Ok(GpuModule(module.clone()));
        }
        let raw = device.load(image)?;
        let module = Arc::new(Loaded { device: device.clone(), raw });
        loaded.insert(key, module.clone());
        Ok(GpuModule(module))
    }

    /// See [`crate::Module::function`].
    pub(crate) fn function(&self, name: &str, shared_bytes: u32) -> Result<GpuFunction> {
        let text = CString::new(name)
            .map_err(|_| Error::invalid("name of a kernel", name, "a name without zero bytes"))?;
        let Loaded { device, raw } = &*self.0;
        // SAFETY: the module is alive, because it is never unloaded.
        let raw = unsafe { device.function(*raw, &text, shared_bytes) }?;
        Ok(GpuFunction { module: self.0.clone(), raw, name: name.into() })
    }
}

impl GpuFunction {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// See [`crate::Function::resources`].
    pub(crate) fn resources(&self) -> Result<(u32, u32)> {
        // SAFETY: the function is alive, because its module is never unloaded.
        unsafe { self.module.device.resources(self.raw) }
    }

    /// See [`crate::Function::resident`].
    pub(crate) fn max_coresident_workgroups(&self, threads: u32, shared_bytes: u32) -> Result<u32> {
        let device = &self.module.device;
        // SAFETY: the function is alive, because its module is never unloaded.
        let each = unsafe { device.resident(self.raw, threads, shared_bytes) }?;
        Ok(each * device.multiprocessors())
    }

    /// See [`crate::Function::resident_clusters`].
    pub(crate) fn resident_clusters(&self, shape: LaunchShape, cluster: u32) -> Result<u32> {
        // SAFETY: the function is alive, because its module is never unloaded.
        unsafe { self.module.device.resident_clusters(self.raw, shape, cluster) }
    }

    /// Enqueues a launch on a stream of the heap for which the code was loaded.
    ///
    /// # Errors
    /// [`Error::Closed`]; errors of the device.
    ///
    /// # Safety
    /// The contract of [`crate::Function::launch`] or of [`crate::Function::launch_concurrent`],
    /// depending on `order`.
    pub(crate) unsafe fn launch(
        &self,
        stream: &dyn StreamBackend,
        order: LaunchOrder,
        shape: LaunchShape,
        args: &[&[u8]],
    ) -> Result<()> {
        let queue = GpuStream::of(stream)?;
        // Number of kernel parameters up to which a launch allocates nothing on the Rust heap; most
        // kernels have fewer.
        const USUAL: usize = 12;
        let (mut few, mut many) = ([null_mut(); USUAL], Vec::new());
        let params = match few.get_mut(..args.len()) {
            Some(few) => few,
            None => {
                many.resize(args.len(), null_mut());
                &mut many[..]
            }
        };
        for (param, bytes) in params.iter_mut().zip(args) {
            *param = bytes.as_ptr().cast_mut().cast::<c_void>();
        }
        let device = &self.module.device;
        let launch = || {
            // SAFETY: the caller guarantees that the parameters match the kernel; stream and
            // function are alive and belong to one context.
            unsafe { device.launch(self.raw, &self.name, shape, params, queue.raw()) }
        };
        match order {
            LaunchOrder::Op => queue.in_order(launch),
            LaunchOrder::Beside => queue.beside(launch),
            LaunchOrder::Stream => queue.in_stream(launch),
        }
    }
}
