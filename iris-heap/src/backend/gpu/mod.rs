//! What the backends of GPUs share: streams, events, the order of ops, kernels, pinned memory.

/// A handle of the driver's: a pointer in its own words, a number here, for any thread to use.
macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        $(
            $(#[$doc])*
            #[repr(transparent)]
            #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
            pub(crate) struct $name(pub(crate) u64);
        )*
    };
}

handles! {
    /// A context.
    RawContext;
    /// A stream.
    RawStream;
    /// An event.
    RawEvent;
    /// A loaded image of kernels.
    RawModule;
    /// A kernel.
    RawFunction;
}
