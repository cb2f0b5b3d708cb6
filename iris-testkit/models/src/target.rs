//! Answers to the hooks that device headers call when a model runs them.

use iris_sync::{Access, LlWord, Memory};

use crate::{Operation, Place, Site, ThreadId};

/// Memory whose words and data are named by [`Place`].
///
/// A hook passes each operation with the order and scope that the headers name. These may differ
/// from the order and scope in the access table.
pub(crate) trait HookMemory: Memory {
    /// Identity of the thread whose program runs.
    fn id(&self) -> ThreadId;

    /// Number of threads of a workgroup, and number of workgroups of this rank.
    fn extent(&self) -> (u32, u32);

    /// Barrier of the workgroup; returns whether all threads passed `ok`.
    fn vote_at(&self, ok: bool, site: Site) -> bool;

    /// Atomic operation on a 32-bit word; returns the previous value. `access` is `None` for a word
    /// of a user's kernel.
    fn atomic(&self, access: Option<Access>, op: Operation) -> i32;

    /// Loads an LL word: data and call number.
    fn load_wide(&self, op: Operation, access: Access) -> LlWord;

    /// Stores an LL word: data and call number.
    fn store_wide(&self, op: Operation, access: Access);

    /// Loads a word without atomics.
    fn read(&self, place: Place) -> i32;

    /// Stores a word without atomics.
    fn write(&self, place: Place, value: i32);
}
