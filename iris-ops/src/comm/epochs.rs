//! Communicators of a [`Member`], which go on after a lost rank.

use std::sync::{Arc, Mutex, PoisonError};

use iris_heap::{Member, Next};

use super::{Comm, OnStream, Options};
use crate::error::{Error, Result};

impl Comm {
    /// Opens a communicator of the ranks of the member's present epoch, as [`Comm::from_world`] does:
    /// collective. If a rank is lost, [`Comm::next`] goes on without it.
    ///
    /// # Errors
    /// The errors of [`Comm::from_world`]; [`Error::Comm`] if the epoch has ended, for a spare, and for
    /// a process that was left out.
    #[track_caller]
    pub fn from_member(
        stream: impl Into<OnStream>,
        member: &Arc<Member>,
        options: &Options,
    ) -> Result<Self> {
        let epoch = member.epoch();
        let world = member.world().map_err(Error::comm)?;
        let mut comm = Comm::from_world(stream, &world, options)?;
        comm.epoch = Mutex::new(Some((member.clone(), epoch)));
        Ok(comm)
    }

    /// Ends the communicator and goes on to the next epoch, as [`Member::next`] does, after an error
    /// if [`Member::is_revoked`] then returns true. Calls of other threads that wait fail, and later calls
    /// are refused. If the result is [`Next::Epoch`], the ranks open another communicator by
    /// [`Comm::from_member`]; a spare calls [`Member::next`] again.
    ///
    /// A program with more than a communicator takes a [`Session`](crate::Session).
    ///
    /// # Errors
    /// [`Error::Comm`] for a communicator that [`Comm::from_member`] did not open, that has gone on
    /// before, or whose epoch is not the member's present one, which then does not end; the errors of
    /// [`Member::next`].
    pub fn next(&self) -> Result<Next> {
        let invalid = |value: String, expected: &str| {
            let (what, expected) = ("communicator of Comm::next".into(), expected.into());
            Error::comm(iris_heap::Error::Invalid { what, value, expected })
        };
        let epoch = self.epoch.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (member, epoch) = epoch.ok_or_else(|| {
            let expected = "one of Comm::from_member that has not gone on; the member itself goes on by Member::next";
            invalid("one without an epoch".into(), expected)
        })?;
        if epoch != member.epoch() {
            let expected = format!("one of epoch {}, the member's present one", member.epoch());
            return Err(invalid(format!("one of epoch {epoch}"), &expected));
        }
        // Calls that wait for other ranks end, and with them the locks that they hold.
        member.revoke();
        drop(self.lock().take());
        member.next().map_err(Error::comm)
    }
}
