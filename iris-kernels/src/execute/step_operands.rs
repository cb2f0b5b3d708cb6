//! Operands of the steps of a call: their rows, their positions in the workspace, and the kernel
//! arguments built from them.
//!
//! The GEMM library uses the first part of the workspace. The [`Areas`] of the program (regions for
//! intermediate matrices) follow.

use std::borrow::Cow;
use std::ops::Range;

use super::message::{self, Message};
use crate::args::{Matrix, OpArgs, producer, rows_of};
use crate::program::{
    Area, Areas, At, Gemm, KernelOperands, Rows, Sizes, Source, Target, Transfer,
};
use crate::schedule::split;

/// Operands of the steps of one call, computed from the call's arguments and workspace.
pub(super) struct Places<'a> {
    pub(super) args: &'a OpArgs,
    /// Regions of the workspace for the intermediate matrices of the program.
    pub(super) areas: Areas,
    /// Size of the first part of the workspace, which the GEMM library uses, in bytes.
    pub(super) library_bytes: u64,
}

impl Places<'_> {
    /// Workspace area `area` as a matrix.
    pub(super) fn area(&self, area: Area) -> Matrix {
        let OpArgs { heap, workspace, .. } = self.args;
        let first = heap.data[heap.rank as usize] + workspace + self.library_bytes;
        self.areas.matrix(area, &Sizes::of(self.args), first)
    }

    /// Range of the rows that this rank owns, counted from row 0 of the whole matrix.
    pub(super) fn own(&self) -> Range<u32> {
        self.owned_by(self.args.channel.rank)
    }

    fn owned_by(&self, rank: u32) -> Range<u32> {
        split(self.args.m, self.args.channel.size, rank)
    }

    /// Returns the rows of `matrix` that this rank owns if `to` is [`Target::OwnOfC`], otherwise
    /// `matrix`.
    fn target(&self, matrix: Matrix, to: Target) -> Matrix {
        match to {
            Target::OwnOfC if matrix.address != 0 => rows_of(matrix, &self.own()),
            _ => matrix,
        }
    }

    /// Maximum number of parts in which the rows of one rank are sent.
    pub(super) fn parts(&self) -> u32 {
        message::grid(self.args).parts(0).count() as u32
    }

    /// Rows that a GEMM multiplies, counted from row 0 of the whole matrix; `None` if the step has
    /// nothing to do.
    fn rows(&self, rows: Rows, at: At) -> Option<Range<u32>> {
        rows.of(&message::grid(self.args), self.args.channel.rank, at)
    }

    /// Rows that a step adds up, counted from the first row that this rank owns; `None` if the step
    /// has nothing to do.
    pub(super) fn own_rows(&self, at: At) -> Option<Range<u32>> {
        let own = self.own();
        match at.part {
            None => Some(0..own.end - own.start),
            Some(_) => {
                let rows = self.rows(Rows::Part, At { peer: None, ..at })?;
                Some(rows.start - own.start..rows.end - own.start)
            }
        }
    }

    /// Arguments of a GEMM that does not communicate; `None` if the step has nothing to do.
    pub(super) fn product(&self, gemm: &Gemm, at: At) -> Option<OpArgs> {
        let rows = self.rows(gemm.rows, at)?;
        let own = self.own();
        let a = match gemm.source {
            Source::Input => rows_of(self.args.a, &rows),
            Source::Shard => rows_of(self.args.a, &(rows.start - own.start..rows.end - own.start)),
            Source::Area(area) => rows_of(self.area(area), &rows),
        };
        let none = Matrix::default();
        let args = match gemm.to {
            // A partial product gets no bias, residual and epilogue here, because these are applied
            // once, to the sum of all partials.
            Target::Area(area) => {
                let c = self.area(area);
                OpArgs { c, bias: none, residual: none, epilogue: 0, ..*self.args }
            }
            Target::C | Target::Own | Target::OwnOfC => *self.args,
        };
        Some(OpArgs { a, c: rows_of(args.c, &rows), m: rows.end - rows.start, ..args })
    }

    /// Operands of a GEMM, in a call of two ranks, that also adds rows received from the peer.
    /// Returns the arguments of the product, and the matrix that is added. `rows` is counted from
    /// the first row that this rank owns.
    pub(super) fn adding(&self, to: Target, rows: &Range<u32>) -> (OpArgs, Matrix) {
        let own = self.own();
        let taken = own.start + rows.start..own.start + rows.end;
        let a = rows_of(self.args.a, &taken);
        let c = rows_of(self.target(self.args.c, to), rows);
        // The peer's block is block 1 - rank of the inbox, which has one block per rank, this rank
        // included, in the order of ranks.
        let peer = (1 - self.args.channel.rank) * (own.end - own.start);
        let inbox = self.message(Transfer::Blocks).args.c;
        let addend = rows_of(inbox, &(peer + rows.start..peer + rows.end));
        (OpArgs { a, c, m: rows.end - rows.start, ..*self.args }, addend)
    }

    /// Arguments of a GEMM that stores its result at peers.
    pub(super) fn storing(&self, to: Target) -> OpArgs {
        let [c, residual] = [self.args.c, self.args.residual].map(|it| self.target(it, to));
        OpArgs { c, residual, ..*self.args }
    }

    /// Arguments of a step that adds up the rows `rows` of all ranks' partials. Rows are counted
    /// from the first row that this rank owns.
    pub(super) fn sums(&self, to: Target, rows: &Range<u32>) -> OpArgs {
        let message = self.message(Transfer::Blocks).args;
        let own = self.own();
        let residual = self.target(self.args.residual, to);
        OpArgs {
            a: rows_of(rows_of(message.a, &own), rows),
            b: rows_of(message.c, rows),
            c: rows_of(self.target(self.args.c, to), rows),
            bias: self.args.bias,
            residual: if residual.address == 0 { residual } else { rows_of(residual, rows) },
            epilogue: self.args.epilogue,
            slot: u64::from(own.end - own.start) * message.c.ld * message.c.element_bytes(),
            sources: self.args.channel.size,
            ..message
        }
    }

    /// Arguments of a kernel that copies the rows received from a peer to their position in C;
    /// `None` if the step has nothing to do.
    pub(super) fn take(&self, of: Transfer, at: At) -> Option<OpArgs> {
        let source = at.peer?;
        let rows = match at.part {
            None => self.owned_by(source),
            Some(_) => self.rows(Rows::Part, at)?,
        };
        let message = self.message(of).args;
        let (a, c) = (rows_of(message.c, &rows), rows_of(self.args.c, &rows));
        Some(OpArgs { a, c, sources: 1, root: source, ..message })
    }

    /// Arguments of an operator's kernel whose operands are those named by `of`.
    pub(super) fn operands(&self, of: KernelOperands) -> Cow<'_, OpArgs> {
        let loads = |a| OpArgs { a, producer: producer::LOAD, ..*self.args };
        Cow::Owned(match of {
            KernelOperands::Call => return Cow::Borrowed(self.args),
            KernelOperands::Area(area) => loads(self.area(area)),
            KernelOperands::OwnRows => {
                let args = loads(rows_of(self.args.c, &self.own()));
                OpArgs { bias: Matrix::default(), epilogue: 0, ..args }
            }
            KernelOperands::Of(transfer) => self.message(transfer).args,
        })
    }

    /// Message by which the transfer `of` is carried out.
    pub(super) fn message(&self, of: Transfer) -> Message {
        let OpArgs { c, ref channel, .. } = *self.args;
        let own = self.own();
        let none = Matrix::default();
        let moves = |a, c| OpArgs {
            a,
            c,
            b: none,
            bias: none,
            residual: none,
            k: 0,
            epilogue: 0,
            producer: producer::LOAD,
            ..*self.args
        };
        let blocks = || {
            // The inbox has one block per rank: that rank's partial of the rows that this rank
            // owns.
            let rows = channel.size * (own.end - own.start);
            let inbox = Matrix { rows, ..self.area(Area::Blocks) };
            Message::scatter(moves(self.area(Area::Partial), inbox))
        };
        let gather = |to: Area| Message::gather(moves(rows_of(c, &own), self.area(to)));
        match of {
            Transfer::Shards => Message::gather(self.shards()),
            Transfer::Rows => gather(Area::Rows),
            Transfer::Blocks => blocks(),
            Transfer::Sums => gather(Area::Sums).with_signals_after(&blocks()),
        }
    }

    /// Arguments of the message that gathers A. If A is split by columns, the message gathers the
    /// rows of its transpose.
    fn shards(&self) -> OpArgs {
        let args = self.args;
        let message = OpArgs {
            c: self.area(Area::Gathered),
            b: Matrix::default(),
            bias: Matrix::default(),
            n: args.k,
            k: 0,
            epilogue: 0,
            producer: producer::LOAD,
            ..*args
        };
        if args.shard == 0 {
            return message;
        }
        let turned = |it: Matrix| Matrix {
            rows: it.cols,
            cols: it.rows,
            transposed: 1 - it.transposed,
            ..it
        };
        OpArgs {
            a: turned(message.a),
            c: turned(message.c),
            m: args.k,
            n: args.m,
            tile_m: args.tile_n,
            tile_n: args.tile_m,
            ..message
        }
    }
}
