//! Two things that every file may need and that need no other.

use std::any::Any;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The state behind these locks is consistent between any two statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    if let Some(text) = panic.downcast_ref::<&str>() {
        (*text).into()
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text.clone()
    } else {
        "no text".into()
    }
}
