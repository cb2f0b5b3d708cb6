//! [`HeapReserve`], the memory that a program needs in a heap in addition to the operators' memory;
//! and heaps that are opened for plans.

use std::sync::Arc;

use iris_heap::{Bytes, DType, Element, HeapOptions, SymmetricHeap, World};
use iris_sync::LINE_WORDS;

use crate::args::MOST_ADDED;
use crate::comm::Footprint;
use crate::error::{Error, InOp, Result};
use crate::op_row::Part;
use crate::plan::Plan;
use crate::workspace::{check_nodes, outcome};

/// Memory that a program allocates from a heap, in addition to the memory of its operators. It is
/// an argument of [`Plan::open_heap`].
///
/// ```
/// use iris_heap::Bytes;
/// use iris_ops::HeapReserve;
/// let own_memory = HeapReserve::none(); // matrices lie elsewhere
/// let matrices = HeapReserve::matrices(); // each matrix of each plan once, as large as its largest call
/// let more = HeapReserve::matrices().and(Bytes::mib(64)).and_elements::<f32>(4096);
/// // With room for a communicator in the heap (`Comm::in_heap`):
/// let footprint = iris_ops::comm::Options::new().footprint(iris_ops::Topology::new(0, 2))?;
/// let shared = HeapReserve::matrices().and(footprint);
/// # let _ = (own_memory, matrices, more, shared);
/// # iris_ops::OpResult::<()>::Ok(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeapReserve {
    matrices: bool,
    more: Footprint,
}

impl HeapReserve {
    /// Reserves no memory: the heap's data segment has only the memory that the operators need.
    /// Matrices are in the program's own memory.
    ///
    /// With any reserve the segment of signals has at least 256 MiB, for operators that are made
    /// later. `Plan::heap_options(..)?.signal_bytes(plan.signal_bytes())` makes it smaller.
    pub fn none() -> Self {
        Self { matrices: false, more: Footprint::default() }
    }

    /// Room for the matrices of each plan (A, B, C, a bias, and those of an RMSNorm). Each matrix
    /// is counted once, with the size that it has in the largest call, on the rank where it is
    /// largest.
    pub fn matrices() -> Self {
        Self { matrices: true, more: Footprint::default() }
    }

    /// Adds more room: one more allocation of some [`Bytes`], or the [`Footprint`] of a
    /// communicator.
    #[must_use]
    pub fn and(self, more: impl Into<HeapReserve>) -> Self {
        let HeapReserve { matrices, more } = more.into();
        Self { matrices: self.matrices || matrices, more: self.more.plus(more) }
    }

    /// Adds room for one more allocation, of `len` elements of type `T`.
    #[must_use]
    pub fn and_elements<T: Element>(self, len: usize) -> Self {
        self.and(Bytes::of::<T>(len))
    }

    /// Size of this reserve in a heap for `plans`, which are the plans of one rank.
    fn of(self, plans: &[&Plan]) -> Footprint {
        let matrices = plans.iter().filter(|_| self.matrices).map(|plan| plan.matrix_bytes());
        self.more.plus(Footprint::data(matrices.sum()))
    }
}

impl From<Bytes> for HeapReserve {
    /// Room for one allocation of this size, and no room for matrices of plans.
    fn from(bytes: Bytes) -> Self {
        Footprint::data(bytes.allocated()).into()
    }
}

impl From<Footprint> for HeapReserve {
    /// Room for a communicator, and no room for matrices of plans.
    fn from(more: Footprint) -> Self {
        Self { matrices: false, more }
    }
}

impl Plan {
    /// Options of a heap on the device of these plans. The heap has room for the operators of all
    /// plans (a shared workspace needs less) and for `reserve`; both are computed for this rank
    /// alone. [`Plan::open_heap`] opens such a heap in one step. These options are for programs
    /// that also change other options. When the heap is opened, the plans of all ranks are
    /// compared.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the plans are for different devices; [`Error::NoPlan`].
    pub fn heap_options(plans: &[&Plan], reserve: impl Into<HeapReserve>) -> Result<HeapOptions> {
        let first = plans.first().ok_or(Error::NoPlan)?;
        let backend = first.topology().device.backend;
        if let Some(other) = plans.iter().find(|plan| plan.topology().device.backend != backend) {
            let expected = format!("{backend}, that of {}", first.op());
            let value = other.topology().device.backend;
            return Err(Error::invalid(other.op(), "backend", value, expected));
        }
        let needs = plans.iter().map(|plan| Footprint::of(plan));
        let needs = needs.fold(reserve.into().of(plans), Footprint::plus);
        // Plans are compared before the sizes of segments. The sizes follow from the plans, so a
        // difference in sizes would make a less helpful error.
        let items = plans.iter().enumerate().flat_map(|(index, plan)| {
            // Ranks compare the items in order. The item `name` comes before the items whose text
            // contains the name, so that different names are reported as such.
            let label = plan.request().name.as_deref();
            let label = label.map_or(String::new(), |name| format!(" ({name})"));
            let named = move |(item, value)| match item {
                "op" | "name" => (format!("{item} of plan {index}"), value),
                _ => (format!("{item} of plan {index}{label}"), value),
            };
            plan.fingerprint().into_iter().map(named)
        });
        let count = ("number of plans".to_string(), plans.len().to_string());
        let items = std::iter::once(count).chain(items);
        let options = HeapOptions::new().backend(backend).agreed(items);
        let (signal, words) = (options.signal_bytes, options.device_words);
        let reserved = iris_heap::abi::SIGNAL_RESERVED;
        // The word with the number of calls occupies a whole cache line.
        let line = u64::from(LINE_WORDS);
        Ok(options
            .data_bytes(needs.data_bytes)
            .signal_bytes(needs.signal_bytes.saturating_add(reserved).max(signal))
            .device_words(needs.device_words.saturating_add(line).max(words)))
    }

    /// Opens a heap for the operators of these plans on their device, with `reserve` for the
    /// program's own allocations: collective.
    ///
    /// If a heap is opened for all plans of a program, `new` of these operators always finds enough
    /// memory. Ranks may have different N and K if the operators allow this; the heap is then as
    /// large as on the rank that needs most.
    ///
    /// ```
    /// use iris_heap::World;
    /// use iris_ops::{HeapReserve, MatmulAllReduce, Plan, matmul_all_reduce::Options};
    ///
    /// World::run_threads(2, |world| -> anyhow::Result<()> {
    ///     let (m, n, k) = (64, 256, 128);
    ///     let plan = Options::new(m, n, k).plan(&world)?;
    ///     let heap = Plan::open_heap(&world, &[&plan], HeapReserve::matrices())?;
    ///     let (a, b) = (heap.ones::<f32>(m * k)?, heap.ones::<f32>(k * n)?);
    ///     let c = heap.zeros::<f32>(m * n)?;
    ///     let op = MatmulAllReduce::new(&heap, &plan)?;
    /// #   let _ = (a, b, c);
    /// #   drop(op);
    /// #   heap.close()?;
    /// #   world.close()?;
    ///     Ok(())
    /// })?;
    /// # anyhow::Ok(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if the plans are for different devices, or for another rank than the
    /// world's; [`Error::OtherNodes`] if GPUs of the world cannot access each other's memory, and
    /// `world` and its plans are not from [`World::for_heap`]; [`Error::NoPlan`]; errors of
    /// [`SymmetricHeap::open`], which name the differences between the plans of two ranks.
    #[track_caller]
    pub fn open_heap(
        world: &World,
        plans: &[&Plan],
        reserve: impl Into<HeapReserve>,
    ) -> Result<Arc<SymmetricHeap>> {
        let first = *plans.first().ok_or(Error::NoPlan)?;
        let op = first.op();
        // A rank that refuses its plans tells the other ranks; otherwise they would wait for this
        // rank.
        let options = options_for(world, plans, reserve.into());
        let told = world.all_ok("opening a heap for plans", outcome(&options)).in_op(op);
        let options = options?;
        told?;
        // The sizes may differ, because N and K may differ between ranks. But all ranks must open
        // segments of the same size, so they use the maximum.
        let mine = [options.data_bytes, options.signal_bytes, options.device_words];
        let all = world.allgather(bytemuck::cast_slice(&mine)).in_op(op)?;
        let most = |index: usize| {
            let sizes = all.iter().filter_map(|sizes| sizes.chunks_exact(8).nth(index));
            let sizes = sizes.filter_map(|bytes| bytes.try_into().ok().map(u64::from_ne_bytes));
            sizes.max().unwrap_or(mine[index])
        };
        let options = options.data_bytes(most(0)).signal_bytes(most(1)).device_words(most(2));
        let heap = SymmetricHeap::open(world, options).in_op(op)?;
        // Plans for another number of nodes than the heap's have given the heap wrong sizes, so
        // they are an error.
        if let Err(error) = plans.iter().try_for_each(|plan| check_nodes(&heap, plan)) {
            heap.close().in_op(op)?;
            return Err(error);
        }
        Ok(heap)
    }

    /// Room for the matrices of the largest call. Each matrix is a separate allocation, with the
    /// size that it has on the rank where it is largest.
    fn matrix_bytes(&self) -> Bytes {
        let (request, row) = (self.request(), self.row());
        let (dtype, output) = (request.dtype, request.output_dtype());
        let room = |dtype: DType, (rows, cols): (usize, usize)| {
            let elements = (rows as u64).saturating_mul(cols as u64);
            Bytes::new(elements.saturating_mul(dtype.size() as u64)).allocated()
        };
        let shapes = (0..self.topology().size).map(|rank| {
            let mut plan = self.clone();
            plan.ranks.rank = rank;
            plan.shapes(self.largest())
        });
        let (mut a, mut b, mut c) = (Bytes::ZERO, Bytes::ZERO, Bytes::ZERO);
        let mut rows = Bytes::ZERO;
        for shapes in shapes {
            if row.a != Part::None {
                a = a.max(room(dtype, shapes.a));
            }
            if row.c != Part::None {
                c = c.max(room(output, shapes.c));
                rows = rows.max(room(DType::F32, (1, shapes.c.1)));
            }
            b = shapes.b.map_or(b, |shape| b.max(room(dtype, shape)));
        }
        let bias = if row.multiplies() { rows } else { Bytes::ZERO };
        // The residual and the normalised result each have the shape of C, and the weight has one
        // row.
        let norm = if request.rms_norm.is_some() { c * 2 + rows } else { Bytes::ZERO };
        let (own, all) = (self.rows_of(0, request.m).len(), request.m);
        let more = request
            .more
            .iter()
            .flat_map(|&(dtype, n)| [(own, n), (all, n)].map(|it| room(dtype, it)));
        // Weights of the parts, and the matrices that are added to their sum.
        let parts = match row.combines() {
            true => room(DType::F32, (request.m, request.k)) + c * MOST_ADDED as u64,
            false => Bytes::ZERO,
        };
        [a, b, c, bias, norm, parts].into_iter().chain(more).sum()
    }
}

/// Options of a heap with memory for these plans, which must all be for this rank of the world.
fn options_for(world: &World, plans: &[&Plan], reserve: HeapReserve) -> Result<HeapOptions> {
    for plan in plans {
        let planned = (plan.topology().rank, plan.topology().size);
        // A plan of an operator without communication has the rank's number within its node.
        let (rank, size) = match plan.row().is_local() {
            true => (world.local_rank(), world.local_size()),
            false => (world.rank(), world.size()),
        };
        if planned != (rank, size) {
            let (op, (planned_rank, planned_size)) = (plan.op().into(), planned);
            return Err(Error::OtherWorld { op, planned_rank, planned_size, rank, size });
        }
    }
    Plan::heap_options(plans, reserve)
}

#[cfg(test)]
mod tests {
    use iris_heap::Segment;

    use super::*;
    use crate::ops::{all_reduce, matmul_all_reduce, matmul_reduce_scatter};
    use crate::topology::Topology;
    use crate::{AllReduce, MatmulAllReduce};

    /// Tests that all matrices of both plans, and both operators, fit into a heap with this room.
    /// The heap then has no byte left for another block.
    #[test]
    fn room_for_matrices_is_what_they_take() {
        World::run_threads(2, |world| -> anyhow::Result<()> {
            let (m, n, k) = (65, 33, 10 + world.rank());
            let product = matmul_all_reduce::Options::new(m, n, k).plan(&world)?;
            let sum = all_reduce::Options::rows(m, n).rms_norm(1e-5).plan(&world)?;
            let heap = Plan::open_heap(&world, &[&product, &sum], HeapReserve::matrices())?;
            let ops = (MatmulAllReduce::new(&heap, &product)?, AllReduce::new(&heap, &sum)?);
            for elements in [m * 11, 11 * n, m * n, n, m * n, m * n, m * n, m * n, n] {
                heap.zeros::<f32>(elements)?;
            }
            let full = heap.zeros::<f32>(1).unwrap_err();
            assert!(matches!(full, iris_heap::Error::OutOfHeap { free: 0, .. }), "{full}");
            ops.0.free()?;
            ops.1.free()?;
            heap.close()?;
            Ok(world.close()?)
        })
        .unwrap();
    }

    /// Tests that a heap with room for a communicator is larger by exactly the communicator's
    /// memory than a heap for the operators alone.
    #[test]
    fn room_for_a_communicator_is_what_it_takes() {
        let ranks = Topology::new(0, 64);
        let plan = all_reduce::Options::new(8).plan(ranks).unwrap();
        let more = crate::comm::Options::new().footprint(ranks).unwrap();
        let options = |reserve: HeapReserve| Plan::heap_options(&[&plan], reserve).unwrap();
        let (plain, roomy) = (options(HeapReserve::none()), options(HeapReserve::none().and(more)));
        assert_eq!(roomy.data_bytes - plain.data_bytes, more.data_bytes);
        let signal = plan.signal_bytes() + more.signal_bytes + iris_heap::abi::SIGNAL_RESERVED;
        assert_eq!(roomy.signal_bytes, signal.max(plain.signal_bytes));
        let words = plan.device_words() + more.device_words + u64::from(LINE_WORDS);
        assert_eq!(roomy.device_words, words.max(plain.device_words));
    }

    #[test]
    fn sizes_of_ranks_that_have_more_count_on_all() {
        let sizes = World::run_threads(3, |world| -> anyhow::Result<u64> {
            let plan =
                matmul_reduce_scatter::Options::new(64, 8, 1 << (8 * world.rank())).plan(&world)?;
            let heap =
                Plan::open_heap(&world, &[&plan], HeapReserve::matrices().and(Bytes::mib(1)))?;
            // A of the last rank has 16 MiB.
            assert!(heap.free_bytes(Segment::Data).0 >= 17 << 20);
            let free = heap.free_bytes(Segment::Data).0;
            heap.close()?;
            world.close()?;
            Ok(free)
        });
        let sizes = sizes.unwrap();
        assert!(sizes.iter().all(|size| *size == sizes[0]), "{sizes:?}");
    }

    #[test]
    fn a_difference_between_plans_has_the_name_of_the_plan() {
        let types = [iris_heap::DType::F32, iris_heap::DType::BF16];
        let open = |world: World| -> anyhow::Result<()> {
            let options = all_reduce::Options::new(8).dtype(types[world.rank()]).name("down");
            Plan::open_heap(&world, &[&options.plan(&world)?], HeapReserve::none())?;
            Ok(())
        };
        let error = World::run_threads(2, open).unwrap_err().to_string();
        assert!(
            error.contains("dtype of plan 0 (down) is f32 on rank 0; bf16 on rank 1"),
            "{error}"
        );
        let named = |world: World| -> anyhow::Result<()> {
            let options = all_reduce::Options::new(8).name(["up", "down"][world.rank()]);
            Plan::open_heap(&world, &[&options.plan(&world)?], HeapReserve::none())?;
            Ok(())
        };
        let error = World::run_threads(2, named).unwrap_err().to_string();
        assert!(error.contains("name of plan 0 is up on rank 0; down on rank 1"), "{error}");
        let numbers = |world: World| -> anyhow::Result<()> {
            let plan = all_reduce::Options::new(8).plan(&world)?;
            Plan::open_heap(&world, &vec![&plan; 1 + world.rank()], HeapReserve::none())?;
            Ok(())
        };
        let error = World::run_threads(2, numbers).unwrap_err().to_string();
        assert!(error.contains("number of plans is 1 on rank 0; 2 on rank 1"), "{error}");
    }

    #[test]
    fn a_plan_for_another_world_is_refused_on_all_ranks() {
        let outcomes = World::run_threads(2, |world| -> anyhow::Result<String> {
            let size = 2 + world.rank();
            let plan = all_reduce::Options::new(8).plan(Topology::new(world.rank(), size))?;
            let error = Plan::open_heap(&world, &[&plan], HeapReserve::none()).unwrap_err();
            world.close()?;
            Ok(error.to_string())
        });
        let outcomes = outcomes.unwrap();
        assert!(outcomes[1].contains("planned for rank 1 of 3"), "{outcomes:?}");
        assert!(
            outcomes[0].contains("rank 1 failed") && outcomes[0].contains("of 3"),
            "{outcomes:?}"
        );
    }
}
