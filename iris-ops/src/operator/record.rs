//! What a rank says about a call, for its peers to compare with what they say.

use iris_heap::fnv;
use iris_kernels::args::dtype_code;
use iris_kernels::program::Areas;
use iris_sync::{Field, Record};

use super::Operator;
use crate::check::Call;
use crate::needs::Area;
use crate::plan::Choice;
use crate::spec;

impl Operator {
    /// All but the shape and where the matrices lie.
    pub(super) fn record(&self, choice: &Choice) -> Record {
        let request = self.plan.request();
        let common = self.plan.row().common;
        // Those of the plan: a rank that only receives has no A.
        let types = [request.dtype, request.dtype, request.output_dtype(), request.wire_dtype()];
        let codes = types.map(|dtype| dtype_code(dtype).unwrap_or_default() as i32);
        let config = self.plan.fingerprint().into_iter();
        let config: String = config.map(|(name, value)| format!("{name}={value}\n")).collect();
        let mut record = Record::default();
        let mut set = |field: Field, value: i32| record.fields[field as usize] = value;
        set(Field::K, if common.k { request.k as i32 } else { 0 });
        set(Field::Dtypes, codes.iter().fold(0, |all, code| all << 8 | code));
        set(Field::Variant, hash(choice.variant.name().as_bytes()));
        set(Field::Config, hash(config.as_bytes()));
        if choice.form.whole == spec::Whole::Gathered
            && let Some(whole) = self.plan.whole(choice.form, (choice.upto, choice.tile))
        {
            // What peers write is A, in the workspace of every rank.
            let offset = self.workspace.place(Area::Workspace) + whole.library_bytes();
            record.direct = i32::try_from(Areas::line(request.k as u32).max(1)).unwrap_or(i32::MAX);
            record.c_offset = [offset as i32, (offset >> 32) as i32];
        }
        record
    }

    /// The rest, for one call; `pulled` is where peers read A.
    pub(super) fn say(&self, record: &mut Record, call: &Call, pulled: (u64, u64)) {
        let form = self.plan.at(call.size(&self.plan)).form;
        record.fields[Field::M as usize] = call.m as i32;
        record.fields[Field::N as usize] = if self.plan.row().common.n { call.n as i32 } else { 0 };
        if self.plan.alone() {
            return;
        }
        if call.root != self.plan.request().root {
            record.fields[Field::Config as usize] ^= hash(&call.root.to_le_bytes());
        }
        if form.pulls {
            // Peers read A at this rank's own offset and leading dimension.
            let place = [pulled.0.to_le_bytes(), pulled.1.to_le_bytes()];
            record.fields[Field::Config as usize] ^= hash(place.as_flattened());
        }
        let a = call.matrices.a.and_then(|a| a.sym_offset());
        // Not where C is A itself, nor where it is transposed.
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

/// A hash of 32 bits, to which all of the longer one contribute.
fn hash(bytes: &[u8]) -> i32 {
    let all = fnv(&[bytes]);
    (all ^ all >> 32 ^ all >> 64 ^ all >> 96) as i32
}
