//! Words of 128 bits, which models treat as one word of 64 bits: the flag, and a number that stands
//! for the twelve bytes of data. So every engine sees one atomic access, as on a device.

use std::sync::Mutex;

use iris_sync::{LlQuad, LlWord, SymPair, SymWord};

/// All data that quads have had so far. Its index is the number that stands for it.
static SEEN: Mutex<Vec<[u32; 3]>> = Mutex::new(Vec::new());

/// Bits of all numbers that stand for data. They differ from the values that scenarios put into
/// words by themselves.
const MARK: u32 = 0x5100_0000;

/// Word that stands for a quad.
pub(crate) fn encode(quad: LlQuad) -> LlWord {
    let mut seen = SEEN.lock().expect("no user of the list panics");
    let known = seen.iter().position(|data| *data == quad.data);
    let number = known.unwrap_or_else(|| {
        seen.push(quad.data);
        seen.len() - 1
    });
    LlWord { data: MARK | number as u32, call: quad.call }
}

/// Quad for which a word stands. A word that stands for none, such as an initial one, gives data that
/// no scenario expects.
pub(crate) fn decode(word: LlWord) -> LlQuad {
    let seen = SEEN.lock().expect("no user of the list panics");
    let number = (word.data & MARK == MARK).then_some((word.data & !MARK) as usize);
    let data = number.and_then(|number| seen.get(number)).copied();
    LlQuad { data: data.unwrap_or([word.data; 3]), call: word.call }
}

/// Word in which models keep a quad: the half with the flag.
pub(crate) fn word(place: SymPair) -> SymWord {
    SymWord { rank: place.rank, index: place.index + 2 }
}
