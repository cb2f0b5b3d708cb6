//! What all ops have in common: the workspace, the words, the launch, and what goes wrong.

mod beside;
mod left;
mod new;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use iris_heap::abi::abort;
use iris_heap::{BackendKind, DevWords, RawSlice, Stream, SymmetricHeap};
use iris_kernels::args::{Matrix, OpArgs, counter, dtype_code, epilogue, producer};
use iris_kernels::{Kernel, Launcher};
use iris_sync::{Channel, Field, Record};

use crate::args::{CopyArgs, MatmulArgs};
use crate::config::{Epilogue, Options, Shard, StagingLayout};
use crate::error::{Error, InOp, Result};
use crate::matrix::MatRef;
use crate::plan::Plan;

pub use left::Counters;

/// An op on one rank: its share of the heap and everything needed to launch it.
///
/// Ops are `Send` and not `Sync`: one stream at a time. An op that is dropped without
/// being freed keeps its block until its heap closes.
pub(crate) struct Core {
    heap: Arc<SymmetricHeap>,
    plan: Plan,
    args: OpArgs,
    signal: Option<RawSlice>,
    data: Vec<(&'static str, RawSlice)>,
    words: DevWords,
    /// Words of the channel, before the counters.
    channel_words: usize,
    launcher: Launcher,
    groups: u32,
}

/// One call, checked and ready to launch.
#[derive(Clone, Copy, Default)]
pub(crate) struct Call<'a> {
    pub(crate) m: usize,
    pub(crate) a: Option<&'a MatRef>,
    pub(crate) b: Option<&'a MatRef>,
    pub(crate) c: Option<&'a MatRef>,
    pub(crate) bias: Option<&'a MatRef>,
    /// Whether C may be A itself.
    pub(crate) in_place: bool,
    /// Whether peers read A where it lies.
    pub(crate) pulls: bool,
    /// Whether C holds the same on all ranks, so that peers may write it directly.
    pub(crate) direct: bool,
}

impl<'a> Call<'a> {
    /// Of a message whose output is the same on all ranks.
    pub(crate) fn message(m: usize, input: Option<&'a MatRef>, args: &'a CopyArgs) -> Self {
        Self { m, a: input, c: Some(&args.output), direct: true, ..Self::default() }
    }

    /// Of a product whose C is the same on all ranks.
    pub(crate) fn product(m: usize, args: &'a MatmulArgs) -> Self {
        let MatmulArgs { a, b, c, bias, .. } = args;
        let bias = bias.as_ref();
        Self { m, a: Some(a), b: Some(b), c: Some(c), bias, direct: true, ..Self::default() }
    }
}

/// Words of the device that hold the counters, behind those of the channel.
const COUNTER_WORDS: usize = counter::COUNT * 2;

/// Words of the device behind the counters: number and sequence of a call, for a kernel beside it.
const BESIDE_WORDS: usize = 2;

impl Core {
    fn template(&self, channel: Channel) -> OpArgs {
        let Plan { options, needs, tile, .. } = &self.plan;
        let place = |name| {
            let found = self.data.iter().find(|(known, _)| *known == name);
            found.map_or(0, |(_, slice)| slice.offset())
        };
        let code = |dtype| dtype_code(dtype).unwrap_or_default();
        let view = self.heap.view();
        let members = self.plan.members();
        OpArgs {
            heap: view,
            channel,
            inbox: place("inbox"),
            slot: needs.slot,
            results: place("results"),
            result_slot: needs.result_slot,
            workspace: place("workspace"),
            trace: match place("trace") {
                0 if options.trace_spans == 0 => 0,
                offset => view.data[view.rank as usize] + offset,
            },
            counters: view.device_words + self.words.offset() + self.channel_words as u64 * 4,
            n: options.n as u32,
            k: options.k as u32,
            tile_m: tile.m as u32,
            tile_n: tile.n as u32,
            k_group: needs.k_group,
            max_tiles: needs.places,
            max_results: needs.results,
            wire: code(options.wire_dtype()),
            epilogue: match options.epilogue {
                Epilogue::None => 0,
                Epilogue::Gelu => epilogue::GELU,
            },
            producer: if self.plan.product { producer::GEMM } else { producer::LOAD },
            root: options.root as u32,
            fetchers: self.fetchers(),
            shard: u32::from(options.shard == Shard::Columns),
            m_first: u32::from(options.staging == StagingLayout::MContiguous),
            m_contiguous: u32::from(options.staging == StagingLayout::MContiguous),
            members: [members as u32, (members >> 32) as u32],
            trace_spans: options.trace_spans,
            sources: needs.sources,
            record: self.record(),
            ..bytemuck::Zeroable::zeroed()
        }
    }

    /// What this rank says in every call: all but M and where its matrices lie.
    fn record(&self) -> Record {
        let Plan { options, common, .. } = &self.plan;
        // Those of the plan: a rank that only receives has no A.
        let types = [options.dtype, options.dtype, options.output_dtype(), options.wire_dtype()];
        let codes = types.map(|dtype| dtype_code(dtype).unwrap_or_default() as i32);
        let config = self.plan.fingerprint().into_iter().flat_map(|(name, value)| {
            let text = format!("{name}={value}\n");
            text.into_bytes()
        });
        let mut record = Record::default();
        let mut set = |field: Field, value: i32| record.fields[field as usize] = value;
        set(Field::N, if common.0 { options.n as i32 } else { 0 });
        set(Field::K, if common.1 { options.k as i32 } else { 0 });
        set(Field::Dtypes, codes.iter().fold(0, |all, code| all << 8 | code));
        set(Field::Variant, hash(self.plan.variant.bytes()));
        set(Field::Config, hash(config));
        record
    }

    fn fetchers(&self) -> u32 {
        match self.plan.options.fetchers {
            Some(fetchers) => fetchers as u32,
            None => (self.groups / 4).max(1),
        }
    }

    /// Check the matrices of a call and launch `kernels`, in this order, with this many workgroups
    /// each (none: as many as are resident and have something to do).
    pub(crate) fn run(
        &mut self,
        stream: &Stream,
        kernels: &[(Kernel, Option<u32>)],
        call: &Call<'_>,
    ) -> Result<()> {
        let op = self.plan.op;
        let all = self.groups_for(call.m);
        self.issue(kernels, call, |kernel, groups, args| {
            let groups = groups.unwrap_or(all);
            // SAFETY: `fill` checked every matrix against the heap, or its maker vouched for it;
            // the workspace is this op's own.
            #[allow(unsafe_code, reason = "the one place where ops hand addresses to kernels")]
            unsafe {
                self.launcher.launch(&self.heap, stream, (op, kernel), args, groups)
            }
        })
    }

    /// Check a call, then `launch` its kernels: all launches of a call follow each other, whoever
    /// else issues ops of this heap.
    ///
    /// A call whose first launch is enqueued and a later one is not can never end, and its number is
    /// taken: the heap takes no further calls, on this rank at once; its peers wait for it in vain.
    fn issue(
        &self,
        kernels: &[(Kernel, Option<u32>)],
        call: &Call<'_>,
        launch: impl Fn(Kernel, Option<u32>, OpArgs) -> iris_heap::Result<()>,
    ) -> Result<()> {
        let _issuing = self.heap.issue();
        let args = self.checked(call)?;
        for (enqueued, &(kernel, groups)) in kernels.iter().enumerate() {
            let launched = launch(kernel, groups, args);
            if launched.is_err() && enqueued > 0 {
                self.heap.control().set_host_abort(abort::INCOMPLETE);
            }
            launched.in_op(self.plan.op)?;
        }
        Ok(())
    }

    /// Workgroups of a call: on a GPU those without work would cost time, and poll.
    fn groups_for(&self, m: usize) -> u32 {
        let Options { workgroups, backend, .. } = self.plan.options;
        if workgroups.is_some() || backend == BackendKind::Cpu {
            return self.groups;
        }
        let work = self.plan.work(m, self.args.fetchers);
        if work <= self.groups { work } else { spread(self.groups, self.plan.size()) }
    }

    /// The arguments of a call, if it can be issued.
    fn checked(&self, call: &Call<'_>) -> Result<OpArgs> {
        let op = self.plan.op;
        self.heap
            .control()
            .check()
            .map_err(|cause| Error::Poisoned { op, cause: Box::new(cause) })?;
        if call.m > self.plan.options.m {
            return Err(Error::TooManyRows { op, rows: call.m, planned: self.plan.options.m });
        }
        self.fill(call)
    }

    fn fill(&self, call: &Call<'_>) -> Result<OpArgs> {
        let op = self.plan.op;
        let resolve = |name, matrix: Option<&MatRef>| match matrix {
            Some(matrix) => matrix.resolve(op, name, &self.heap),
            None => Ok(Matrix::default()),
        };
        let [a, b] = [resolve("A", call.a)?, resolve("B", call.b)?];
        let [c, bias] = [resolve("C", call.c)?, resolve("bias", call.bias)?];
        if let Some(written) = call.c {
            for (name, other, theirs) in
                [("A", call.a, &a), ("B", call.b, &b), ("bias", call.bias, &bias)]
            {
                let Some(other) = other else { continue };
                let same = name == "A" && call.in_place && c == *theirs;
                if !same && written.overlaps(&c, other, theirs) {
                    return Err(Error::Overlap { op, first: "C", second: name });
                }
            }
        }
        let mut args = self.args;
        args.m = call.m as u32;
        (args.a, args.b, args.c, args.bias) = (a, b, c, bias);
        if call.pulls {
            let a = call.a.filter(|a| !a.is_transposed()).and_then(MatRef::sym_offset);
            args.pulled = a.ok_or_else(|| Error::Invalid {
                op,
                what: format!("A of variant {}", self.plan.variant),
                value: "external or transposed".into(),
                expected: "rows in the symmetric heap, since peers read it where it lies".into(),
            })?;
            args.pulled_ld = self.pulled_ld(&args.a)?;
        }
        args.record.fields[Field::M as usize] = call.m as i32;
        if call.pulls {
            // Peers read A at this rank's own offset and leading dimension.
            let place = [args.pulled, args.pulled_ld].map(u64::to_le_bytes);
            args.record.fields[Field::Config as usize] ^= hash(place.into_iter().flatten());
        }
        if call.direct
            && !self.plan.alone()
            && let Some(c) = call.c.filter(|c| {
                !c.is_transposed()
                    && call.a.is_none_or(|a| {
                        a.sym_offset() != c.sym_offset() || a.sym_offset().is_none()
                    })
            })
            && let (Some(offset), Ok(ld)) = (c.sym_offset(), i32::try_from(c.ld()))
            && ld > 0
        {
            args.record.direct = ld;
            args.record.c_offset = [offset as i32, (offset >> 32) as i32];
        }
        Ok(args)
    }

    /// The leading dimension of A that peers read where it lies: the same on all ranks, or 0 for
    /// lines without gaps, whose lengths differ where the columns of A are split unevenly.
    fn pulled_ld(&self, a: &Matrix) -> Result<u64> {
        let Plan { op, options, .. } = &self.plan;
        let longest = match options.shard {
            Shard::Rows => options.k,
            Shard::Columns => options.k.div_ceil(self.plan.ranks.size),
        } as u64;
        let len = u64::from(a.cols);
        if a.ld == len {
            return Ok(0);
        }
        if a.ld > longest {
            return Ok(a.ld);
        }
        Err(Error::Invalid {
            op,
            what: "leading dimension of A".into(),
            value: a.ld.to_string(),
            expected: format!("{len}, or the same above {longest} on all ranks: peers read A"),
        })
    }

    /// Whether a fault of this heap is known; what enqueued work left behind.
    pub(crate) fn check(&self) -> Result<()> {
        self.heap.check().in_op(self.plan.op)
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Give the workspace back. Collective.
    #[track_caller]
    pub(crate) fn free(self) -> Result<()> {
        let op = self.plan.op;
        let slices = self.signal.into_iter().chain(self.data.iter().map(|&(_, slice)| slice));
        self.heap.free_many(&slices.collect::<Vec<_>>()).in_op(op)?;
        self.heap.free_device_words(self.words).in_op(op)
    }
}

/// At most so many workgroups, with no factor in common with the ranks: a workgroup has every so
/// many-th tile, and owners take turns, so that else one would own all of its tiles or none.
fn spread(groups: u32, size: u32) -> u32 {
    let common =
        |groups: u32| (2..=size).any(|f| size.is_multiple_of(f) && groups.is_multiple_of(f));
    (1..=groups).rev().find(|&groups| !common(groups)).unwrap_or(1)
}

/// FNV-1a, 32 bits.
fn hash(bytes: impl Iterator<Item = u8>) -> i32 {
    bytes.fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
        as i32
}
