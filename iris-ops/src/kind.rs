//! The operators by name, and the ways they are done. Everything else in this crate is above it.

use std::fmt;
use std::str::FromStr;

/// A name that means nothing.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{what} {value}: expected one of {expected}")]
pub struct UnknownName {
    /// What it should name.
    pub what: &'static str,
    /// The name.
    pub value: String,
    /// The names there are.
    pub expected: String,
}

/// An enum whose values have names.
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
            /// All of them.
            pub const ALL: [$type; [$($text),*].len()] = [$($type::$name,)*];

            /// The name that [`FromStr`] reads, where hyphens are as good as underscores.
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
            /// The operators. A new one breaks whoever tells them apart, which is how one finds all places.
            Op, "op" {
                $(#[doc = concat!("[`", stringify!($op), "`](crate::", stringify!($op), ").")]
                $op = stringify!($module),)*
            }
        }
    };
}
// The list stands with the operators, in `ops/mod.rs`.
each_operator!(name_operators);

named! {
    /// The ways in which operators are done; [`Op::variants`] says which an operator has.
    Variant, "variant" {
        /// Every rank pushes to all, and each adds up all of it.
        OneShot = "one_shot",
        /// The owner of a tile adds it up, or gets it from the root, and sends it to all.
        TwoShot = "two_shot",
        /// Ranks add into the owner's tile under a lock.
        Spinlock = "spinlock",
        /// Ranks add into the owner's tile atomically.
        Atomic = "atomic",
        /// Tiles are pushed to whom they are for.
        Push = "push",
        /// Small messages to whom they are for, in words that carry their data: one way long.
        Ll = "ll",
        /// Gather, barrier, multiply.
        Baseline = "baseline",
        /// Multiply straight from the peers' memory.
        Pull = "pull",
        /// Some workgroups fetch, the others multiply.
        Staged = "staged",
        /// The product of whole matrices, then the sum by `two_shot`, or what else the message takes;
        /// or the message first, where it is A.
        Unfused = "unfused",
        /// The product of whole matrices, then the sum by `one_shot`.
        UnfusedOneShot = "unfused_one_shot",
        /// The product of whole matrices, then the sum by `ll`.
        UnfusedLl = "unfused_ll",
        /// Copies of the device's driver push, and each part is multiplied when it has come. On NVIDIA's GPUs copy
        /// engines make them. AMD's runtime makes them by kernels, which take compute units from the product:
        /// always of rows with gaps, and of contiguous rows unless `ROC_P2P_SDMA_SIZE=0` is set.
        CopyEngine = "copy_engine",
        /// The product of whole matrices stores to others what they own, from its epilogue.
        Epilogue = "epilogue",
        /// The product of one rank alone.
        Local = "local",
        /// Every member tells every other.
        Flat = "flat",
    }
}

impl Variant {
    /// Whether the order in which ranks add, and so the last bits of a sum, vary between runs.
    pub const fn order_varies(self) -> bool {
        matches!(self, Variant::Spinlock | Variant::Atomic)
    }
}

/// Why a variant was chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Why {
    /// It was asked for.
    Asked,
    /// It was measured for such calls on this machine, and was the quickest: `iris tune` wrote a row.
    Tuned,
    /// It was measured for such calls on this kind of device, and was the quickest.
    Measured,
    /// It has the shortest predicted time of those that have run on such devices.
    Predicted,
}
