//! Messages of the benchmark that are no single matrix: lists of tensors and weighted parts, as
//! mixtures of experts send them.

use anyhow::{Context, Result};
use iris_heap::{DType, SymSlice};
use iris_ops::{
    CollectiveArgs, MatRef, OpRequest, Plan, Topology, all_gather, all_reduce, reduce_scatter,
};
use iris_testkit::matrix::matrix;
use iris_testkit::suite::{self, Op, Options as OpOptions};

use super::Row;
use crate::errors::usage;

/// Input of the calls of a shape.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Message {
    /// One matrix, or the factors of a product.
    Plain,
    /// List of tensors: the op's matrix, then one of each element type and number of columns. They lie
    /// side by side in the rows of one buffer, so that a library gathers the same bytes as one matrix.
    List(Vec<(DType, usize)>),
    /// This number of weighted parts of each row. A library's message has rows that the host has
    /// combined.
    Parts(usize),
}

impl Message {
    /// Message of the calls of a row of the case file.
    pub(super) fn new(row: &Row, op: Op) -> Result<Message> {
        match (row.list.is_empty(), row.combine) {
            (true, None) => Ok(Message::Plain),
            (false, None) if op == Op::AllGather => {
                let wrong = |(dtype, _): &&(DType, usize)| !TENSORS.contains(dtype);
                if let Some((dtype, _)) = row.list.iter().find(wrong) {
                    let names = TENSORS.map(DType::name).join(", ");
                    return Err(usage("type in list", dtype, format!("one of {names}")));
                }
                Ok(Message::List(row.list.clone()))
            }
            (true, Some(parts)) if matches!(op, Op::AllReduce | Op::ReduceScatter) => {
                Ok(Message::Parts(parts))
            }
            (true, Some(_)) => Err(usage("op with combine", op, "all_reduce or reduce_scatter")),
            (false, _) => Err(usage("op with list", op, "all_gather, without combine")),
        }
    }

    /// Number of columns of A and of C, in elements of the op, if an op without lists and parts has
    /// these.
    pub(super) fn columns(&self, options: &OpRequest, [a, c]: [usize; 2]) -> [usize; 2] {
        match self {
            Message::Plain => [a, c],
            Message::List(list) => {
                let bytes: usize = list.iter().map(|(dtype, n)| n * dtype.size()).sum();
                [a, c].map(|n| n + bytes.div_ceil(options.dtype.size()))
            }
            Message::Parts(parts) => [parts * a, c],
        }
    }

    /// Makes a plan; `auto` leaves the variant to it.
    pub(super) fn plan(
        &self,
        op: Op,
        variant: &str,
        ranks: Topology,
        options: &OpOptions,
    ) -> Result<Plan> {
        let OpRequest { m, n, dtype, tile, workgroups, rms_norm, batch_invariant, .. } = **options;
        if let Some(epsilon) = rms_norm.filter(|_| op != Op::AllReduce && *self != Message::Plain) {
            return Err(usage(format!("rms_norm of {op}"), epsilon, "no rms_norm"));
        }
        let ranks = ranks.on(options.backend);
        macro_rules! typed {
            ($op:ident) => {{
                let typed = $op::Options::rows(m, n).dtype(dtype).batch_invariant(batch_invariant);
                let typed = match op.variant(variant)? {
                    None => typed,
                    Some(iris_ops::Variant::Ll) => typed.variant($op::Variant::Ll),
                    Some(other) => {
                        let what = "variant of a list or of parts";
                        return Err(usage(what, other, "auto or ll"));
                    }
                };
                let typed = match tile {
                    Some(tile) => typed.tile(tile),
                    None => typed,
                };
                workgroups.map_or(typed.clone(), |workgroups| typed.workgroups(workgroups))
            }};
        }
        Ok(match self {
            Message::Plain => return suite::plan(op, variant, ranks, options),
            Message::List(list) => {
                let first = typed!(all_gather);
                let all = list.iter().fold(first, |all, &(dtype, n)| all.and(dtype, n));
                all.plan(ranks)?
            }
            Message::Parts(parts) if op == Op::ReduceScatter => {
                typed!(reduce_scatter).combine(*parts).plan(ranks)?
            }
            Message::Parts(parts) => {
                let sum = typed!(all_reduce).combine(*parts);
                rms_norm.map_or(sum.clone(), |epsilon| sum.rms_norm(epsilon)).plan(ranks)?
            }
        })
    }
}

/// Element types that a list of the benchmark may have.
const TENSORS: [DType; 5] = [DType::F32, DType::F16, DType::BF16, DType::I32, DType::U32];

/// Arguments of a gather of a list: `buffers` has those of input and output, `rows` their numbers of
/// rows, and `first` type and columns of the first tensor.
pub(super) fn gather(
    buffers: [SymSlice<u8>; 2],
    rows: [usize; 2],
    first: (DType, usize),
    list: &[(DType, usize)],
) -> Result<CollectiveArgs> {
    let tensors = |at: usize| tensors(buffers[at], rows[at], first, list);
    let mut pairs = tensors(0)?.into_iter().zip(tensors(1)?);
    let (input, output) = pairs.next().context("a list has a first tensor")?;
    let args = CollectiveArgs::new(input, output);
    Ok(pairs.fold(args, |args, (input, output)| args.and(input, output)))
}

/// Tensors of a list in the buffer `slice` of `rows` rows.
fn tensors(
    slice: SymSlice<u8>,
    rows: usize,
    first: (DType, usize),
    list: &[(DType, usize)],
) -> Result<Vec<MatRef>> {
    let row = [first].iter().chain(list).map(|(dtype, n)| n * dtype.size()).sum::<usize>();
    let mut at = 0;
    let tensor = |&(dtype, n): &(DType, usize)| {
        if !row.is_multiple_of(dtype.size()) {
            let expected = format!("a multiple of {}, the size of {dtype}", dtype.size());
            return Err(usage("bytes of a row of the list", row, expected));
        }
        let slice = slice.slice(at..)?;
        at += n * dtype.size();
        let tensor = match dtype {
            DType::I32 => MatRef::sym(slice.cast::<i32>()?, rows, n),
            DType::U32 => MatRef::sym(slice.cast::<u32>()?, rows, n),
            _ => matrix(slice, dtype, (rows, n))?,
        };
        Ok(tensor.with_ld(row / dtype.size()))
    };
    [first].iter().chain(list).map(tensor).collect()
}

/// Rows of `n` columns, each the sum of `count` weighted parts. `parts` has the parts of the first row
/// one after the other, then those of the next row; `weights` has a weight for each part.
pub(super) fn combined(parts: &[f64], weights: &[f32], (count, n): (usize, usize)) -> Vec<f64> {
    let rows = parts.chunks_exact(count * n).zip(weights.chunks_exact(count));
    let sum = |row: &[f64], weights: &[f32], col: usize| -> f64 {
        let parts = weights.iter().zip(row.chunks_exact(n));
        parts.map(|(&weight, part)| f64::from(weight) * part[col]).sum()
    };
    rows.flat_map(|(row, weights)| (0..n).map(move |col| sum(row, weights, col))).collect()
}

#[cfg(test)]
mod tests {
    use iris_heap::BackendKind;
    use iris_testkit::error_texts::fails;

    use super::*;

    #[test]
    fn what_a_row_cannot_send_is_named() {
        let row = |text: &str| -> Row { toml::from_str(text).unwrap() };
        let message = |text: &str| {
            let row = row(&format!("{text}\nshapes = []"));
            Message::new(&row, row.op.parse().unwrap())
        };
        let list = "list = [[\"i32\", 8]]";
        fails(message(&format!("op = \"all_reduce\"\n{list}")), &["all_reduce", "all_gather"]);
        fails(message("op = \"all_gather\"\ncombine = 8"), &["all_gather", "reduce_scatter"]);
        let both = format!("op = \"all_gather\"\ncombine = 8\n{list}");
        fails(message(&both), &["all_gather", "without combine"]);
        fails(message("op = \"all_gather\"\nlist = [[\"u8\", 8]]"), &["u8", "i32"]);

        let plan = |op, message: Message, variant, options: OpOptions| {
            message.plan(op, variant, Topology::new(0, 2), &options.backend(BackendKind::Cuda))
        };
        let options = || OpOptions::new(8, 7168, 0).dtype(DType::BF16);
        let list = || Message::List(vec![(DType::I32, 8)]);
        fails(plan(Op::AllGather, list(), "push", options()), &["push", "auto or ll"]);
        let normed = options().rms_norm(1e-5);
        let parts = plan(Op::ReduceScatter, Message::Parts(8), "auto", normed.clone());
        fails(parts, &["rms_norm of reduce_scatter"]);
        fails(plan(Op::AllGather, list(), "auto", normed), &["rms_norm of all_gather"]);
        let ll = plan(Op::AllGather, list(), "ll", options()).unwrap();
        assert!(ll.to_string().contains("8 x (7168 bf16, 8 i32)"), "{ll}");
        assert_eq!(list().columns(&options(), [7168; 2]), [7184; 2]);
    }
}
