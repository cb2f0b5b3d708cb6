//! What the files of the operators have in common, as macros: the type with its methods, which are
//! those of [`Operator`](crate::nodes::Operator), and the enum of its variants.

/// The type of an operator over its core.
macro_rules! operator {
    ($(#[$doc:meta])* $op:ident($args:ty)) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $op {
            operator: $crate::nodes::Operator,
        }

        impl $op {
            /// Enqueue a call on `stream`. Calls of one heap run in the order in which they are issued,
            /// also those on different streams; all ranks issue them in the same order. Threads may
            /// issue calls of one operator: each call is enqueued as a whole.
            ///
            /// # Errors
            /// Matrices that the plan does not fit, before anything is enqueued;
            /// [`Poisoned`](crate::OpError::Poisoned) after a fault of the heap.
            pub fn run(&self, args: &$args, stream: &iris_heap::Stream) -> $crate::OpResult<()> {
                self.operator.run(stream, &args.into())
            }
        }

        $crate::facade::common_methods!($op);
        $crate::facade::shared_workspace!($op);
    };
}

/// `new` and what an operator tells of itself.
macro_rules! common_methods {
    ($op:ident) => {
        impl Options {
            /// Plan calls of up to this size: local, pure. `ranks` is a world (on the CPU), a heap, or
            /// [`Ranks`](crate::Ranks).
            ///
            /// # Errors
            /// [`Invalid`](crate::OpError::Invalid) for what the operator cannot take.
            pub fn plan(&self, ranks: impl Into<$crate::Ranks>) -> $crate::OpResult<$crate::Plan> {
                $crate::Plan::new(ranks.into(), &self.request)
            }
        }

        impl $op {
            /// Make the op: the one collective step. All ranks of the heap call it with plans that
            /// agree; it takes a workspace and prepares it. Every rank ends it with the op, or every
            /// rank with an error.
            ///
            /// # Errors
            /// A plan that differs between ranks (names item, values and ranks), a heap that is
            /// full (nothing has changed on any rank then), a rank that cannot do its part, or an
            /// absent rank after the deadline.
            #[track_caller]
            pub fn new(
                heap: &std::sync::Arc<iris_heap::SymmetricHeap>,
                plan: &$crate::Plan,
            ) -> $crate::OpResult<Self> {
                Ok(Self { operator: $crate::nodes::Operator::new(ROW.op, heap, plan)? })
            }

            /// What it was planned for.
            pub fn plan(&self) -> &$crate::Plan {
                self.operator.plan()
            }

            /// The fault that enqueued calls of this heap left, if any: talks to nobody and waits
            /// for nothing.
            ///
            /// # Errors
            /// That fault.
            pub fn check(&self) -> $crate::OpResult<()> {
                self.operator.check()
            }

            /// Bytes and words of its calls on this rank so far. Synchronise the stream first. On a GPU
            /// an op planned without [`Options::counted`] or a trace has none, which is an error.
            ///
            /// # Errors
            /// [`Invalid`](crate::OpError::Invalid) where nothing is counted; those of the device.
            pub fn counters(&self) -> $crate::OpResult<$crate::Counters> {
                self.operator.counters()
            }

            /// The spans of its calls so far, a list for each workgroup; empty if the plan has no
            /// [`Options::trace_spans`]. Synchronise the stream first.
            ///
            /// # Errors
            /// Those of the device.
            pub fn trace(&self) -> $crate::OpResult<Vec<Vec<$crate::TraceSpan>>> {
                self.operator.trace()
            }

            /// Give its memory back. Collective; waits for the streams of the heap.
            ///
            /// # Errors
            /// Those of [`SymmetricHeap::free`](iris_heap::SymmetricHeap::free).
            #[track_caller]
            pub fn free(self) -> $crate::OpResult<()> {
                self.operator.free()
            }
        }
    };
}

/// `in_workspace` of an operator whose calls can be counted with those of others.
macro_rules! shared_workspace {
    ($op:ident) => {
        impl $op {
            /// Make the op in a workspace that was made for plans like this one: collective. The
            /// workspace stays when the op is freed.
            ///
            /// # Errors
            /// As [`new`](Self::new); [`Invalid`](crate::OpError::Invalid) for a workspace that is too
            /// small.
            #[track_caller]
            pub fn in_workspace(
                workspace: &std::sync::Arc<$crate::Workspace>,
                plan: &$crate::Plan,
            ) -> $crate::OpResult<Self> {
                let operator = $crate::nodes::Operator::within(ROW.op, workspace, plan)?;
                Ok(Self { operator })
            }
        }
    };
}

/// `beside` of an op whose peers may write C directly.
macro_rules! beside_method {
    ($op:ident($args:ty)) => {
        impl $op {
            /// What a kernel of the caller's needs that runs beside the next call, which is run with
            /// the same arguments, and takes the tiles of C as they arrive: the first argument of
            /// [`UserKernel::launch_beside`](iris_kernels::UserKernel::launch_beside), which reads
            /// it by `Tiles` of `iris/tiles.h`. The number of the call is kept on `stream`, that of
            /// the call, behind what was issued before; so it is right in graphs, too.
            ///
            /// The op is planned with `Options::beside`, which says how many multiprocessors the kernel has.
            /// Peers' tiles have a signal if they write C directly: C lies in the symmetric heap,
            /// not transposed, apart from A, at the same offset and with the same leading dimension
            /// on all ranks. This rank's own tiles have none: they are there when the call is over,
            /// for a kernel that is launched behind it. Small messages between GPUs may travel
            /// without signals: who wants their tiles names the variant.
            ///
            /// # Errors
            /// Those of [`run`](Self::run); [`Invalid`](crate::OpError::Invalid) for a C
            /// whose tiles have no signals, and for a plan without `Options::beside`.
            pub fn beside(
                &self,
                args: &$args,
                stream: &iris_heap::Stream,
            ) -> $crate::OpResult<iris_kernels::args::TileView> {
                self.operator.beside(stream, &args.into())
            }
        }
    };
}

/// An enum of the variants of one operator. An arm may carry the options that only it reads, and has
/// them written into the request.
macro_rules! variants {
    ($row:expr; $($(#[$doc:meta])* $name:ident $(($own:ident => $field:ident))?,)*) => {
        /// How it is done.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        #[non_exhaustive]
        pub enum Variant {
            /// Chosen by table and shape; [`Plan::choices`](crate::Plan::choices) tells what for which
            /// calls.
            #[default]
            Auto,
            $($(#[$doc])* $name $(($own))?,)*
        }

        impl Variant {
            /// The variant by its name alone; none for `Auto`.
            pub fn kind(self) -> Option<$crate::Variant> {
                match self {
                    Variant::Auto => None,
                    $(Variant::$name { .. } => Some($crate::Variant::$name),)*
                }
            }

            /// Write the choice into a request.
            pub(crate) fn ask(self, request: &mut $crate::options::Request) {
                request.variant = self.kind();
                $($(if let Variant::$name($field) = self {
                    request.$field = $field;
                })?)*
            }
        }

        /// Whether it is of this name, with whatever options of its own.
        impl PartialEq<$crate::Variant> for Variant {
            fn eq(&self, other: &$crate::Variant) -> bool {
                self.kind() == Some(*other)
            }
        }

        impl PartialEq<Variant> for $crate::Variant {
            fn eq(&self, other: &Variant) -> bool {
                other == self
            }
        }

        impl std::str::FromStr for Variant {
            type Err = $crate::OpError;

            /// As [`Op::variant`](crate::Op::variant) reads it, with the default options.
            fn from_str(text: &str) -> $crate::OpResult<Self> {
                Ok(match $row.variant(text)? {
                    $(Some($crate::Variant::$name) => Variant::$name $(($own::default()))?,)*
                    _ => Variant::Auto,
                })
            }
        }
    };
}

pub(crate) use {beside_method, common_methods, operator, shared_workspace, variants};
