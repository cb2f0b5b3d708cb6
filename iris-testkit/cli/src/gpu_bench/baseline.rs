//! Vendor baseline of an op: NCCL's collective and cuBLASLt's GEMM (RCCL's and hipBLASLt's on AMD),
//! one after the other on one stream.

use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use iris_heap::{DType, SymSlice, SymmetricHeap};
use iris_kernels::vendor::{Communicator, NcclCall};
use iris_ops::{OpRequest, Shard, Topology};
use iris_testkit::oracle::{Meaning, Product, Rows};
use iris_testkit::suite::{Op, Options};

use super::vendor::{self, Buffer, Multiplier};

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

    /// Enqueues an all-reduce of one element of the workspace.
    pub(crate) fn sum_one(&self, of: &Communicator, stream: u64) -> Result<()> {
        let place = (&self.workspace, &self.workspace);
        vendor::collective(of, NcclCall::AllReduce, place, (1, DType::F32), stream)
    }
}

/// Sequence of library calls that is equivalent to an op, and can be enqueued any number of times.
pub(crate) struct Baseline<'a> {
    steps: Vec<Step<'a>>,
    workspace: Buffer,
}

enum Step<'a> {
    Multiply {
        product: vendor::Product,
        a: Buffer,
        b: Buffer,
        c: Buffer,
    },
    Collective {
        of: &'a Communicator,
        call: NcclCall,
        from: Buffer,
        to: Buffer,
        count: usize,
        dtype: DType,
    },
}

/// Library collective that is equivalent to `op`; `None` if `op` has a product or no library has the
/// collective.
fn equivalent(op: Op) -> Option<NcclCall> {
    use Rows::{All, Blocks, Own, Root};
    let Meaning { product: Product::None, gives, gets, sums, .. } = Meaning::of(op) else {
        return None;
    };
    Some(match (gives, gets) {
        (All, All) if sums => NcclCall::AllReduce,
        (All, Own) if sums => NcclCall::ReduceScatter,
        (Own, All) => NcclCall::AllGather,
        (All, Blocks) => NcclCall::AllToAll,
        (Root, All) => NcclCall::Broadcast { root: 0 },
        _ => return None,
    })
}

/// Collective library and GEMM library of a rank, or the reasons why they are missing.
pub(crate) type Libraries<'a> = (Result<&'a Communicator, String>, Result<&'a Multiplier, String>);

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
        Ok(Baseline { steps: vec![step], workspace: at.workspace.clone() })
    }

    /// Baseline that computes the same as `op` by library calls.
    ///
    /// # Errors
    /// A missing library; rows or columns that do not split evenly, which NCCL's collectives do not
    /// support.
    pub(crate) fn new(
        op: Op,
        options: &Options,
        ranks: Topology,
        (nccl, blas): Libraries<'a>,
        at: &Buffers,
    ) -> Result<Baseline<'a>> {
        let OpRequest { m, n, k, dtype, .. } = **options;
        let (size, rank) = (ranks.size, ranks.rank);
        let even = |total: usize, what: &str| {
            ensure!(
                total.is_multiple_of(size),
                "{total} {what} cannot be split evenly over {size} ranks"
            );
            Ok(total / size)
        };
        let collective = |call, from: &Buffer, to: &Buffer, count| -> Result<Step<'a>> {
            let of = nccl.clone().map_err(anyhow::Error::msg)?;
            Ok(Step::Collective { of, call, from: from.clone(), to: to.clone(), count, dtype })
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
                collective(NcclCall::AllReduce, c, c, m * n)?,
            ],
            Op::MatmulReduceScatter => vec![
                multiply([m, n, k], false, a, b, between)?,
                collective(NcclCall::ReduceScatter, between, c, even(m, "rows")? * n)?,
            ],
            Op::MatmulAllGather => {
                let rows = even(m, "rows")?;
                let own = c.from(rank * rows * n * dtype.size())?;
                vec![
                    multiply([rows, n, k], false, a, b, &own)?,
                    collective(NcclCall::AllGather, &own, c, rows * n)?,
                ]
            }
            Op::AllGatherMatmul if options.shard == Shard::Columns => {
                // The gathered shards of A are stored one after the other; each is multiplied by
                // its rows of B, and the products are added.
                let depth = even(k, "columns")?;
                let mut steps = vec![collective(NcclCall::AllGather, a, between, m * depth)?];
                for source in 0..size {
                    let a = between.from(source * m * depth * dtype.size())?;
                    let b = b.from(source * depth * n * dtype.size())?;
                    steps.push(multiply([m, n, depth], source > 0, &a, &b, c)?);
                }
                steps
            }
            Op::AllGatherMatmul => vec![
                collective(NcclCall::AllGather, a, between, even(m, "rows")? * k)?,
                multiply([m, n, k], false, between, b, c)?,
            ],
            // Libraries have no barrier: the smallest collective is the sum of one word.
            Op::Barrier => {
                let of = nccl.map_err(anyhow::Error::msg)?;
                let (from, to) = (at.workspace.clone(), at.workspace.clone());
                let (call, dtype) = (NcclCall::AllReduce, DType::I32);
                vec![Step::Collective { of, call, from, to, count: 1, dtype }]
            }
            _ => match equivalent(op) {
                Some(NcclCall::AllReduce) => vec![collective(NcclCall::AllReduce, a, c, m * n)?],
                // The library reads only the root's A, so only the root's must have room.
                Some(call @ NcclCall::Broadcast { root }) => {
                    vec![collective(call, if rank == root { a } else { c }, c, m * n)?]
                }
                Some(call) => vec![collective(call, a, c, even(m, "rows")? * n)?],
                None => bail!("no library collective does the same as {op}"),
            },
        };
        Ok(Baseline { steps, workspace: at.workspace.clone() })
    }

    /// Enqueues one call on the driver's stream `stream`, whose device must be current.
    pub(crate) fn run(&self, stream: u64) -> Result<()> {
        for step in &self.steps {
            match step {
                Step::Multiply { product, a, b, c } => {
                    product.run([a, b, c, &self.workspace], stream)?;
                }
                Step::Collective { of, call, from, to, count, dtype } => {
                    vendor::collective(of, *call, (from, to), (*count, *dtype), stream)?;
                }
            }
        }
        Ok(())
    }
}
