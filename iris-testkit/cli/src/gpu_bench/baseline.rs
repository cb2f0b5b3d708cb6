//! Vendor baseline of an op: NCCL's collective and cuBLASLt's GEMM (RCCL's and hipBLASLt's on AMD),
//! one after the other on one stream.

use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use iris_heap::{DType, SymSlice, SymmetricHeap};
use iris_ops::{Ranks, Shard};
use iris_testkit::oracle::{Meaning, Product, Rows};
use iris_testkit::suite::{Op, Options};

use super::vendor::{self, Buffer, Communicator, Multiplier};

/// Matrices of a baseline on one rank: A, B, the result, the intermediate matrix between GEMM and
/// collective, and the workspace of the GEMM library.
pub(crate) struct Buffers {
    a: Buffer,
    b: Buffer,
    c: Buffer,
    between: Buffer,
    workspace: Buffer,
}

impl Buffers {
    pub(crate) fn new(heap: &Arc<SymmetricHeap>, slices: [SymSlice<u8>; 5]) -> Result<Buffers> {
        let [a, b, c, between, workspace] = slices.map(|slice| Buffer::of(heap, slice));
        Ok(Buffers { a: a?, b: b?, c: c?, between: between?, workspace: workspace? })
    }

    /// Memory range that contains all of the buffers.
    pub(crate) fn all(&self) -> Buffer {
        let Buffers { a, b, c, between, workspace } = self;
        Buffer::around(&[a, b, c, between, workspace])
    }
}

/// Sequence of library calls that is equivalent to an op, and can be enqueued any number of times.
pub(crate) struct Baseline<'a> {
    steps: Vec<Step<'a>>,
    dtype: DType,
    workspace: Buffer,
}

enum Step<'a> {
    Multiply { product: vendor::Product, a: Buffer, b: Buffer, c: Buffer },
    Collective { of: &'a Communicator<'a>, kind: Kind, from: Buffer, to: Buffer, count: usize },
}

/// Kind of collective; the methods of [`Communicator`] document the meaning of its count.
#[derive(Clone, Copy)]
enum Kind {
    AllReduce,
    ReduceScatter,
    AllGather,
    AllToAll,
    Broadcast,
    /// Barrier of all ranks. Libraries have no barrier, so the smallest collective is used: the sum
    /// of one word.
    Meet,
}

impl Kind {
    /// Library collective that is equivalent to `op`; `None` if `op` has a product or no library
    /// has the collective.
    fn of(op: Op) -> Option<Kind> {
        use Rows::{All, Blocks, Own, Root};
        let Meaning { product: Product::None, gives, gets, sums, .. } = Meaning::of(op) else {
            return None;
        };
        Some(match (gives, gets) {
            (All, All) if sums => Kind::AllReduce,
            (All, Own) if sums => Kind::ReduceScatter,
            (Own, All) => Kind::AllGather,
            (All, Blocks) => Kind::AllToAll,
            (Root, All) => Kind::Broadcast,
            (Rows::None, Rows::None) => Kind::Meet,
            _ => return None,
        })
    }
}

/// Collective library and GEMM library of a rank, or the reasons why they are missing.
pub(crate) type Libraries<'a> =
    (Result<&'a Communicator<'a>, String>, Result<&'a Multiplier, String>);

impl<'a> Baseline<'a> {
    /// Baseline of this rank's GEMM alone, without communication; A is the rank's own or the
    /// gathered matrix.
    pub(crate) fn product(
        blas: &'a Multiplier,
        shape: [usize; 3],
        dtype: DType,
        at: &Buffers,
        gathered: bool,
    ) -> Result<Baseline<'a>> {
        let product = blas.product(shape, dtype, false)?;
        let a = if gathered { &at.between } else { &at.a }.clone();
        // Result of the GEMM: this rank's C or, if the product does not fit there, the intermediate
        // matrix.
        let [m, n, _] = shape;
        let c = if at.c.holds(m * n, dtype) { &at.c } else { &at.between }.clone();
        let step = Step::Multiply { product, a, b: at.b.clone(), c };
        Ok(Baseline { steps: vec![step], dtype, workspace: at.workspace.clone() })
    }

    /// Baseline that computes the same as `op` by library calls.
    ///
    /// # Errors
    /// A missing library; rows or columns that do not split evenly, which NCCL's collectives do not
    /// support.
    pub(crate) fn new(
        op: Op,
        options: &Options,
        ranks: Ranks,
        (nccl, blas): Libraries<'a>,
        at: &Buffers,
    ) -> Result<Baseline<'a>> {
        let Options { m, n, k, dtype, .. } = *options;
        let (size, rank) = (ranks.size, ranks.rank);
        let even = |total: usize, what: &str| {
            ensure!(
                total.is_multiple_of(size),
                "{total} {what} cannot be split evenly over {size} ranks"
            );
            Ok(total / size)
        };
        let collective = |kind, from: &Buffer, to: &Buffer, count| -> Result<Step<'a>> {
            let of = nccl.clone().map_err(anyhow::Error::msg)?;
            Ok(Step::Collective { of, kind, from: from.clone(), to: to.clone(), count })
        };
        let multiply = |shape, adds, a: &Buffer, b: &Buffer, c: &Buffer| -> Result<Step<'a>> {
            let product = blas.clone().map_err(anyhow::Error::msg)?.product(shape, dtype, adds)?;
            Ok(Step::Multiply { product, a: a.clone(), b: b.clone(), c: c.clone() })
        };
        let Buffers { a, b, c, between, .. } = at;
        let steps = match op {
            Op::Matmul => vec![multiply([m, n, k], false, a, b, c)?],
            Op::MatmulAllReduce => vec![
                multiply([m, n, k], false, a, b, c)?,
                collective(Kind::AllReduce, c, c, m * n)?,
            ],
            Op::MatmulReduceScatter => vec![
                multiply([m, n, k], false, a, b, between)?,
                collective(Kind::ReduceScatter, between, c, even(m, "rows")? * n)?,
            ],
            Op::MatmulAllGather => {
                let rows = even(m, "rows")?;
                let own = c.from(rank * rows * n * dtype.size())?;
                vec![
                    multiply([rows, n, k], false, a, b, &own)?,
                    collective(Kind::AllGather, &own, c, rows * n)?,
                ]
            }
            Op::AllGatherMatmul if options.shard == Shard::Columns => {
                // The gathered shards of A are stored one after the other; each is multiplied by
                // its rows of B, and the products are added.
                let depth = even(k, "columns")?;
                let mut steps = vec![collective(Kind::AllGather, a, between, m * depth)?];
                for source in 0..size {
                    let a = between.from(source * m * depth * dtype.size())?;
                    let b = b.from(source * depth * n * dtype.size())?;
                    steps.push(multiply([m, n, depth], source > 0, &a, &b, c)?);
                }
                steps
            }
            Op::AllGatherMatmul => vec![
                collective(Kind::AllGather, a, between, even(m, "rows")? * k)?,
                multiply([m, n, k], false, between, b, c)?,
            ],
            _ => match Kind::of(op) {
                Some(Kind::Meet) => vec![collective(Kind::Meet, &at.workspace, &at.workspace, 1)?],
                Some(kind @ (Kind::AllReduce | Kind::Broadcast)) => {
                    vec![collective(kind, a, c, m * n)?]
                }
                Some(kind) => vec![collective(kind, a, c, even(m, "rows")? * n)?],
                None => bail!("no library collective does the same as {op}"),
            },
        };
        Ok(Baseline { steps, dtype, workspace: at.workspace.clone() })
    }

    /// Enqueues one call on the driver's stream `stream`, whose device must be current.
    pub(crate) fn run(&self, stream: u64) -> Result<()> {
        for step in &self.steps {
            match step {
                Step::Multiply { product, a, b, c } => {
                    product.run([a, b, c, &self.workspace], stream)?;
                }
                Step::Collective { of, kind, from, to, count } => {
                    let (ends, count, dtype) = ((from, to), *count, self.dtype);
                    match kind {
                        Kind::AllReduce => of.all_reduce(ends, count, dtype, stream)?,
                        Kind::ReduceScatter => of.reduce_scatter(ends, count, dtype, stream)?,
                        Kind::AllGather => of.all_gather(ends, count, dtype, stream)?,
                        Kind::AllToAll => of.all_to_all(ends, count, dtype, stream)?,
                        Kind::Broadcast => of.broadcast(ends, count, dtype, stream)?,
                        Kind::Meet => of.all_reduce(ends, count, DType::I32, stream)?,
                    }
                }
            }
        }
        Ok(())
    }
}
