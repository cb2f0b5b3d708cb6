//! Names of the operators and of their variants. This module uses no other module of the crate.

use std::fmt;
use std::str::FromStr;

/// Error for an unknown name; its text lists the valid names.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{what} {value}: expected one of {expected}")]
pub struct UnknownName {
    /// Kind of object that the name should identify: `op`, `variant` or `device`.
    pub what: &'static str,
    /// Name that was not recognised.
    pub value: String,
    /// Valid names, separated by commas.
    pub expected: String,
}

/// Defines an enum whose values have a text name, with `Display`, `FromStr` and serde by that name.
macro_rules! named {
    ($(#[$doc:meta])* $type:ident, $what:literal {
        $($(#[$about:meta])* $name:ident = $text:expr,)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum $type {
            $($(#[$about])* $name,)*
        }

        impl $type {
            /// All values, in the order of declaration.
            pub const ALL: [$type; [$($text),*].len()] = [$($type::$name,)*];

            /// Name of the value. [`FromStr`] parses it, also with hyphens in place of underscores.
            pub const fn name(self) -> &'static str {
                match self { $($type::$name => $text,)* }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }

        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                let name = <std::borrow::Cow<'de, str>>::deserialize(from)?;
                name.parse().map_err(serde::de::Error::custom)
            }
        }

        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.serialize_str(self.name())
            }
        }

        impl AsRef<str> for $type {
            fn as_ref(&self) -> &str {
                self.name()
            }
        }

        impl FromStr for $type {
            type Err = UnknownName;

            fn from_str(text: &str) -> Result<Self, UnknownName> {
                let wanted = text.replace('-', "_");
                let found = $type::ALL.into_iter().find(|one| one.name() == wanted);
                found.ok_or_else(|| UnknownName {
                    what: $what,
                    value: text.into(),
                    expected: $type::ALL.map($type::name).join(", "),
                })
            }
        }
    };
}

macro_rules! name_operators {
    ($($module:ident: $op:ident,)*) => {
        named! {
            /// Operators of this crate. The enum is exhaustive on purpose: a new operator breaks
            /// every `match` that must handle it.
            Op, "op" {
                $(#[doc = concat!("[`", stringify!($op), "`](crate::", stringify!($op), ").")]
                $op = stringify!($module),)*
            }
        }
    };
}
// `each_operator!` passes the list of operators, which is in `ops/mod.rs`, to the macro
// `name_operators`.
each_operator!(name_operators);

named! {
    /// Variants of operators: ways to compute the same result. [`Op::variants`] lists the variants
    /// of one operator.
    Variant, "variant" {
        /// Every rank pushes its data to all ranks, and each rank itself adds the data of all
        /// ranks.
        OneShot = "one_shot",
        /// One rank, the owner of a tile, adds up the tile's data of all ranks and sends the sum to
        /// all ranks. In a broadcast, one receiver gets the tile from the root and forwards it to
        /// the other ranks.
        TwoShot = "two_shot",
        /// Ranks add their data to the sum at the tile's owner while they hold a spinlock.
        Spinlock = "spinlock",
        /// Ranks add their data to the sum at the tile's owner by atomic additions.
        Atomic = "atomic",
        /// Each rank pushes its tiles directly to the ranks that need them.
        Push = "push",
        /// LL protocol for small messages: each word carries data and a flag, so a message takes a
        /// single one-way latency.
        Ll = "ll",
        /// Two hops as in `two_shot`, by the LL protocol.
        TwoShotLl = "two_shot_ll",
        /// All-gather, barrier and product, one after the other: the simplest program, used for
        /// comparisons.
        Baseline = "baseline",
        /// The kernel of the product reads the peers' shards of A directly from their memory.
        Pull = "pull",
        /// Some workgroups fetch the peers' shards of A into a staging buffer while the others
        /// multiply.
        Staged = "staged",
        /// Whole-matrix GEMM, and then the collective; a sum over ranks uses the protocol of
        /// `two_shot`. For an all-gather of A, the collective comes before the GEMM.
        Unfused = "unfused",
        /// Whole-matrix GEMM, and then the sum over ranks by the protocol of `one_shot`.
        UnfusedOneShot = "unfused_one_shot",
        /// Whole-matrix GEMM, and then the sum over ranks by the LL protocol of `ll`.
        UnfusedLl = "unfused_ll",
        /// Whole-matrix GEMM, and then the sum over ranks by the protocol of `two_shot_ll`.
        UnfusedTwoShotLl = "unfused_two_shot_ll",
        /// Copies by the device's driver move the message in parts that overlap the GEMMs: parts of
        /// A arrive before they are multiplied, or parts of the product leave while the next part
        /// is multiplied. On NVIDIA GPUs, copy engines do the copies. AMD's runtime copies rows
        /// with gaps by kernels, which take compute units from the product. It also copies
        /// contiguous rows by kernels, unless `ROC_P2P_SDMA_SIZE=0` is set.
        CopyEngine = "copy_engine",
        /// Whole-matrix GEMM whose epilogue stores each tile directly to the peers that own it.
        Epilogue = "epilogue",
        /// Matrix product on one rank, without communication.
        Local = "local",
        /// Barrier in which every member sends a signal to every other member.
        Flat = "flat",
    }
}

impl Variant {
    /// Whether the order in which ranks add varies between runs. The last bits of a sum then vary
    /// too.
    pub const fn order_varies(self) -> bool {
        matches!(self, Variant::Spinlock | Variant::Atomic)
    }
}

/// Reason for which a plan chose a variant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ChoiceReason {
    /// The caller asked for the variant.
    Requested,
    /// `iris tune` measured the variant as the fastest for such calls on this machine.
    Tuned,
    /// The built-in tuning data says that the variant was measured as the fastest for such calls on
    /// this kind of device.
    Measured,
    /// The variant has the shortest predicted time of all variants that have run on such devices.
    Predicted,
}
