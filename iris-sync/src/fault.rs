use core::fmt;

/// Error that ends a workgroup's part in a call; the fault record of this rank, or of a peer, has
/// the reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Aborted;

/// Kind of a fault: the reason for which a rank could not finish a call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
#[repr(i32)]
pub enum FaultKind {
    /// A peer did not enter the call within the deadline for entering.
    NotEntered = 1,
    /// A peer entered the call and then made no progress within the deadline for progress.
    NoProgress = 2,
    /// A peer entered the call with other arguments; `field` names the argument.
    Mismatch = 3,
    /// A peer gave up. `rank` is that peer, or the rank for which the peer had waited in vain.
    PeerGaveUp = 4,
    /// A peer is lost: its process or thread has ended, or it has dropped its world without close.
    PeerLost = 5,
    /// This rank's host aborted the kernels; `seen` is the host's abort code.
    HostAbort = 6,
    /// In an op over several nodes, this rank and its counterpart on another node (same local rank)
    /// are in different steps of the communication between nodes. `rank` is the number of the other
    /// node, `tile` the number of the step, and `field` the index of the value that differs in
    /// their records of the step.
    StepDiffers = 7,
}

impl FaultKind {
    /// Returns the kind with this number in a fault record, or `None` if there is no such kind.
    pub fn from_number(number: i32) -> Option<Self> {
        use FaultKind::*;
        [NotEntered, NoProgress, Mismatch, PeerGaveUp, PeerLost, HostAbort, StepDiffers]
            .into_iter()
            .find(|&kind| kind as i32 == number)
    }
}

/// Field of an entry record that ranks compare; the variants are in the order of the record's
/// words.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
#[repr(i32)]
pub enum Field {
    /// Id of the op in its heap. The ops of a heap are numbered in the order of their creation.
    Op = 0,
    /// Number of the call, counted over the calls of all ops of the heap.
    Sequence = 1,
    /// M: number of rows of the matrix product.
    M = 2,
    /// N: number of columns of the matrix product.
    N = 3,
    /// K: inner dimension of the matrix product.
    K = 4,
    /// Element types of A, B, C and of the data sent between ranks; one byte for each.
    Dtypes = 5,
    /// Variant of the op, as a number.
    Variant = 6,
    /// Other arguments and options of the call, as a [`Config`].
    Config = 7,
    /// Whether peers may write results directly into C. Ranks compare this field only if a kernel
    /// of the caller runs at the same time as the op and reads tiles of C as they arrive; in other
    /// calls it may differ.
    Direct = 8,
}

impl Field {
    /// Fields that the ranks of every op compare, in the order of the record's words.
    pub const ALL: [Field; 8] = [
        Field::Op,
        Field::Sequence,
        Field::M,
        Field::N,
        Field::K,
        Field::Dtypes,
        Field::Variant,
        Field::Config,
    ];
}

/// Value of [`Field::Config`]: arguments of a call other than its sizes, and a hash of its options.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Config {
    /// Rank that is the root of a broadcast, below 64; 0 for other calls.
    pub root: u8,
    /// Whether the call has a bias.
    pub bias: bool,
    /// Number of matrices that the call adds to the sum, such as a residual: 0, 1 or 2.
    pub added: u8,
    /// Hash (only the lower 23 bits are kept) of the tile shape and other options of the op. If
    /// ranks read each other's A, the hash includes the offset of A in the heap and its leading
    /// dimension.
    pub hash: u32,
}

impl Config {
    /// Encodes the arguments and the lower 23 bits of the hash in a word.
    pub fn to_word(self) -> i32 {
        let options = u32::from(self.bias) << 6 | u32::from(self.added & 3) << 7;
        (self.hash << 9 | options | u32::from(self.root & 63)) as i32
    }

    /// Decodes a word of [`Config::to_word`].
    pub fn from_word(word: i32) -> Self {
        let word = word as u32;
        let added = (word >> 7 & 3) as u8;
        Self { root: word as u8 & 63, bias: word >> 6 & 1 != 0, added, hash: word >> 9 }
    }

    /// Texts of two words of [`Config::to_word`], each listing only the arguments that differ
    /// between the two.
    fn differences(words: [i32; 2]) -> [String; 2] {
        let [one, other] = words.map(Config::from_word);
        [one.unlike(&other), other.unlike(&one)].map(|texts| texts.join(" and "))
    }

    /// Texts of those arguments of `self` that differ from `other`.
    fn unlike(&self, other: &Config) -> Vec<String> {
        let some = |is: bool, name: &str| format!("{} {name}", if is { "a" } else { "no" });
        let mut texts = Vec::new();
        if self.root != other.root {
            texts.push(format!("root {}", self.root));
        }
        if self.bias != other.bias {
            texts.push(some(self.bias, "bias"));
        }
        if self.added != other.added {
            texts.push(match self.added.max(other.added) {
                1 => some(self.added == 1, "residual"),
                _ => format!("{} added matrices", self.added),
            });
        }
        texts
    }
}

/// Fault record of a rank that could not finish a call. All fields are integers, so that a device
/// can write them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    /// Kind of the fault.
    pub kind: FaultKind,
    /// Number that identifies the op within its heap.
    pub op: i32,
    /// Number of the call that could not be finished.
    pub call: i32,
    /// Number of the awaited tile, or of the awaited piece (unit) of the staging buffer; -1 if the
    /// failed wait was for neither.
    pub tile: i32,
    /// Number of the rank that was awaited, that differs, or that is lost.
    pub rank: i32,
    /// Value that was found in the awaited word; in a mismatch, the peer's value.
    pub seen: i32,
    /// Value that was expected; in a mismatch, this rank's value.
    pub wanted: i32,
    /// Number of the differing [`Field`] in a mismatch; -1 in other faults.
    pub field: i32,
}

impl Fault {
    /// Encodes the record as words, in the order that the device headers use.
    pub fn to_words(&self) -> [i32; 8] {
        [
            self.kind as i32,
            self.op,
            self.call,
            self.tile,
            self.rank,
            self.seen,
            self.wanted,
            self.field,
        ]
    }

    /// Decodes a record from its words; `None` if the words hold no fault.
    pub fn from_words(words: [i32; 8]) -> Option<Self> {
        let [kind, op, call, tile, rank, seen, wanted, field] = words;
        let kind = FaultKind::from_number(kind)?;
        Some(Self { kind, op, call, tile, rank, seen, wanted, field })
    }

    /// Field that differs between the ranks, if this fault is a mismatch.
    pub fn differing(&self) -> Option<Field> {
        let fields = Field::ALL.into_iter().chain([Field::Direct]);
        fields.into_iter().find(|&field| field as i32 == self.field)
    }

    /// Whether the ranks differ only in the place of A: its offset in the heap or its leading
    /// dimension. Options of an op were compared when the op was made, so if only the hashes of a
    /// call differ, the places of A differ.
    pub fn is_about_place(&self) -> bool {
        let [theirs, ours] = [self.seen, self.wanted].map(Config::from_word);
        self.differing() == Some(Field::Config) && theirs.unlike(&ours).is_empty()
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault { op, call, tile, rank, seen, wanted, field, .. } = self;
        match self.kind {
            // The value found in the word is not printed, because it is the number of an older
            // call, which tells the user nothing.
            FaultKind::NotEntered => write!(
                f,
                "rank {rank} has not entered call {wanted} of operator {op}: it is late, has left out a call, \
                 or issues the operators of the heap in another order"
            ),
            FaultKind::NoProgress => {
                write!(f, "rank {rank} made no progress in call {call} of operator {op}: ")?;
                if *tile >= 0 {
                    write!(f, "tile {tile}, ")?;
                }
                write!(f, "saw {seen}, wanted {wanted}")
            }
            FaultKind::PeerGaveUp => write!(
                f,
                "rank {rank} gave up, or another rank gave up on it, and so did this rank in call {call} \
                 of operator {op}: the error of rank {rank} says why, or that of the other rank"
            ),
            FaultKind::PeerLost => {
                write!(f, "rank {rank} is lost: call {call} of operator {op} cannot end")
            }
            FaultKind::HostAbort => write!(
                f,
                "the host of rank {rank} told it to leave call {call} of operator {op} (code {seen})"
            ),
            FaultKind::StepDiffers => write!(
                f,
                "node {rank} is in another step between nodes: value {field} of its record is {seen}, this \
                 node has {wanted} (call {call} of operator {op})"
            ),
            FaultKind::Mismatch => {
                let differing = self.differing();
                let [theirs, ours] = match differing {
                    Some(Field::Config) if self.is_about_place() => {
                        ["A at one offset and leading dimension".into(), "it at another".into()]
                    }
                    Some(Field::Config) => Config::differences([*seen, *wanted]),
                    Some(field) => [format!("{field:?} {seen}"), wanted.to_string()],
                    None => [seen.to_string(), wanted.to_string()],
                };
                write!(
                    f,
                    "rank {rank} entered with {theirs}, this rank has {ours}: \
                     call {call} of operator {op}"
                )?;
                if differing == Some(Field::Sequence) {
                    // A call that uses the LL protocol writes no entry record, so the record found
                    // may be one of an older call.
                    f.write_str(
                        "; the two ranks have not issued the same operators before it, or this one with \
                         messages of different sizes",
                    )?;
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn survives_the_trip_through_words() {
        let fault = Fault {
            kind: FaultKind::Mismatch,
            op: 3,
            call: -7,
            tile: -1,
            rank: 2,
            seen: 100,
            wanted: 107,
            field: Field::M as i32,
        };
        assert_eq!(Fault::from_words(fault.to_words()), Some(fault));
        assert_eq!(Fault::from_words([0; 8]), None);
        assert_eq!(
            fault.to_string(),
            "rank 2 entered with M 100, this rank has 107: call -7 of operator 3"
        );
        let root = Config { root: 63, bias: true, hash: 0xabcdef12, ..Config::default() };
        assert_eq!(Config::from_word(root.to_word()), Config { hash: 0x4def12, ..root });
        let sum = Config { added: 2, ..Config::default() };
        assert_eq!(Config::from_word(sum.to_word()), sum);
        let alone = Config { added: 1, ..sum };
        let differ = Config::differences([sum, alone].map(Config::to_word));
        assert_eq!(differ, ["2 added matrices", "1 added matrices"]);
        let (seen, wanted) = (root.to_word(), Config { added: 1, ..root }.to_word());
        let options = Fault { field: Field::Config as i32, seen, wanted, ..fault };
        assert_eq!(
            options.to_string(),
            "rank 2 entered with no residual, this rank has a residual: call -7 of operator 3"
        );
        let wanted = Config { bias: false, root: 0, ..root }.to_word();
        let options = Fault { wanted, ..options }.to_string();
        let expected = "entered with root 63 and a bias, this rank has root 0 and no bias";
        assert!(options.contains(expected), "{options}");
        let wanted = Config { hash: 1, ..root }.to_word();
        let place = Fault { field: Field::Config as i32, seen, wanted, ..fault };
        assert!(place.is_about_place());
        let place = place.to_string();
        let expected =
            "entered with A at one offset and leading dimension, this rank has it at another";
        assert!(place.contains(expected), "{place}");
        let order = Fault { field: Field::Sequence as i32, ..fault };
        assert!(order.to_string().contains("not issued the same operators before it"), "{order}");
        // Messages must not show `seen` and `wanted` for kinds in which they are not call numbers.
        let other = |kind| Fault { kind, seen: 11, wanted: 13, ..fault }.to_string();
        let absent = other(FaultKind::NotEntered);
        assert!(absent.starts_with("rank 2 has not entered call 13 of operator 3"), "{absent}");
        assert!(absent.contains("another order") && !absent.contains("11"), "{absent}");
        let told = other(FaultKind::PeerGaveUp);
        assert!(told.contains("the error of rank 2") && !told.contains("11"), "{told}");
        assert!(!told.contains("13"), "{told}");
    }
}
