//! Lemmas about call numbers that wrap around. On machine words, `Call::reached_by` gives the order
//! of the calls as long as two calls are less than half the range apart. Parity and refresh can be
//! computed from the word instead of the call.

use super::smt::{self, Answer};

/// Statement about 64-bit numbers a and b, which stand for calls, and the 32-bit words that hold
/// them.
#[derive(Clone, Copy, Debug)]
pub struct Lemma {
    /// Text of the statement.
    pub name: &'static str,
    /// SMT-LIB assertions that contradict the statement.
    script: &'static str,
    /// Whether the statement is true. The false ones show that the bounds in the true ones are
    /// needed.
    pub holds: bool,
}

const WORDS: &str = "(declare-const a (_ BitVec 64))(declare-const b (_ BitVec 64))
(define-fun low ((x (_ BitVec 64))) (_ BitVec 32) ((_ extract 31 0) x))
(define-fun apart () (_ BitVec 64) (bvsub a b))
(define-fun half () (_ BitVec 64) #x0000000080000000)
(define-fun window () Bool (and (bvslt apart half) (bvsge apart (bvneg half))))
(define-fun order () Bool (bvsge apart #x0000000000000000))
(define-fun reached () Bool (bvsge (bvsub (low a) (low b)) #x00000000))
";

/// All lemmas about wrapping numbers.
pub const LEMMAS: [Lemma; 6] = [
    Lemma {
        name: "reached_by is the order of calls within half the range",
        script: "(assert window)(assert (not (= reached order)))",
        holds: true,
    },
    Lemma {
        name: "the remainder that the rule compares is reached_by",
        script: "(declare-const x Int)(assert (and (>= x (- 2147483648)) (< x 2147483648)))
(assert (not (= (< (mod x 4294967296) 2147483648) (>= x 0))))",
        holds: true,
    },
    Lemma {
        name: "a word tells the parity of its call, and whether it refreshes",
        script: "(assert (or (not (= ((_ extract 0 0) (low a)) ((_ extract 0 0) a)))
 (not (= (= (bvand (low a) #x1fffffff) #x00000000) (= (bvsmod a #x0000000020000000) #x0000000000000000)))
 (not (= (bvule (bvand (low a) #x1fffffff) #x00000001) (bvsle (bvsmod a #x0000000020000000) #x0000000000000001)))))",
        holds: true,
    },
    Lemma {
        name: "equal words are equal calls less than the range apart",
        script: "(assert (and (bvslt apart #x0000000100000000) (bvsgt apart (bvneg #x0000000100000000))))
(assert (not (= (= (low a) (low b)) (= a b))))",
        holds: true,
    },
    Lemma {
        name: "reached_by is the order of calls half the range apart, too",
        script: "(assert (and (bvsle apart half) (bvsge apart (bvneg half))))(assert (not (= reached order)))",
        holds: false,
    },
    Lemma {
        name: "signed words are in the order of calls within half the range",
        script: "(assert window)(assert (not (= (bvsge (low a) (low b)) order)))",
        holds: false,
    },
];

impl Lemma {
    /// Asks the solver whether the statement is true.
    pub fn settle(&self, limit: u64) -> Answer {
        smt::ask(&format!("{WORDS}{}\n", self.script), 0, limit)
    }

    /// Whether the solver's answer is the expected one.
    pub fn is_as_expected(&self, answer: &Answer) -> bool {
        *answer == if self.holds { Answer::Proved } else { Answer::Refuted }
    }
}
