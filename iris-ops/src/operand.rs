//! Matrices in memory that a program lends to a call: memory of cudarc, or of the host.

use std::fmt;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use iris_heap::{BackendKind, Element, Stream, SymmetricHeap};

#[cfg(feature = "cudarc-0-19")]
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};

#[cfg(feature = "cudarc-0-19")]
use crate::error::InOp;
use crate::error::{Error, Result};
use crate::matrix::MatRef;
use crate::op_names::Op;

/// Matrix of a call, in memory that is borrowed for the call. Arguments of a call are either
/// [`MatRef`]s or operands: `MatmulArgs::new(a, b, c)` takes three of one kind, and
/// `Operand::from(mat_ref)` makes an operand from a [`MatRef`].
///
/// An operand in cudarc's memory (`Operand::read`, `Operand::write`, with the feature
/// `cudarc-0-19`) is made for one stream. This stream waits for earlier work on the memory, as far
/// as cudarc knows this work. Later work on the memory that goes through cudarc, and the release of
/// the memory, wait for the calls that use the operand. So the memory may be dropped as soon as
/// [`run`](crate::MatmulAllReduce::run) has returned, even if an error follows. Memory of a call that
/// is captured must live as long as the graph, about which cudarc knows nothing.
///
/// An operand in host memory, on the CPU, is made in a [`scope`], which waits for the calls.
///
/// ```no_run
/// # #[cfg(feature = "cudarc-0-19")]
/// # fn layer(
/// #     heap: &std::sync::Arc<iris_heap::SymmetricHeap>,
/// #     stream: &std::sync::Arc<cudarc::driver::CudaStream>,
/// # ) -> anyhow::Result<()> {
/// use iris_ops::{MatmulAllReduce, MatmulArgs, Operand, matmul_all_reduce::Options};
/// # let (m, n, k) = (16, 8192, 3584);
/// let op = MatmulAllReduce::new(heap, &Options::new(m, n, k).plan(heap)?)?;
/// let ours = heap.gpu()?.stream_of(stream)?; // the program's own stream
/// let (x, weight) = (stream.alloc_zeros::<f32>(m * k)?, stream.alloc_zeros::<f32>(n * k)?);
/// let mut y = stream.alloc_zeros::<f32>(m * n)?;
/// let args = MatmulArgs::new(
///     Operand::read(&x, stream, m, k),
///     Operand::read(&weight, stream, n, k).transposed(),
///     Operand::write(&mut y, stream, m, n),
/// );
/// op.run(&args, &ours)?; // enqueues
/// drop(args);
/// drop(x); // freed after the call has ended
/// # Ok(())
/// # }
/// ```
pub struct Operand<'a> {
    matrix: MatRef,
    lent: Lent<'a>,
}

/// Condition on the calls that may use the memory of a matrix: the stream on which they run.
enum Lent<'a> {
    /// Calls on any stream: the memory belongs to the heap, or the maker of a `MatRef` vouches for
    /// it.
    Always,
    /// Calls on one cudarc stream. When the guard `until` is dropped, cudarc learns that later work
    /// must wait for these calls.
    #[cfg(feature = "cudarc-0-19")]
    Cudarc { stream: &'a CudaStream, until: SyncOnDrop<'a> },
    /// Calls on the stream of a scope, which waits for them: the memory is host memory.
    Host(&'a Stream),
    /// Memory that this operand borrows from another operand. Calls that may use the other operand
    /// may use this one.
    Shared(&'a Lent<'a>),
}

impl<'a> Lent<'a> {
    /// Follows [`Lent::Shared`] back to the operand that first borrowed the memory.
    fn origin(&self) -> &Lent<'a> {
        match self {
            Lent::Shared(other) => other.origin(),
            own => own,
        }
    }
}

impl fmt::Debug for Operand<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Operand({:?})", self.matrix)
    }
}

impl From<MatRef> for Operand<'_> {
    fn from(matrix: MatRef) -> Self {
        Self { matrix, lent: Lent::Always }
    }
}

impl<'a> Operand<'a> {
    /// Makes an input of `rows` x `cols`, row-major without gaps, in memory of cudarc: a
    /// `CudaSlice`, a `CudaView` or a `CudaViewMut`. Calls on `stream` may use the operand.
    #[cfg(feature = "cudarc-0-19")]
    #[allow(unsafe_code, reason = "the guard keeps the memory until a call is enqueued")]
    pub fn read<T: Element>(
        memory: &'a impl DevicePtr<T>,
        stream: &'a CudaStream,
        rows: usize,
        cols: usize,
    ) -> Self {
        let (address, until) = memory.device_ptr(stream);
        // SAFETY: the memory is borrowed for `'a`. `enqueued` and the guard record the calls, and
        // cudarc waits for these calls before it writes or frees the memory.
        let matrix = unsafe { MatRef::external(address as *const T, memory.len(), rows, cols) };
        Self { matrix, lent: Lent::Cudarc { stream, until } }
    }

    /// Makes a matrix of `rows` x `cols`, row-major without gaps, in memory of cudarc: a
    /// `CudaSlice` or a `CudaViewMut`. The matrix may be an output. Calls on `stream` may use the
    /// operand.
    #[cfg(feature = "cudarc-0-19")]
    #[allow(unsafe_code, reason = "the guard keeps the memory until a call is enqueued")]
    pub fn write<T: Element>(
        memory: &'a mut impl DevicePtrMut<T>,
        stream: &'a CudaStream,
        rows: usize,
        cols: usize,
    ) -> Self {
        let len = memory.len();
        let (address, until) = memory.device_ptr_mut(stream);
        // SAFETY: the conditions are those of `read`. In addition, the memory is borrowed
        // exclusively, so the call may write it.
        let matrix = unsafe { MatRef::external_mut(address as *mut T, len, rows, cols) };
        Self { matrix, lent: Lent::Cudarc { stream, until } }
    }

    /// Sets the leading dimension: rows (columns, if transposed) are `ld` elements apart. The
    /// memory needs `(rows - 1) * ld + cols` elements, because the last row may have fewer than
    /// `ld` elements.
    #[must_use]
    pub fn with_ld(self, ld: usize) -> Self {
        Self { matrix: self.matrix.with_ld(ld), ..self }
    }

    /// Input in the memory of this operand, for a later call on the same stream: for example, the
    /// result of a layer is A of the next layer.
    ///
    /// ```
    /// # use iris_heap::World;
    /// # use iris_ops::{HeapReserve, Matmul, MatmulArgs, Plan, matmul::Options, scope};
    /// # World::run_threads(1, |world| -> anyhow::Result<()> {
    /// # let plan = Options::new(1, 2, 2).plan(&world)?;
    /// # let heap = Plan::open_heap(&world, &[&plan], HeapReserve::none())?;
    /// # let (layer, stream) = (Matmul::new(&heap, &plan)?, heap.stream()?);
    /// let (x, weight) = ([1.0_f32, 2.0], [0.0_f32, 1.0, 1.0, 0.0]);
    /// let (mut h, mut y) = ([0.0_f32; 2], [0.0_f32; 2]);
    /// scope(&heap, &stream, |scope| {
    ///     let weight = scope.read(&weight, 2, 2);
    ///     let first = MatmulArgs::new(scope.read(&x, 1, 2), weight, scope.write(&mut h, 1, 2));
    ///     layer.run(&first, &stream)?;
    ///     let (h, weight) = (first.c.as_input(), first.b.as_input());
    ///     layer.run(&MatmulArgs::new(h, weight, scope.write(&mut y, 1, 2)), &stream)
    /// })?;
    /// assert_eq!((h, y), ([2.0, 1.0], [1.0, 2.0]));
    /// # Ok(())
    /// # })?;
    /// # anyhow::Ok(())
    /// ```
    pub fn as_input(&self) -> Operand<'_> {
        Operand { matrix: self.matrix.read_only(), lent: Lent::Shared(&self.lent) }
    }

    /// Second operand in the memory of this operand, which stays usable. A call whose residual is
    /// also its C needs two operands for that matrix.
    ///
    /// ```
    /// # use iris_heap::World;
    /// # use iris_ops::{AllReduce, CollectiveArgs, HeapReserve, NormArgs, Plan, all_reduce::Options, scope};
    /// # World::run_threads(1, |world| -> anyhow::Result<()> {
    /// # let plan = Options::rows(1, 2).rms_norm(1e-6).plan(&world)?;
    /// # let heap = Plan::open_heap(&world, &[&plan], HeapReserve::none())?;
    /// # let (op, stream) = (AllReduce::new(&heap, &plan)?, heap.stream()?);
    /// let (x, weight) = ([1.5_f32; 2], [1.0_f32; 2]);
    /// let (mut sum, mut normed) = ([1.0_f32; 2], [0.0_f32; 2]);
    /// scope(&heap, &stream, |scope| {
    ///     let sum = scope.write(&mut sum, 1, 2);
    ///     let norm = NormArgs::new(scope.read(&weight, 1, 2), scope.write(&mut normed, 1, 2));
    ///     let norm = norm.residual(sum.as_input());
    ///     let args = CollectiveArgs::new(scope.read(&x, 1, 2), sum.by_ref());
    ///     op.run(&args.norm(norm), &stream)
    /// })?;
    /// assert_eq!(sum, [2.5; 2]); // the new residual
    /// # Ok(())
    /// # })?;
    /// # anyhow::Ok(())
    /// ```
    pub fn by_ref(&self) -> Operand<'_> {
        Operand { matrix: self.matrix, lent: Lent::Shared(&self.lent) }
    }

    /// Transpose of the operand: a matrix in the same memory whose rows are the columns of this
    /// operand.
    #[must_use]
    pub fn transposed(self) -> Self {
        Self { matrix: self.matrix.transposed(), ..self }
    }
}

/// Matrix that a call takes as an argument: a [`MatRef`] or an [`Operand`].
pub trait MatrixArg: sealed::MatrixArg {}

impl MatrixArg for MatRef {}
impl MatrixArg for Operand<'_> {}

pub(crate) mod sealed {
    use super::*;

    pub trait MatrixArg {
        /// Reference to the matrix that was passed.
        fn matrix(&self) -> MatRef;

        /// Checks that calls on the given stream may use the matrix's memory.
        fn check(&self, _: Op, _: &SymmetricHeap, _: &Stream) -> Result<()> {
            Ok(())
        }

        /// Tells the owner of the matrix's memory that a call that uses the memory was enqueued.
        fn enqueued(&self, _: Op) -> Result<()> {
            Ok(())
        }
    }

    impl MatrixArg for MatRef {
        fn matrix(&self) -> MatRef {
            *self
        }
    }
}

impl sealed::MatrixArg for Operand<'_> {
    fn matrix(&self) -> MatRef {
        self.matrix
    }

    fn check(&self, op: Op, heap: &SymmetricHeap, stream: &Stream) -> Result<()> {
        let backend = heap.options().backend;
        let invalid = |what: &str, value: String, expected: &str| {
            Err(Error::invalid(op, what, value, expected))
        };
        match self.lent.origin() {
            Lent::Always | Lent::Shared(_) => Ok(()),
            Lent::Host(_) if backend != BackendKind::Cpu => {
                let expected =
                    "memory of its device: of the heap, or Operand::read and write of cudarc's";
                invalid("operand", format!("memory of the host, on {backend}"), expected)
            }
            Lent::Host(of) if !of.is_same(stream) => {
                invalid("stream", format!("{stream:?}"), "the one of the scope of the operands")
            }
            Lent::Host(_) => Ok(()),
            #[cfg(feature = "cudarc-0-19")]
            Lent::Cudarc { stream: theirs, .. } => {
                let handle = theirs.cu_stream() as u64;
                let (ordinal, index) = (theirs.context().ordinal(), heap.device().index);
                if backend != BackendKind::Cuda || ordinal != index {
                    let value =
                        format!("memory of CUDA device {ordinal}, on {backend} device {index}");
                    return invalid("operand", value, "memory of the heap's device");
                }
                if handle != stream.raw_handle() {
                    let value = format!("{:#x}", stream.raw_handle());
                    let expected = format!(
                        "{handle:#x}, for which the operands are made: Gpu::stream_of of that stream"
                    );
                    return invalid("stream", value, &expected);
                }
                Ok(())
            }
        }
    }

    fn enqueued(&self, op: Op) -> Result<()> {
        #[cfg(feature = "cudarc-0-19")]
        if let Lent::Cudarc { until: SyncOnDrop::Record(Some((event, stream))), .. } =
            self.lent.origin()
        {
            // The event is recorded now. The guard would also record it when it is dropped, but a
            // program may leak the guard.
            let recorded = event.record(stream);
            return recorded.map_err(iris_heap::Error::other).in_op(op);
        }
        let _ = op;
        Ok(())
    }
}

/// Scope for calls whose matrices lie in borrowed host memory. It is made by [`scope`], which waits
/// for these calls.
#[derive(Debug)]
pub struct HostScope<'scope, 'env: 'scope> {
    stream: Stream,
    _scope: PhantomData<&'scope mut &'scope ()>,
    _env: PhantomData<&'env mut &'env ()>,
}

impl<'scope, 'env> HostScope<'scope, 'env> {
    /// Makes an input of `rows` x `cols`, row-major without gaps, in host memory. `memory` must have
    /// at least `rows * cols` elements. With [`Operand::with_ld`], it must have at least
    /// `(rows - 1) * ld + cols` elements.
    #[allow(unsafe_code, reason = "the scope waits for the calls before the borrow ends")]
    pub fn read<T: Element>(
        &'scope self,
        memory: &'env [T],
        rows: usize,
        cols: usize,
    ) -> Operand<'scope> {
        // SAFETY: the memory is borrowed until the scope has waited for its stream. Only calls on
        // this stream accept the operand.
        let matrix = unsafe { MatRef::external(memory.as_ptr(), memory.len(), rows, cols) };
        Operand { matrix, lent: Lent::Host(&self.stream) }
    }

    /// Makes a matrix of `rows` x `cols`, row-major without gaps, in host memory. The matrix may be
    /// an output.
    #[allow(unsafe_code, reason = "the scope waits for the calls before the borrow ends")]
    pub fn write<T: Element>(
        &'scope self,
        memory: &'env mut [T],
        rows: usize,
        cols: usize,
    ) -> Operand<'scope> {
        let (pointer, len) = (memory.as_mut_ptr(), memory.len());
        // SAFETY: the conditions are those of `read`. In addition, the memory is borrowed
        // exclusively, so the call may write it.
        let matrix = unsafe { MatRef::external_mut(pointer, len, rows, cols) };
        Operand { matrix, lent: Lent::Host(&self.stream) }
    }
}

/// Lends host memory to calls on `stream`, on the CPU, and returns when these calls have ended,
/// even if `f` fails or panics, or another thread closes the heap. If both `f` and a call fail, the
/// error of `f` is returned. Before `f` runs, `scope` waits for the work that is already enqueued on
/// the stream.
///
/// ```
/// use iris_heap::World;
/// use iris_ops::{HeapReserve, MatmulAllReduce, MatmulArgs, Plan, matmul_all_reduce::Options, scope};
///
/// let sums = World::run_threads(2, |world| -> anyhow::Result<Vec<f32>> {
///     let plan = Options::new(1, 2, 3).plan(&world)?;
///     let heap = Plan::open_heap(&world, &[&plan], HeapReserve::none())?;
///     let op = MatmulAllReduce::new(&heap, &plan)?;
///     let (x, weight, mut y) = ([1.0_f32; 3], [2.0_f32; 6], vec![0.0_f32; 2]);
///     let stream = heap.stream()?;
///     scope(&heap, &stream, |scope| {
///         let (x, weight) = (scope.read(&x, 1, 3), scope.read(&weight, 3, 2));
///         op.run(&MatmulArgs::new(x, weight, scope.write(&mut y, 1, 2)), &stream)
///     })?;
///     heap.close()?;
///     world.close()?;
///     Ok(y)
/// })?;
/// assert_eq!(sums, [[12.0; 2]; 2]);
/// # anyhow::Ok(())
/// ```
///
/// The memory cannot be freed before the calls have ended:
/// ```compile_fail
/// # fn f(heap: &iris_heap::SymmetricHeap, stream: &iris_heap::Stream) {
/// let x = vec![1.0_f32; 3];
/// iris_ops::scope(heap, stream, |scope| {
///     let operand = scope.read(&x, 1, 3);
///     drop(x);
///     iris_ops::OpResult::Ok(())
/// });
/// # }
/// ```
///
/// # Errors
/// Errors of `f`; otherwise errors of the calls, as [`Stream::sync`] returns them, in
/// [`Error::Scope`].
pub fn scope<'env, T, E: From<Error>>(
    heap: &SymmetricHeap,
    stream: &Stream,
    f: impl for<'scope> FnOnce(&'scope HostScope<'scope, 'env>) -> Result<T, E>,
) -> Result<T, E> {
    // The heap is borrowed for the whole scope: dropping the heap earlier would leave a call
    // running.
    heap.check_stream("a scope", stream).map_err(Error::scope)?;
    let scope = HostScope { stream: stream.clone(), _scope: PhantomData, _env: PhantomData };
    lending(|| stream.sync().map_err(|error| Error::scope(error).into()), || f(&scope))
}

/// Runs `f`, which enqueues work on lent memory, and waits for the work by `sync`, even if `f` fails
/// or panics after some work was enqueued. `sync` is called before `f`, too, so that a thread which
/// may not wait gets the error before any memory is lent.
pub(crate) fn lending<T, E>(
    sync: impl Fn() -> Result<(), E>,
    f: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    sync()?;
    let outcome = catch_unwind(AssertUnwindSafe(f));
    let done = sync();
    let value = outcome.unwrap_or_else(|panic| resume_unwind(panic))?;
    done.map(|()| value)
}
