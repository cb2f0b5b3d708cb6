//! Check of a program against the rules that every program must keep.

use std::fmt;

use super::{At, Core, EarliestStart, Gemm, Item, Lane, Overlap, Program, Step, When, Work, walk};
use crate::kernel::Kernel;

/// Violation of a rule by a program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Broken {
    /// Index of the alternative, from 0.
    pub alternative: usize,
    /// Description of the violation, with the step that violates the rule.
    pub what: String,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "alternative {}: {}", self.alternative, self.what)
    }
}

impl std::error::Error for Broken {}

/// State of an imagined call, which [`Program::check`] updates at each step to find violations.
#[derive(Default)]
struct State {
    opened: bool,
    ended: bool,
    /// Previous step on the call's stream; `None` at the start.
    before: Option<Work>,
    /// Whether the side stream has copies for which the call's stream does not wait yet.
    forked: bool,
    /// Step between nodes that may run on the device during the call; `None` if there is none.
    overlap: Option<Overlap>,
}

impl Program {
    /// Checks a program for a call of `parts` parts between `size` ranks, once with the work of
    /// each step and once with the steps that replace the work. The rules are:
    ///
    /// - exactly one step ends the call, and every later step is invisible to peers; a program
    ///   without any visible step (`local`) has no step that ends the call;
    /// - exactly one step opens the call, and no step before it is visible to peers;
    /// - copies on the side stream are joined before the call ends: the step that ends the call is
    ///   [`Work::Close`];
    /// - a launch that may begin while the call is being opened directly follows the step that
    ///   opens the call;
    /// - only the last alternative has no conditions; an alternative copies by engines only if it
    ///   requires engines or if its copies have steps that replace them;
    /// - a launch that waits for peers leaves room for a step between nodes that may be in flight
    ///   ([`Program::overlap`]), in each alternative that calls take ([`Program::takes`]).
    ///
    /// # Errors
    /// The first violation.
    pub fn check(&self, size: u32, parts: u32) -> Result<(), Broken> {
        let last = self.alternatives.len().checked_sub(1);
        let broken = |alternative, what: String| Err(Broken { alternative, what });
        for (number, of) in self.alternatives.iter().enumerate() {
            if (Some(number) == last) != of.when.is_empty() {
                return broken(
                    number,
                    format!(
                        "conditions {:?}: the last alternative must have none, every other one some",
                        of.when
                    ),
                );
            }
            for replaced in [false, true] {
                let overlap = self.overlap.filter(|_| self.takes(of));
                let mut state = State { overlap, ..State::default() };
                let items: Vec<&Item> = self.items(of).collect();
                let peers = || 1..size;
                let mut visit =
                    |step: &Step, at: At| state.enter(step, at, of.when, replaced, &peers, parts);
                let done = walk(items.iter().copied(), At::default(), (parts, &peers), &mut visit);
                if let Err(what) = done.and_then(|()| state.end()) {
                    return broken(number, what);
                }
            }
            if let Some(at) = misplaced(of.items, false) {
                return broken(number, format!("{at:?} is outside of a loop over parts"));
            }
        }
        match last {
            None => broken(0, "no alternative".into()),
            Some(_) => Ok(()),
        }
    }
}

/// First [`Item::PreviousPart`] (steps that process the previous part in a loop over parts) that is
/// wrongly outside of such a loop; `None` if there is none.
fn misplaced(items: &[Item], in_parts: bool) -> Option<&Item> {
    items.iter().find_map(|item| match item {
        Item::Do(step) => misplaced(step.or, false),
        Item::Parts(items) => misplaced(items, true),
        Item::PreviousPart(items) if in_parts => misplaced(items, false),
        Item::PreviousPart(_) => Some(item),
        Item::Peers(items) => misplaced(items, false),
    })
}

impl State {
    fn enter<Peers: Iterator<Item = u32>>(
        &mut self,
        step: &Step,
        at: At,
        when: &[When],
        replaced: bool,
        peers: &impl Fn() -> Peers,
        parts: u32,
    ) -> Result<(), String> {
        if replaced && !step.or.is_empty() {
            let mut visit =
                |step: &Step, at: At| self.enter(step, at, when, replaced, peers, parts);
            return walk(step.or, at, (parts, peers), &mut visit);
        }
        let work = step.work;
        let effects = work.effects();
        let wrong = |rule: &str| Err(format!("{work}: {rule}"));
        if let Work::Gemm(Gemm { core: Core::Exchanging(kernel), .. }) = work
            && !matches!(kernel, Kernel::OneShot | Kernel::OneShotLl)
        {
            return wrong("no GEMM kernel contains this message kernel");
        }
        if work.lane() == Lane::Side {
            let can = [When::Engines, When::Gated].iter().any(|it| when.contains(it));
            if !can && step.or.is_empty() {
                return wrong("copy engines may be unavailable, and no step replaces the copy");
            }
            self.forked = true;
        }
        if let Some(Overlap { step_blocks, left_free }) = self.overlap
            && work.waits()
        {
            if matches!(work, Work::Gemm(_)) {
                return wrong(
                    "it waits for peers and fills the device beside a step between nodes",
                );
            }
            if left_free < step_blocks {
                return wrong(&format!(
                    "it waits for peers and leaves {left_free} multiprocessors free, but a step between nodes has \
                     up to {step_blocks} thread blocks"
                ));
            }
        }
        if effects.opens && self.opened {
            return wrong("the call is already open");
        }
        if effects.are_visible() && self.ended {
            return wrong("the call has already ended");
        }
        if effects.are_visible() && !effects.opens && !self.opened {
            return wrong("visible to peers before the call is open");
        }
        if effects.ends && self.forked && !matches!(work, Work::Close(_)) {
            return wrong("copies on the side stream are not joined");
        }
        let after_open = self.before.is_some_and(|it| matches!(it, Work::Open(_)));
        if work.early() == EarliestStart::AfterOpen && !after_open {
            return wrong("it may begin early, but does not follow the step that opens the call");
        }
        self.opened |= effects.opens;
        self.ended |= effects.ends;
        if work.lane() == Lane::Main {
            self.before = Some(work);
        }
        Ok(())
    }

    fn end(&self) -> Result<(), String> {
        match (self.opened, self.ended) {
            (true, false) => Err("no step ends the call".into()),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{
        Alternative, KernelOperands, Rows, Source, Target, Transfer, always, kernel, or, step, when,
    };
    use super::*;

    const OPEN: Item = step(Work::Open(Transfer::Shards));
    const COPY: Item = step(Work::Copies(Transfer::Shards));
    const CLOSE: Item = step(Work::Close(Transfer::Shards));

    /// Expands to the text of the violation that [`Program::check`] must find in a program with the
    /// given alternatives.
    macro_rules! broken {
        ($($alternative:expr),*) => {{
            const ALTERNATIVES: &[Alternative] = &[$($alternative),*];
            Program::new(ALTERNATIVES).check(3, 2).expect_err("a rule is broken").what
        }};
    }

    #[test]
    fn launches_that_wait_leave_room_for_a_step_between_nodes() {
        const GATED: Item = step(Work::Gemm(Gemm {
            source: Source::Input,
            rows: Rows::All,
            to: Target::C,
            core: Core::Gated,
        }));
        const ONE_SHOT: Item = kernel(Kernel::OneShot);
        const WHOLE: &[Alternative] = &[always(&[OPEN, GATED, CLOSE])];
        const EITHER: &[Alternative] =
            &[when(&[When::Gated], &[OPEN, GATED, CLOSE]), always(&[ONE_SHOT])];
        const LOCAL: &[Alternative] = &[always(&[kernel(Kernel::Local)])];
        let check = |alternatives, left_free| {
            let overlap = Some(Overlap { step_blocks: 8, left_free });
            Program { overlap, ..Program::new(alternatives) }.check(3, 2).map_err(|it| it.what)
        };
        // The first alternative would break the rule, but no call uses this alternative while a
        // step between nodes may run.
        check(EITHER, 8).unwrap();
        check(LOCAL, 0).unwrap();
        for (alternatives, left, rule) in [
            (EITHER, 7, "leaves 7 multiprocessors free, but a step between nodes has up to 8"),
            (WHOLE, 8, "fills the device beside a step between nodes"),
        ] {
            let what = check(alternatives, left).unwrap_err();
            assert!(what.contains(rule), "{what}: expected {rule:?}");
        }
        Program::new(WHOLE).check(3, 2).unwrap();
    }

    #[test]
    fn each_rule_is_named_when_it_is_broken() {
        const GOOD: &[Alternative] = &[always(&[kernel(Kernel::OneShot)])];
        Program::new(GOOD).check(2, 1).unwrap();
        const ENDS: Item = step(Work::Kernel(Kernel::Gathered, KernelOperands::Call));
        const ENGINES: &[When] = &[When::Engines];
        const STORES: Item = step(Work::Gemm(Gemm {
            source: Source::Input,
            rows: Rows::All,
            to: Target::C,
            core: Core::Storing { blocks: true, results: None },
        }));
        const PUSH: Item = step(Work::Kernel(Kernel::Copies, KernelOperands::Of(Transfer::Shards)));
        const EITHER: Item = or(Work::Copies(Transfer::Shards), &[PUSH]);
        for (what, rule) in [
            (broken!(), "no alternative"),
            (broken!(when(&[When::Wide], &[OPEN, CLOSE])), "the last alternative must have none"),
            (broken!(always(&[OPEN])), "no step ends the call"),
            (broken!(always(&[OPEN, OPEN, CLOSE])), "open: the call is already open"),
            (broken!(always(&[OPEN, CLOSE, CLOSE])), "close: the call has already ended"),
            (broken!(always(&[kernel(Kernel::Convert)])), "before the call is open"),
            (broken!(when(ENGINES, &[OPEN, COPY, ENDS]), always(&[OPEN, CLOSE])), "not joined"),
            (broken!(always(&[OPEN, COPY, CLOSE])), "no step replaces the copy"),
            // A GEMM that stores to peers must directly follow the step that opens the call. If
            // workgroups copy in place of engines, their kernel comes between the two on the call's
            // stream.
            (broken!(always(&[OPEN, EITHER, STORES, CLOSE])), "does not follow"),
            (broken!(always(&[OPEN, Item::PreviousPart(&[]), CLOSE])), "outside of a loop"),
        ] {
            assert!(what.contains(rule), "{what}: expected {rule:?}");
        }
    }
}
