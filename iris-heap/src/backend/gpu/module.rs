//! Compiled kernels: loading, how many workgroups fit, launching.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use super::driver::{Driver, LaunchShape, RawFunction, RawModule};
use super::stream::{GpuStream, Queue, Shared};
use crate::error::{Error, Result};
use crate::stream::Stream;
use crate::util::lock;
use crate::util::unsupported;
use crate::wire::hash;

/// A loaded image of kernels, kept until the process ends: giving it back would wait for the whole
/// device, and the next op of the same kind needs it again. Its kernels run on streams of the heap
/// that asked for it.
#[derive(Clone)]
pub struct Module {
    inner: Arc<Loaded>,
    heap: Weak<Shared>,
}

struct Loaded {
    device: Arc<dyn Driver>,
    raw: RawModule,
}

/// A kernel of a module.
#[derive(Clone)]
pub struct Function {
    module: Arc<Loaded>,
    heap: Weak<Shared>,
    raw: RawFunction,
    name: Arc<str>,
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Module({:#x} of {})", self.inner.raw.0, self.inner.device.title())
    }
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Function({} of {})", self.name, self.module.device.title())
    }
}

impl Loaded {
    /// Loads an image, once a process and device.
    fn get(device: &Arc<dyn Driver>, image: &[u8]) -> Result<Arc<Loaded>> {
        type Key = (i32, u128);
        static LOADED: OnceLock<Mutex<HashMap<Key, Arc<Loaded>>>> = OnceLock::new();
        let elf = image.starts_with(b"\x7fELF");
        if !elf && image.last() != Some(&0) {
            let expected = "a cubin, or PTX that ends with a zero byte";
            return Err(Error::invalid("image of a module", "something else", expected));
        }
        let key = (device.ordinal(), hash(&[image]));
        let mut loaded = lock(LOADED.get_or_init(Mutex::default));
        if let Some(module) = loaded.get(&key) {
            return Ok(module.clone());
        }
        // SAFETY: the image is of a kind whose end the driver finds.
        let raw = unsafe { device.load(image) }?;
        let module = Arc::new(Loaded { device: device.clone(), raw });
        loaded.insert(key, module.clone());
        Ok(module)
    }
}

impl Module {
    /// Loads an image (cubin, or PTX that ends with a zero byte) for a heap.
    pub(crate) fn load(heap: &Arc<Shared>, image: &[u8]) -> Result<Module> {
        let inner = Loaded::get(&heap.device, image)?;
        Ok(Module { inner, heap: Arc::downgrade(heap) })
    }

    /// The kernel of this name, loaded now and not at its first launch, with `shared_bytes` of
    /// dynamic shared memory allowed.
    ///
    /// # Errors
    /// [`Error::Device`] if there is none, or if it cannot have that much.
    pub fn function(&self, name: &str, shared_bytes: u32) -> Result<Function> {
        let text = CString::new(name)
            .map_err(|_| Error::invalid("name of a kernel", name, "a name without zero bytes"))?;
        // SAFETY: the module is alive.
        let raw = unsafe { self.inner.device.function(self.inner.raw, &text, shared_bytes) }?;
        let (module, heap) = (self.inner.clone(), self.heap.clone());
        Ok(Function { module, heap, raw, name: name.into() })
    }
}

impl Function {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Registers a thread, and bytes of local memory a thread: more than none are spills or arrays.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn resources(&self) -> Result<(u32, u32)> {
        // SAFETY: the function is alive.
        unsafe { self.module.device.resources(self.raw) }
    }

    /// Workgroups of this size that run at the same time on the whole device, if nothing else does.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn resident(&self, threads: u32, shared_bytes: u32) -> Result<u32> {
        let device = &self.module.device;
        // SAFETY: the function is alive.
        let each = unsafe { device.resident(self.raw, threads, shared_bytes) }?;
        Ok(each * device.multiprocessors())
    }

    /// Enqueues a launch behind the heap's last op, on whatever stream that was; the next op waits
    /// for it. The stream is of the heap that the module was loaded for: another heap would neither
    /// order the launch with these ops nor wait for it.
    ///
    /// # Errors
    /// [`Error::Closed`]; [`Error::Unsupported`] for a stream of another kind of device;
    /// [`Error::Invalid`] for one of another heap; [`Error::Device`].
    ///
    /// # Safety
    /// `args` are the bytes of the kernel's parameters, in order and each as long as the kernel has
    /// it. What the kernel accesses through them stays valid until the stream has finished the
    /// launch, and so does every replay of a graph that the launch is captured in. Workgroups that
    /// wait for each other or for other ranks all fit the device at the same time.
    pub unsafe fn launch(&self, stream: &Stream, shape: LaunchShape, args: &[&[u8]]) -> Result<()> {
        let (queue, mut params) = self.prepare(stream, args)?;
        // SAFETY: as the caller says.
        queue.in_order(|| unsafe { self.enqueue(queue, shape, &mut params) })
    }

    /// Enqueues a launch behind the heap's last op, which the next op does not wait for: the two run
    /// at the same time. The stream is not that of the last op.
    ///
    /// # Errors
    /// As [`Function::launch`]; [`Error::Invalid`] for the stream of the last op.
    ///
    /// # Safety
    /// As for [`Function::launch`]; and beside the workgroups of this launch all those of the ops
    /// fit the device that are launched while it runs.
    pub unsafe fn launch_beside(
        &self,
        stream: &Stream,
        shape: LaunchShape,
        args: &[&[u8]],
    ) -> Result<()> {
        let (queue, mut params) = self.prepare(stream, args)?;
        // SAFETY: as the caller says.
        queue.beside(|| unsafe { self.enqueue(queue, shape, &mut params) })
    }

    /// The queue of a stream, which must be of the kernel's heap, and the parameters as the driver has
    /// them.
    fn prepare<'a>(
        &self,
        stream: &'a Stream,
        args: &[&[u8]],
    ) -> Result<(&'a Arc<Queue>, Vec<*mut c_void>)> {
        let queue = stream.backend().as_any().downcast_ref::<GpuStream>();
        let Some(GpuStream(queue)) = queue else {
            return Err(unsupported("a kernel of a GPU", "this is the stream of another device"));
        };
        if !std::ptr::eq(Arc::as_ptr(queue.shared()), self.heap.as_ptr()) {
            return Err(Error::invalid(
                format!("stream for {}", self.name),
                format!("one of another heap, on device {}", queue.shared().device.ordinal()),
                format!(
                    "one of the heap on device {} that the kernel was loaded for",
                    self.module.device.ordinal()
                ),
            ));
        }
        let params = args.iter().map(|bytes| bytes.as_ptr().cast_mut().cast::<c_void>());
        Ok((queue, params.collect()))
    }

    /// # Safety
    /// As for [`Function::launch`], of the stream behind `queue`.
    unsafe fn enqueue(
        &self,
        queue: &Queue,
        shape: LaunchShape,
        params: &mut [*mut c_void],
    ) -> Result<()> {
        let device = &self.module.device;
        // SAFETY: the caller vouches for the parameters; stream and function are alive and of one
        // context.
        unsafe { device.launch(self.raw, &self.name, shape, params, queue.raw()) }
    }
}
