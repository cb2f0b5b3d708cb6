//! Answers to the hooks that device headers call in a model.

use iris_sync::{Access, LlWord, Memory};

use crate::{Op, Place, Site, ThreadId};

/// A memory whose words and data are named by [`Place`].
///
/// A hook passes an operation as the headers name its order and scope, which need not be those of the table of accesses.
pub(crate) trait Target: Memory {
    /// Thread whose program runs.
    fn id(&self) -> ThreadId;

    /// Threads of a workgroup, and workgroups of this rank.
    fn extent(&self) -> (u32, u32);

    /// Barrier of the workgroup; returns whether all threads passed `ok`.
    fn vote_at(&self, ok: bool, site: Site) -> bool;

    /// Atomic operation on a word of 32 bits; returns the value before it. `access` is none for a user's own word.
    fn atomic(&self, access: Option<Access>, op: Op) -> i32;

    /// Load of a word with data and call number.
    fn load_wide(&self, op: Op, access: Access) -> LlWord;

    /// Store of a word with data and call number.
    fn store_wide(&self, op: Op, access: Access);

    /// Plain load.
    fn read(&self, place: Place) -> i32;

    /// Plain store.
    fn write(&self, place: Place, value: i32);
}
