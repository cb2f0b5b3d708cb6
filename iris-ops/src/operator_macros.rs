//! Macros that define the common parts of the operators' files: the public type with its methods,
//! which call [`Operator`](crate::operator::Operator), and the enum of its variants.

/// Defines the public type of an operator, with `run` and the common methods.
macro_rules! operator {
    ($(#[$doc:meta])* $op:ident($args:ident)) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $op {
            operator: $crate::nodes::Operator,
        }

        impl $op {
            /// Enqueues a call on `stream`. Calls of one heap run in the order in which they were
            /// issued, also on different streams; all ranks must issue them in the same order,
            /// except calls of [`Matmul`](crate::Matmul), which are local. Several threads may issue
            /// calls of one operator: the launches of two calls do not interleave.
            ///
            /// # Errors
            /// Matrices that do not fit the plan, and [operands](crate::Operand) of another stream
            /// or device: in these cases nothing has been enqueued. [`Step`](crate::OpError::Step)
            /// if a launch fails; [`Poisoned`](crate::OpError::Poisoned) after a fault on the heap.
            pub fn run<M: $crate::MatrixArg>(
                &self,
                args: &$args<M>,
                stream: &iris_heap::Stream,
            ) -> $crate::OpResult<()> {
                self.operator.run_lent(stream, args)
            }

            /// Makes the operator in a workspace that was made for this plan or for a plan with the
            /// same needs. Collective: all ranks call it. The workspace outlives the operator.
            ///
            /// # Errors
            /// Errors of [`new`](Self::new); [`Invalid`](crate::OpError::Invalid) if the workspace
            /// is too small.
            #[track_caller]
            pub fn in_workspace(
                workspace: &std::sync::Arc<$crate::Workspace>,
                plan: &$crate::Plan,
            ) -> $crate::OpResult<Self> {
                let operator = $crate::nodes::Operator::within(ROW.op, workspace, plan)?;
                Ok(Self { operator })
            }
        }

        $crate::operator_macros::plan_and_new!($op);
        $crate::operator_macros::common_methods!($op);
    };
}

/// Defines `plan` of an operator's options, and `new`.
macro_rules! plan_and_new {
    ($op:ident) => {
        impl Options {
            /// Makes the plan for calls up to the size that the options give, without
            /// communication. `ranks` is a heap, [`Topology`](crate::Topology), or a world; for a
            /// world, the plan is for the CPU.
            ///
            /// # Errors
            /// [`Invalid`](crate::OpError::Invalid) for an option that the operator cannot take;
            /// [`Tuning`](crate::OpError::Tuning) for a wrong tuning file of this machine.
            pub fn plan(
                &self,
                ranks: impl Into<$crate::Topology>,
            ) -> $crate::OpResult<$crate::Plan> {
                $crate::Plan::new(ranks.into(), &self.request)
            }
        }

        impl $op {
            /// Makes the operator. Collective: all ranks of the heap call it, with plans that
            /// agree. It allocates and prepares a workspace. Either every rank gets the operator or
            /// every rank gets an error.
            ///
            /// # Errors
            /// Plans that differ between ranks (the error names the item, the values and the
            /// ranks); a full heap, which is left unchanged on all ranks; a failure of any rank; a
            /// rank that does not call it before the deadline.
            #[track_caller]
            pub fn new(
                heap: &std::sync::Arc<iris_heap::SymmetricHeap>,
                plan: &$crate::Plan,
            ) -> $crate::OpResult<Self> {
                Ok(Self { operator: $crate::nodes::Operator::new(ROW.op, heap, plan)? })
            }
        }
    };
}

/// Defines the methods that every operator has: `plan`, `check`, `counters`, `trace`, `free`.
macro_rules! common_methods {
    ($op:ident) => {
        impl $op {
            /// Plan from which the operator was made.
            pub fn plan(&self) -> &$crate::Plan {
                self.operator.plan()
            }

            /// Checks whether enqueued calls of this heap have failed. Waits for no call; on a GPU
            /// it waits for the copy of one word from the device. Over several nodes, after a rank
            /// was lost, it waits up to 2 s to learn which rank was lost first.
            ///
            /// # Errors
            /// The fault of a call that failed.
            pub fn check(&self) -> $crate::OpResult<()> {
                self.operator.check()
            }

            /// Numbers of bytes moved, flags raised and waits begun by the operator's calls on this
            /// rank so far. Synchronise the stream of the calls before reading these counters.
            ///
            /// # Errors
            /// [`Invalid`](crate::OpError::Invalid) on a GPU if the plan's options lack
            /// `count_traffic`; errors of the device.
            pub fn counters(&self) -> $crate::OpResult<$crate::Counters> {
                self.operator.counters()
            }

            /// Trace spans of the operator's calls so far, one list per workgroup; empty if the
            /// plan's options have no `trace_spans`. Synchronise the stream of the calls before
            /// reading the spans.
            ///
            /// # Errors
            /// Errors of the device.
            pub fn trace(&self) -> $crate::OpResult<Vec<Vec<$crate::TraceSpan>>> {
                self.operator.trace()
            }

            /// Frees the memory of the operator. Collective; waits for the streams of the heap.
            ///
            /// # Errors
            /// Errors of [`SymmetricHeap::free`](iris_heap::SymmetricHeap::free).
            #[track_caller]
            pub fn free(self) -> $crate::OpResult<()> {
                self.operator.free()
            }
        }
    };
}

/// Defines the method `beside`, for operators whose peers may write C directly.
macro_rules! beside_method {
    ($op:ident($args:ty)) => {
        impl $op {
            /// Returns a description of this operator's next call, for a kernel of the caller that
            /// runs at the same time and reads tiles of C as they arrive. Pass the same `args` to
            /// [`run`](Self::run) afterwards. The result is the first argument of
            /// [`UserKernel::launch_concurrent`](iris_kernels::UserKernel::launch_concurrent);
            /// device code reads it by `Tiles` of `iris/tiles.h`. Copies of the call number are
            /// enqueued on `stream`, which must be the stream of the call, so that graphs which
            /// contain them can be replayed.
            ///
            /// The plan needs `Options::reserve_sms` with the number of multiprocessors that the
            /// kernel occupies. Tiles from peers have signals only if peers write C directly. For
            /// this, C must lie in the symmetric heap, be row-major, not overlap A, and have the
            /// same offset and leading dimension on all ranks. Tiles of this rank have no signals:
            /// read them in a kernel that is queued after the call. Small messages between GPUs may
            /// use the LL protocol, which has no signals; to read their tiles as they arrive,
            /// choose another variant by name.
            ///
            /// # Errors
            /// Errors of [`run`](Self::run); [`Invalid`](crate::OpError::Invalid) if the tiles of
            /// this C have no signals, or if the plan lacks `Options::reserve_sms`.
            pub fn beside(
                &self,
                args: &$args,
                stream: &iris_heap::Stream,
            ) -> $crate::OpResult<iris_kernels::args::TileView> {
                self.operator.beside(stream, &$crate::args::CallArgs::matrices(args))
            }
        }
    };
}

/// Defines the enum of one operator's variants. A variant may have options that only this variant
/// reads. These options are written into the request for a plan.
macro_rules! variants {
    ($row:expr; $($(#[$doc:meta])* $name:ident $(($own:ident => $field:ident))?,)*) => {
        /// Variants of the operator: ways to compute the same result.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        #[non_exhaustive]
        pub enum Variant {
            /// Variant that the plan chooses for each size of call, by measurements if there are
            /// any, otherwise by predicted time. [`Plan::choices`](crate::Plan::choices) lists the
            /// chosen variants.
            #[default]
            Auto,
            $($(#[$doc])* $name $(($own))?,)*
        }

        impl Variant {
            /// Variant without its options. `None` for `Auto`, because the plan then chooses.
            pub fn kind(self) -> Option<$crate::Variant> {
                match self {
                    Variant::Auto => None,
                    $(Variant::$name { .. } => Some($crate::Variant::$name),)*
                }
            }

            /// Writes the variant and its options into `request`, from which a plan is made.
            pub(crate) fn write_to(self, request: &mut $crate::options::Request) {
                request.variant = self.kind();
                $($(if let Variant::$name($field) = self {
                    request.$field = $field;
                })?)*
            }
        }

        /// Compares only the variants; the options of a variant are ignored.
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

            /// Parses a name like [`Op::variant`](crate::Op::variant); the variant gets its default
            /// options.
            fn from_str(text: &str) -> $crate::OpResult<Self> {
                Ok(match $row.variant(text)? {
                    $(Some($crate::Variant::$name) => Variant::$name $(($own::default()))?,)*
                    _ => Variant::Auto,
                })
            }
        }
    };
}

pub(crate) use {beside_method, common_methods, operator, plan_and_new, variants};
