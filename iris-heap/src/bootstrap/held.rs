//! Descriptors that end with the process of a rank: a forked child does not keep them open.
//!
//! Other ranks see from a rank's open sockets and locked files that its process lives. A child that
//! the rank forks inherits these descriptors and would keep them open after the rank's end. So a
//! fork handler replaces each of them by an unconnected socket in the child.

#![allow(
    unsafe_code,
    reason = "the C library's handlers of a fork, and descriptors by their numbers"
)]

use std::cell::Cell;
use std::collections::BTreeSet;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, Once};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::util::lock;

/// Numbers of the descriptors in all [`Held`] objects. Descriptors are made and closed while this
/// lock is held, and a fork takes the lock, so a child inherits no descriptor that is not listed.
/// Nothing else is done under the lock, so a fork never waits for another rank.
static NUMBERS: Mutex<BTreeSet<RawFd>> = Mutex::new(BTreeSet::new());

thread_local! {
    /// Guard of [`NUMBERS`] while this thread forks. It has no destructor, so it can be used even
    /// in a thread that is ending.
    static FORKING: Cell<Option<ManuallyDrop<MutexGuard<'static, BTreeSet<RawFd>>>>> = const { Cell::new(None) };
}

/// Object with a descriptor that a forked child does not keep open.
#[derive(Debug)]
pub(crate) struct Held<T: AsFd>(ManuallyDrop<T>);

impl<T: AsFd> Held<T> {
    /// Holds the object that `make` returns. `make` opens the object's descriptor, and must not
    /// block, because it runs under the lock.
    pub(super) fn new<E>(make: impl FnOnce() -> Result<T, E>) -> Result<Held<T>, E> {
        let mut numbers = numbers();
        Ok(Held::listed(make()?, &mut numbers))
    }

    fn listed(object: T, numbers: &mut BTreeSet<RawFd>) -> Held<T> {
        numbers.insert(object.as_fd().as_raw_fd());
        Held(ManuallyDrop::new(object))
    }

    /// Converts the object to another type with the same descriptor.
    pub(super) fn cast<U: AsFd>(self) -> Held<U>
    where
        T: Into<U>,
    {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not used again.
        let object = unsafe { ManuallyDrop::take(&mut this.0) };
        Held(ManuallyDrop::new(object.into()))
    }
}

impl<T: AsFd> Drop for Held<T> {
    fn drop(&mut self) {
        let mut numbers = lock(&NUMBERS);
        numbers.remove(&self.as_fd().as_raw_fd());
        // SAFETY: the object is dropped here only.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}

impl<T: AsFd> Deref for Held<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: AsFd> DerefMut for Held<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T: AsFd> AsFd for Held<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Makes two connected Unix sockets, both in this process.
pub(super) fn pair() -> std::io::Result<(Held<UnixStream>, Held<UnixStream>)> {
    let mut numbers = numbers();
    let (one, other) = UnixStream::pair()?;
    Ok((Held::listed(one, &mut numbers), Held::listed(other, &mut numbers)))
}

/// Locks the numbers of all held descriptors. The first call registers the fork handlers.
fn numbers() -> MutexGuard<'static, BTreeSet<RawFd>> {
    static HANDLERS: Once = Once::new();
    HANDLERS.call_once(|| {
        // SAFETY: the handlers may run at any fork: they take a lock that no thread keeps, and in the
        // child they make system calls only.
        let failed = unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
        if failed != 0 {
            tracing::warn!("no memory for handlers of a fork: a child keeps connections open");
        }
    });
    lock(&NUMBERS)
}

extern "C" fn prepare() {
    FORKING.set(Some(ManuallyDrop::new(lock(&NUMBERS))));
}

extern "C" fn parent() {
    drop(FORKING.take().map(ManuallyDrop::into_inner));
}

extern "C" fn child() {
    let Some(mut numbers) = FORKING.take().map(ManuallyDrop::into_inner) else { return };
    let (unix, stream) = (AddressFamily::UNIX, SocketType::STREAM);
    let unconnected = socket_with(unix, stream, SocketFlags::CLOEXEC, None);
    // The set is not dropped, because a forked child must not free memory.
    for &number in ManuallyDrop::new(std::mem::take(&mut *numbers)).iter() {
        // SAFETY: objects of this library have these descriptors, and the child makes no call on them.
        // Their numbers stay valid, unless there is no room for another socket.
        unsafe {
            match &unconnected {
                Ok(socket) => libc::dup3(socket.as_raw_fd(), number, libc::O_CLOEXEC),
                Err(_) => libc::close(number),
            };
        }
    }
}
