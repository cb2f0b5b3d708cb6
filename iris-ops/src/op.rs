//! What is alike in the files of the ops, as two macros: the names of variants, and the methods
//! that every op passes on to its [`Core`](crate::core::Core).

/// An enum of variants with their names; `Auto` leaves the choice to the plan.
macro_rules! variants {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// How it is done.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
        #[non_exhaustive]
        pub enum Variant {
            /// Chosen by table and shape; [`Plan::variant`](crate::Plan::variant) tells which.
            #[default]
            Auto,
            $($(#[$doc])* $name,)*
        }

        impl Variant {
            /// All but `Auto`.
            pub const ALL: &'static [Variant] = &[$(Variant::$name,)*];

            /// The name that [`FromStr`](std::str::FromStr) reads.
            pub const fn name(self) -> &'static str {
                match self { Variant::Auto => "auto", $(Variant::$name => $text,)* }
            }
        }

        impl std::str::FromStr for Variant {
            type Err = $crate::Error;

            fn from_str(text: &str) -> $crate::Result<Self> {
                match text {
                    "auto" => Ok(Variant::Auto),
                    $($text => Ok(Variant::$name),)*
                    _ => Err($crate::Error::Invalid {
                        op: NAME,
                        what: "variant".into(),
                        value: text.into(),
                        expected: [Variant::Auto.name(), $($text,)*].join(", "),
                    }),
                }
            }
        }
    };
}

/// `new`, `check`, `counters`, `trace`, `plan` and `free` of an op that wraps a `Core`.
macro_rules! common_methods {
    ($op:ident) => {
        impl $op {
            /// Make the op: the one collective step. All ranks of the heap call it with plans that
            /// agree; it takes the workspace and prepares it.
            ///
            /// # Errors
            /// A plan that differs between ranks (names item, values and ranks), a heap that is
            /// full (nothing has changed on any rank then), or an absent rank after the deadline.
            #[track_caller]
            pub fn new(
                heap: &std::sync::Arc<iris_heap::SymmetricHeap>,
                plan: &$crate::Plan,
            ) -> $crate::Result<Self> {
                Ok(Self { core: $crate::core::Core::new(NAME, heap, plan)? })
            }

            /// What it was planned for.
            pub fn plan_made(&self) -> &$crate::Plan {
                self.core.plan()
            }

            /// The fault that enqueued calls of this heap left, if any: talks to nobody and waits
            /// for nothing.
            pub fn check(&self) -> $crate::Result<()> {
                self.core.check()
            }

            /// Bytes and words of its calls on this rank so far. Synchronise the stream first. On a GPU
            /// an op planned without [`counted`](crate::Options::counted) or a trace has none, which is
            /// an error.
            pub fn counters(&self) -> $crate::Result<$crate::Counters> {
                self.core.counters()
            }

            /// The spans of its calls so far, a list for each workgroup; empty if the plan has no
            /// [`trace_spans`](crate::Options::trace_spans). Synchronise the stream first.
            pub fn trace(&self) -> $crate::Result<Vec<Vec<$crate::TraceSpan>>> {
                self.core.trace()
            }

            /// Give the workspace back. Collective; waits for the streams of the heap.
            #[track_caller]
            pub fn free(self) -> $crate::Result<()> {
                self.core.free()
            }
        }
    };
}

/// `beside` of an op whose peers may write C directly.
macro_rules! beside_method {
    ($op:ident, $args:ty, $arrival:expr) => {
        impl $op {
            /// What a kernel of the caller's needs that runs beside the next call, which is run with
            /// the same arguments, and takes the tiles of C as they arrive: the first argument of
            /// [`UserKernel::launch_beside`](iris_kernels::UserKernel::launch_beside), which reads
            /// it by `Tiles` of `iris/tiles.h`. The number of the call is kept on `stream`, that of
            /// the call, behind what was issued before; so it is right in graphs, too.
            ///
            /// Peers' tiles have a signal if they write C directly: C lies in the symmetric heap,
            /// not transposed, apart from A, at the same offset and with the same leading dimension
            /// on all ranks. This rank's own tiles have none: they are there when the call is over,
            /// for a kernel that is launched behind it.
            ///
            /// # Errors
            /// Those of [`run`](Self::run); [`Invalid`](crate::Error::Invalid) for a C or a variant
            /// whose tiles have no signals.
            pub fn beside(
                &mut self,
                args: &$args,
                stream: &iris_heap::Stream,
            ) -> $crate::Result<iris_kernels::args::TileView> {
                let call = self.call(args)?;
                self.core.beside(stream, $arrival(self.core.plan()), &call)
            }
        }
    };
}

pub(crate) use {beside_method, common_methods, variants};
