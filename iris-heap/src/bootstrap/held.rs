//! Descriptors that end with the process of a rank: a forked child does not keep them open.
//!
//! By a socket or a locked file of a rank the others see that the rank's process lives. A child that
//! the rank forks has a copy of each, and would keep them open after the rank's end. So in the child a
//! handler puts an unconnected socket in the place of each of them.

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

/// Numbers of the descriptors in all [`Held`] objects. Descriptors are made and closed under the lock,
/// and a fork takes it, so a child has no descriptor that is not listed. Nothing else happens under
/// the lock, so a fork waits for no other rank.
static NUMBERS: Mutex<BTreeSet<RawFd>> = Mutex::new(BTreeSet::new());

thread_local! {
    /// Lock of the numbers while this thread forks. It has no destructor, so a thread that ends may
    /// fork, too.
    static FORKING: Cell<Option<ManuallyDrop<MutexGuard<'static, BTreeSet<RawFd>>>>> = const { Cell::new(None) };
}

/// Object with a descriptor that a forked child does not keep open.
#[derive(Debug)]
pub(crate) struct Held<T: AsFd>(ManuallyDrop<T>);

impl<T: AsFd> Held<T> {
    /// Holds the object that `make` returns. `make` opens its descriptor, and waits for nothing.
    pub(super) fn new<E>(make: impl FnOnce() -> Result<T, E>) -> Result<Held<T>, E> {
        let mut numbers = numbers();
        Ok(Held::listed(make()?, &mut numbers))
    }

    fn listed(object: T, numbers: &mut BTreeSet<RawFd>) -> Held<T> {
        numbers.insert(object.as_fd().as_raw_fd());
        Held(ManuallyDrop::new(object))
    }

    /// Holds the same descriptor as another type.
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

/// Two connected sockets of this process.
pub(super) fn pair() -> std::io::Result<(Held<UnixStream>, Held<UnixStream>)> {
    let mut numbers = numbers();
    let (one, other) = UnixStream::pair()?;
    Ok((Held::listed(one, &mut numbers), Held::listed(other, &mut numbers)))
}

/// Locks the numbers of all descriptors. From the first call on, forks heed them.
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
    // The set is left as it is, because a child may not be able to free memory.
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
