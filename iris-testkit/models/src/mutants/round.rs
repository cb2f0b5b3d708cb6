//! Scenarios that go through the whole range of the call counter in a few steps.

use std::collections::HashMap;
use std::time::Instant;

use iris_sync::ll::{HEAD, QUADS};
use iris_sync::{Call, Field, LINE_WORDS, LlWord, REFRESH_PERIOD, Record, SymWord};

use crate::ll::{self, Pattern};
use crate::{Failure, Place, Report, Rules, Scenario, ops, quads, search};

/// Number of states after which a search counts as unfinished.
pub const STATES: u64 = 20_000_000;

/// Searches the whole range of the call counter with two ranks. The op has words for eight tiles,
/// and most calls use three of them. Three calls run at every multiple of the refresh period; the
/// calls between are skipped. The calls `last` come more than 2^31 calls after the start: each
/// entry is a number of tiles or another op, see [`ops::instead`]. If `last` contains a staged
/// gather, the op has one tile, and rank 0 has two workgroups.
pub fn whole_range(rules: &Rules, last: &'static [u32]) -> Report {
    once_round(false, rules, last)
}

pub(super) fn once_round(on_headers: bool, rules: &Rules, last: &'static [u32]) -> Report {
    let staged = last.contains(&ops::instead::STAGED);
    let (tiles, each): (u32, &[u32]) = if staged { (1, &[1, 1, 1]) } else { (8, &[3, 3, 3]) };
    let name =
        format!("one_shot, {} of {tiles} tiles, once round the counter, then {last:?}", each[0]);
    all_round(name, 6, rules, |step, number| {
        let used = if step == 5 { last } else { each };
        // In every step, a word that no earlier step has changed holds the number before the very
        // first call, which is `REFRESH_PERIOD - 1`.
        let mut scenario = ops::partial(2, tiles, number, used).words(REFRESH_PERIOD - 2);
        if staged {
            scenario = scenario.groups(&[2, 1]).tiles(tiles, 2 * tiles);
        }
        if let Some(headers) = scenario.on_headers().filter(|_| on_headers) {
            scenario = headers;
        }
        let words = scenario.channel(0);
        // State after the skipped calls, which used `each[0]` tiles: words and entry records have
        // the number of the last skipped call.
        let mut left = Vec::new();
        for rank in 0..2 {
            let before = Call::new(number).previous();
            let fresh = (0..each[0]).map(|tile| (words.signal(rank, 1 - rank, tile), before));
            let entries = [before, before.previous()].map(|call| {
                let mut word = words.entry(rank, 1 - rank, call.parity());
                word.index += LINE_WORDS - 1;
                (word, call)
            });
            left.extend(fresh.chain(entries).map(|(word, call)| {
                (Place::Sym { rank, index: word.index }, call.number().into())
            }));
            left.push((Place::Dev { rank, index: words.call }, number.into()));
        }
        (scenario, left)
    })
}

/// Goes through the whole range of the call counter, three calls at each multiple of the refresh
/// period. `at(step, number)` returns the scenario of a step, whose calls begin with `number`, and
/// the words that the skipped calls have left. All interleavings of a step must end in the same
/// state, in which the next step begins.
fn all_round(
    scenario: String,
    steps: u32,
    rules: &Rules,
    mut at: impl FnMut(u32, i32) -> (Scenario, Vec<(Place, i64)>),
) -> Report {
    let start = Instant::now();
    let mut number = REFRESH_PERIOD - 1;
    let mut memory: HashMap<Place, i64> = HashMap::new();
    let mut executions = 0;
    let mut report = None;
    for step in 0..steps {
        let (mut scenario, left) = at(step, number);
        if step > 0 {
            memory.extend(left);
        }
        scenario.initial.extend(memory.iter().map(|(&place, &value)| (place, value)));
        let (mut part, mut ends) = search::exhaust_to_ends(&scenario, rules, STATES);
        executions += part.executions;
        if part.failure.is_none() && ends.len() != 1 {
            part.failure = Some(Failure::Other(format!("{} different ends", ends.len())));
        }
        let failed = part.failure.is_some();
        report = Some(part);
        if failed {
            break;
        }
        memory.extend(ends.swap_remove(0));
        number = number.wrapping_add(REFRESH_PERIOD);
    }
    let report = report.unwrap_or_else(|| unreachable!("there are steps"));
    Report { scenario, executions, seconds: start.elapsed().as_secs_f64(), ..report }
}

/// Number of items in each of the last three calls of [`slots_whole_range`]. Two of these calls,
/// one of each parity, use the item that the skipped calls did not use.
pub(super) const LAST: &[u32] = &[1, 2, 2];

/// Searches the whole range of LL call numbers with two ranks: 2^32 calls, so that the first
/// numbers come again. Ranks have words for two items, of which most calls use one. Three calls run
/// at every multiple of the refresh period; the calls between are skipped. The first three calls
/// use both items, the last three the numbers of items in `LAST`. `pattern` is [`Pattern::All`] or
/// [`Pattern::Packs`], in which the second of the last calls tests packs and the third pairs.
pub fn slots_whole_range(on_headers: bool, pattern: Pattern, rules: &Rules) -> Report {
    let name = format!("ll {pattern:?}, 1 of 2 items, once round the counter, then {LAST:?}");
    all_round(name, 9, rules, |step, number| {
        let used: &'static [u32] = match step {
            0 => &[2, 2, 2],
            8 => LAST,
            _ => &[1, 1, 1],
        };
        let scenario = ll::partial(pattern, 2, number, used);
        let mut scenario = scenario.without_heads().words(REFRESH_PERIOD - 2);
        if step == 8 {
            // The last calls have the numbers of the first ones, so another M is set: it makes
            // their values differ.
            let mut record = Record::default();
            record.fields[Field::M as usize] = 1;
            scenario = scenario.record(0, record).record(1, record);
        }
        if let Some(headers) = scenario.on_headers().filter(|_| on_headers) {
            scenario = headers;
        }
        let words = scenario.channel(0);
        // State after the skipped calls, which had one item: words and entry records have the
        // number of the last skipped call.
        let mut left = Vec::new();
        let before = Call::new(number).previous();
        for rank in 0..2 {
            for call in [before, before.previous()] {
                let entry = words.entry(rank, 1 - rank, call.parity()).index + LINE_WORDS - 1;
                left.push((Place::Sym { rank, index: entry }, call.number().into()));
                for pair in 0..HEAD + 1 {
                    let first = words.pair(rank, 1 - rank, call.parity(), pair).index;
                    let old = LlWord { data: 0, call: call.number() }.to_bits() as i64;
                    left.extend([first, first + 2].map(|index| (Place::Wide { rank, index }, old)));
                }
                for quad in (0..QUADS).filter(|_| pattern.in_packs()) {
                    let place = words.quad(rank, 1 - rank, call.parity(), (0, quad));
                    let SymWord { rank, index } = quads::word(place);
                    let old = LlWord { data: 0, call: call.number() }.to_bits() as i64;
                    left.push((Place::Wide { rank, index }, old));
                }
            }
            left.push((Place::Dev { rank, index: words.call }, number.into()));
        }
        (scenario, left)
    })
}
