//! Names of the operators and of their variants. This module imports nothing else of the crate.

use std::fmt;
use std::str::FromStr;

/// Error for an unknown name; its text lists the valid names.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{what} {value}: expected one of {expected}")]
pub struct UnknownName {
    /// Kind of thing that was named: `op`, `variant` or `device`.
    pub what: &'static str,
    /// Name that was given.
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

            /// Name of the value. [`FromStr`] reads it, also with hyphens in place of underscores.
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
            /// Operators. The enum is exhaustive on purpose: a new operator breaks every `match`
            /// that must handle it.
            Op, "op" {
                $(#[doc = concat!("[`", stringify!($op), "`](crate::", stringify!($op), ").")]
                $op = stringify!($module),)*
            }
        }
    };
}
// `each_operator!` passes the list of operators, from `ops/mod.rs`, to the macro above.
each_operator!(name_operators);

named! {
    /// Variants of operators: ways to compute the same result. [`Op::variants`] lists those of an
    /// operator.
    Variant, "variant" {
        /// Every rank pushes its data to all ranks, and each adds up everything itself.
        OneShot = "one_shot",
        /// The owner of a tile adds it up and sends the sum to all. For a broadcast: a rank gets
        /// the tile from the root and passes it on to the others.
        TwoShot = "two_shot",
        /// Ranks add into the owner's tile under a spinlock.
        Spinlock = "spinlock",
        /// Ranks add into the owner's tile by atomic additions.
        Atomic = "atomic",
        /// Each rank pushes tiles directly to the ranks that need them.
        Push = "push",
        /// LL protocol for small messages: each word carries data and flag, so a message takes one
        /// one-way latency.
        Ll = "ll",
        /// All-gather, barrier, product, one after the other: the simplest program, for
        /// comparisons.
        Baseline = "baseline",
        /// The product reads peers' shards of A directly from their memory.
        Pull = "pull",
        /// Some workgroups fetch peers' shards into a staging buffer while the others multiply.
        Staged = "staged",
        /// Whole-matrix GEMM, then the message (for a sum by `two_shot`); for an all-gather of A
        /// the message comes first.
        Unfused = "unfused",
        /// Whole-matrix GEMM, then the sum by `one_shot`.
        UnfusedOneShot = "unfused_one_shot",
        /// Whole-matrix GEMM, then the sum by the LL protocol (`ll`).
        UnfusedLl = "unfused_ll",
        /// Copies by the device's driver push parts of the message, and each part is multiplied
        /// when it has arrived. On NVIDIA GPUs copy engines do the copies. AMD's runtime copies by
        /// kernels, which take compute units from the product: always if rows have gaps, and for
        /// contiguous rows unless `ROC_P2P_SDMA_SIZE=0` is set.
        CopyEngine = "copy_engine",
        /// Whole-matrix GEMM whose epilogue stores tiles to the peers that own them.
        Epilogue = "epilogue",
        /// Product on one rank, without communication.
        Local = "local",
        /// Barrier in which every member signals every other.
        Flat = "flat",
    }
}

impl Variant {
    /// Whether the order in which ranks add varies between runs, and with it the last bits of a
    /// sum.
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
    /// The variant was measured as the fastest for such calls on this kind of device.
    Measured,
    /// The variant has the shortest predicted time of those that have run on such devices.
    Predicted,
}
