//! Barriers between threads under loom. Threads wake each other directly, without words whose
//! accesses loom would permute.

use std::cell::{Cell, RefCell};

use super::LoomArena;
use crate::{Operation, ThreadId};

/// Barrier of threads: the threads that have arrived and the conjunction of their `ok` values.
pub(super) struct Meeting {
    pub(super) arrived: RefCell<Vec<ThreadId>>,
    pub(super) last: Cell<ThreadId>,
    pub(super) ok: Cell<bool>,
    pub(super) outcome: Cell<bool>,
}

/// Message that one thread leaves at a barrier for the thread that it wakes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Token {
    Nothing,
    /// Request to answer and then to go on waiting.
    Answer,
    /// Request to answer and then leave the barrier.
    AnswerAndLeave,
    /// Request to leave the barrier.
    Leave,
    /// Answer to a thread's request.
    Here,
}

/// Thread that sleeps at a barrier, with the means to wake it.
pub(super) struct Sleeper {
    pub(super) thread: RefCell<Option<loom::thread::Thread>>,
    pub(super) token: Cell<Token>,
}

impl LoomArena {
    /// Barrier of `count` threads; returns whether all passed `ok`. The last thread to arrive wakes
    /// the other threads one by one and waits for each answer, which orders their earlier accesses
    /// before its own. With a second message it releases each of them, which orders the accesses of
    /// all threads before their next ones.
    pub(super) fn meet(
        &self,
        id: ThreadId,
        meeting: &Meeting,
        count: usize,
        op: &Operation,
    ) -> bool {
        let ok = !matches!(op, Operation::Vote { ok: false });
        meeting.ok.set(meeting.ok.get() && ok);
        let mut others = Vec::new();
        {
            let mut arrived = meeting.arrived.borrow_mut();
            arrived.push(id);
            if arrived.len() == count {
                others.append(&mut arrived);
                others.pop();
            }
        }
        if others.is_empty() && count > 1 {
            loop {
                match self.sleep(id) {
                    Token::Answer => self.wake(meeting.last.get(), Token::Here),
                    Token::AnswerAndLeave => {
                        self.wake(meeting.last.get(), Token::Here);
                        break;
                    }
                    Token::Leave | Token::Here | Token::Nothing => break,
                }
            }
            return meeting.outcome.get();
        }
        let all: Vec<ThreadId> = others.iter().copied().chain([id]).collect();
        self.tell(|observer| observer.met(&all, op));
        meeting.outcome.set(meeting.ok.replace(true));
        meeting.last.set(id);
        let first = if others.len() == 1 { Token::AnswerAndLeave } else { Token::Answer };
        for &other in &others {
            self.wake(other, first);
            self.sleep(id);
        }
        if others.len() > 1 {
            others.iter().for_each(|&other| self.wake(other, Token::Leave));
        }
        meeting.outcome.get()
    }

    fn sleep(&self, id: ThreadId) -> Token {
        let token = &self.sleepers[&id].token;
        while token.get() == Token::Nothing {
            loom::thread::park();
        }
        token.replace(Token::Nothing)
    }

    fn wake(&self, id: ThreadId, token: Token) {
        let sleeper = &self.sleepers[&id];
        sleeper.token.set(token);
        if let Some(thread) = &*sleeper.thread.borrow() {
            thread.unpark();
        }
    }
}
