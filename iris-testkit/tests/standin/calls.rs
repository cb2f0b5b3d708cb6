//! Calls of a case on one rank, with its heap, matrices and streams.

use std::sync::Arc;

use anyhow::Result;
use half::{bf16, f16};
use iris_heap::{
    BackendKind, DType, HeapOptions, RawSlice, Request, Segment, Stream, SymmetricHeap, World,
};
use iris_ops::{AnyOp, MatRef, NormArgs, Op, OpRequest, Operands, Topology};
use iris_testkit::suite::{Layout, Residual, plan};

use crate::cases::{Call, Planned};
use crate::library::{Machine, Standin};

/// Bytes of the block of each matrix, enough for every call. On CUDA the size is the same for all
/// plans, so that matrices have the same offsets in all logs; the pages are never touched. HIP
/// clears new memory by copies, so on HIP the size depends on the plan.
fn room(planned: &Planned, backend: BackendKind) -> u64 {
    if backend != BackendKind::Hip {
        return 1 << 30;
    }
    let OpRequest { m, n, k, dtype, .. } = *planned.case.options;
    let [m, n, k] = [m, n, k].map(|it| it + 64);
    let bytes = dtype.size().max(planned.case.options.output_dtype().size());
    ((m * n).max(n * k).max(m * k) * bytes).next_power_of_two() as u64
}

/// Opens a heap with room for a plan and its matrices. Collective.
pub(crate) fn heap(
    world: &World,
    machine: &Machine,
    planned: &Planned,
) -> Result<Arc<SymmetricHeap>> {
    let backend = machine.backend();
    let room = room(planned, backend);
    // The data segment also has room for the workspace of a GEMM library.
    let options = HeapOptions::new().backend(backend).data_bytes(16 * room + (64 << 20));
    let options = options.signal_bytes(room.max(64 << 20)).device_words(1 << 20);
    Ok(SymmetricHeap::open(world, options.device(world.rank() % machine.devices))?)
}

/// Operator with its matrices on one rank, to make the calls of a case.
pub(crate) struct Calls<'a> {
    planned: &'a Planned,
    ranks: Topology,
    heap: Arc<SymmetricHeap>,
    op: AnyOp,
    slices: Vec<RawSlice>,
}

impl<'a> Calls<'a> {
    /// Makes the operator and allocates its matrices. Collective.
    pub(crate) fn new(planned: &'a Planned, heap: &Arc<SymmetricHeap>) -> Result<Calls<'a>> {
        let case = &planned.case;
        let ranks = Topology::from(heap);
        let plan = plan(case.op, &case.variant, ranks, &case.options_of(ranks.rank))?;
        let op = AnyOp::new(heap, &plan)?;
        let room = room(planned, heap.options().backend);
        let blocks = [(); 7].map(|()| Request::new(Segment::Data, room, "matrix"));
        let slices = heap.alloc_many("matrices", &blocks)?;
        Ok(Calls { planned, ranks, heap: heap.clone(), op, slices })
    }

    /// Whether this rank takes part in the calls: not every rank need be a member of a barrier.
    pub(crate) fn takes_part(&self) -> bool {
        let members = &self.planned.case.options.members;
        members.as_ref().is_none_or(|members| members.contains(&self.ranks.rank))
    }

    /// Enqueues a call of `m` rows.
    pub(crate) fn run(&self, call: &Call, m: usize, stream: &Stream) -> Result<()> {
        let Call { case, bias, .. } = call;
        let ranks = self.ranks;
        let [a, b, c] = match case.op {
            Op::Barrier => [(0, 0); 3],
            _ => case.shapes(ranks, m),
        };
        let (input, output) = (case.options.dtype, case.options.output_dtype());
        let plain = Layout::default();
        let rank = ranks.rank;
        let at = |which: usize, dtype, shape, layout| {
            matrix(&self.heap, self.slices[which], dtype, shape, (layout, rank))
        };
        let c_matrix = at(2, output, c, case.c)?;
        let norm = match case.options.rms_norm {
            None => None,
            Some(_) => {
                let norm =
                    NormArgs::new(at(5, output, (1, c.1), plain)?, at(6, output, c, case.c)?);
                Some(match case.residual {
                    Residual::None => norm,
                    Residual::Apart => norm.residual(at(4, output, c, case.c)?),
                    Residual::InC => norm.residual(c_matrix),
                })
            }
        };
        let operands = Operands::new(
            if case.in_place { c_matrix } else { at(0, input, a, case.a)? },
            at(1, input, b, case.b)?,
            c_matrix,
        )
        .bias(if case.bias { Some(at(3, *bias, (1, c.1), plain)?) } else { None })
        .norm(norm);
        Ok(self.op.run(&operands, stream)?)
    }

    pub(crate) fn heap(&self) -> &Arc<SymmetricHeap> {
        &self.heap
    }

    pub(crate) fn planned(&self) -> &'a Planned {
        self.planned
    }
}

fn matrix(
    heap: &SymmetricHeap,
    slice: RawSlice,
    dtype: DType,
    shape: (usize, usize),
    (layout, rank): (Layout, usize),
) -> Result<MatRef> {
    let (rows, cols) = if layout.transposed { (shape.1, shape.0) } else { shape };
    let first = layout.before + if layout.skewed { 8 * rank } else { 0 };
    // A matrix that is empty, or that the operator does not have, still gets a block of one
    // element.
    let len = (rows * (cols + layout.pad)).max(1);
    macro_rules! of {
        ($type:ty) => {{
            let slice = slice.cast::<$type>()?.slice(first..first + len)?;
            if layout.external {
                let address = heap.resolve(slice, rank)?;
                // SAFETY: the memory belongs to the heap, and no kernel accesses it, because the
                // stand-in runs none.
                #[allow(unsafe_code, reason = "a matrix by its address")]
                unsafe {
                    MatRef::external_mut(address, slice.len(), rows, cols)
                }
            } else {
                MatRef::sym(slice, rows, cols)
            }
        }};
    }
    let matrix = match dtype {
        DType::F32 => of!(f32),
        DType::F16 => of!(f16),
        _ => of!(bf16),
    };
    let matrix = matrix.with_ld(cols + layout.pad);
    Ok(if layout.transposed { matrix.transposed() } else { matrix })
}

/// Stream that the test creates with the driver, because a capture needs a raw stream.
pub(crate) struct Captured {
    standin: &'static Standin,
    raw: u64,
    stream: Option<Stream>,
}

impl Captured {
    pub(crate) fn new(heap: &SymmetricHeap, machine: &Machine) -> Result<Captured> {
        let standin = Standin::get(machine.backend());
        let raw = standin.stream(heap.rank() % machine.devices);
        // SAFETY: the raw stream is destroyed after everything that uses it.
        #[allow(unsafe_code, reason = "a stream by its handle")]
        let stream = unsafe { heap.stream_from_raw(raw) }?;
        Ok(Captured { standin, raw, stream: Some(stream) })
    }

    /// Calls `f` with the stream, without capturing.
    pub(crate) fn with<T>(&self, f: impl FnOnce(&Stream) -> Result<T>) -> Result<T> {
        f(self.stream.as_ref().expect("it goes with this"))
    }

    /// Captures the work that `enqueue` enqueues; returns the driver's error code if ending the
    /// capture fails.
    pub(crate) fn capture(&self, enqueue: impl FnOnce(&Stream)) -> Result<(), u32> {
        self.standin.begin_capture(self.raw);
        if let Some(stream) = &self.stream {
            enqueue(stream);
        }
        self.standin.end_capture(self.raw)
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        self.stream = None;
        self.standin.destroy_stream(self.raw);
    }
}

/// Text of an error on one line, with everything removed that differs between runs.
pub(crate) fn in_line(error: &anyhow::Error) -> String {
    let text = format!("{error:#}");
    // Words that are host addresses are replaced, because they differ between runs.
    let mut words = Vec::new();
    for word in text.split(' ') {
        let is_address = word.contains("0x7f") && word.len() > 12;
        words.push(if is_address { "ADDRESS" } else { word });
    }
    words.join(" ")
}
