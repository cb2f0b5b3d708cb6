//! Entry record of a call: the parameters that a rank publishes when it enters the call. Its peers
//! compare the record with their own records.

use iris_heap::fnv;
use iris_kernels::args::dtype_code;
use iris_kernels::program::Areas;
use iris_sync::{Config, Field, Record};

use super::Operator;
use crate::check::Checked;
use crate::memory_needs::Area;
use crate::op_row;
use crate::plan::Choice;

impl Operator {
    /// Entry record with the fields that are equal in all calls of one choice (variant and tile).
    /// Each call adds M, N and the positions of its matrices.
    pub(super) fn record(&self, choice: &Choice) -> Record {
        let request = self.plan.request();
        let common = self.plan.row().common;
        // The types come from the plan and not from the matrices, because a rank that only receives
        // has no A.
        let types = [request.dtype, request.dtype, request.output_dtype(), request.wire_dtype()];
        let codes = types.map(|dtype| dtype_code(dtype).unwrap_or_default() as i32);
        let config = self.plan.fingerprint().into_iter();
        let config: String = config.map(|(name, value)| format!("{name}={value}\n")).collect();
        let mut record = Record::default();
        let mut set = |field: Field, value: i32| record.fields[field as usize] = value;
        set(Field::K, if common.k { request.k as i32 } else { 0 });
        set(Field::Dtypes, codes.iter().fold(0, |all, code| all << 8 | code));
        set(Field::Variant, hash(choice.variant.name().as_bytes()));
        let config = Config { hash: hash(config.as_bytes()) as u32, ..Config::default() };
        set(Field::Config, config.to_word());
        if choice.form.gemm == op_row::GemmStage::Gathered
            && let Some(whole) = self.plan.library_gemm(choice.form, (choice.max_size, choice.tile))
        {
            // In an all-gather of A, peers write directly into the gathered A in this rank's
            // workspace, instead of C.
            let offset = self.workspace.place(Area::Workspace) + whole.library_bytes();
            record.direct = i32::try_from(Areas::line(request.k as u32).max(1)).unwrap_or(i32::MAX);
            record.c_offset = [offset as i32, (offset >> 32) as i32];
        }
        record
    }

    /// Adds to the record the fields of a single call: M, N, the location of C, the root, and which
    /// optional matrices the call has. Folds `pulled`, the offset and the leading dimension at
    /// which peers read A, into the record's hash.
    pub(super) fn complete_record(&self, record: &mut Record, call: &Checked, pulled: (u64, u64)) {
        let form = self.plan.at(call.size(&self.plan)).form;
        record.fields[Field::M as usize] = call.m as i32;
        record.fields[Field::N as usize] = if self.plan.row().common.n { call.n as i32 } else { 0 };
        if self.plan.alone() {
            return;
        }
        let mut config = Config::from_word(record.fields[Field::Config as usize]);
        config.root = call.root as u8;
        config.bias = call.matrices.bias.is_some();
        config.added = call.matrices.added().count() as u8;
        if form.pulls {
            // Each rank reads its peers' A at the offset and leading dimension of its own A. Offset
            // and leading dimension must therefore be equal on all ranks, so they are part of the
            // hash.
            let place = [pulled.0.to_le_bytes(), pulled.1.to_le_bytes()];
            config.hash ^= hash(place.as_flattened()) as u32;
        }
        record.fields[Field::Config as usize] = config.to_word();
        let a = call.matrices.a.and_then(|a| a.sym_offset());
        // Peers write C directly, unless C is transposed or lies in the memory of A.
        if form.direct
            && let Some(c) = call.matrices.c.filter(|c| !c.is_transposed())
            && let (Some(offset), Ok(ld)) = (c.sym_offset(), i32::try_from(c.ld()))
            && a != Some(offset)
            && ld > 0
        {
            record.direct = ld;
            record.c_offset = [offset as i32, (offset >> 32) as i32];
        }
    }
}

/// Computes a 128-bit hash of `bytes` and folds it into 32 bits, the size of a field of the record.
fn hash(bytes: &[u8]) -> i32 {
    let all = fnv(&[bytes]);
    (all ^ all >> 32 ^ all >> 64 ^ all >> 96) as i32
}
