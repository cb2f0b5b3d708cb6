//! Parameters of a machine: times and rates of launches, links, copy engines and GEMMs.

use serde::{Deserialize, Serialize};

/// Declares each parameter of the machine once, as a field with its name. `iris tune` fits the
/// parameters in the order of declaration.
macro_rules! machine {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Parameters for predicting the time of a program, for one kind of device and any number
        /// of ranks. Times are in microseconds, rates in bytes or floating-point operations per
        /// microsecond.
        #[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct CostParameters {
            $($(#[$doc])* pub $name: f64,)*
        }

        impl CostParameters {
            /// Names of the parameters, in the order of [`CostParameters::values`].
            pub const NAMES: &[&str] = &[$(stringify!($name)),*];

            /// Values of the parameters, in the order of [`CostParameters::NAMES`].
            pub fn values(&self) -> Vec<f64> {
                vec![$(self.$name),*]
            }

            /// Makes a machine from the values of its parameters, which have the order of
            /// [`CostParameters::NAMES`]; missing values are 0.
            #[must_use]
            pub fn of_values(values: &[f64]) -> Self {
                let mut values = values.iter().copied();
                CostParameters { $($name: values.next().unwrap_or_default()),* }
            }
        }
    };
}

impl CostParameters {
    /// Checks that each time is a number of at least 0, and each rate and ratio more than 0. The error
    /// names the parameter and its value.
    pub(crate) fn check(&self) -> Result<(), String> {
        for (name, value) in Self::NAMES.iter().zip(self.values()) {
            let divides = name.ends_with("_per_us") || *name == "tile_core";
            let expected = match divides {
                true if value > 0.0 && value.is_finite() => continue,
                false if value >= 0.0 && value.is_finite() => continue,
                true => "a number above 0",
                false => "a number of at least 0",
            };
            return Err(format!("machine.{name} is {value}, expected {expected}"));
        }
        Ok(())
    }
}

machine! {
    /// Time of an empty message by the LL protocol (each word carries data and a flag): a launch
    /// and one one-way latency.
    ll_us,
    /// Additional time of a message by the LL protocol for each peer after the first.
    ll_peer_us,
    /// Time of a second hop of a message by the LL protocol: a wait, and one one-way latency.
    ll_hop_us,
    /// Time of an empty message that is sent as tiles with signals: a launch, the wait until the
    /// peers have entered the call, one one-way latency, and the copy to C.
    push_us,
    /// Additional time of a message whose tiles are summed, without the time for its bytes. It is
    /// added to [`CostParameters::push_us`].
    sum_us,
    /// Time of a second hop of a message: sums that are sent back to all ranks, or tiles of a
    /// broadcast that a receiver forwards.
    hop_us,
    /// Additional time of a message that is sent as tiles with signals, for each peer after the
    /// first, in each hop.
    peer_us,
    /// Time of a barrier of all ranks.
    barrier_us,
    /// Rate of stores to all peers together, for messages that are sent as tiles with signals.
    link_bytes_per_us,
    /// Rate of stores to one peer. It equals `link_bytes_per_us` if a switch connects the GPUs, and
    /// is lower if each pair of GPUs has a separate link.
    peer_link_bytes_per_us,
    /// Rate of stores to all peers by the LL protocol, in bytes including flags. With its flags, a
    /// message has twice as many bytes.
    ll_bytes_per_us,
    /// Rate at which received partials are read and added.
    sum_bytes_per_us,
    /// Fixed time of a GEMM: its launch, and its first and last tile.
    gemm_us,
    /// Rate of GEMMs of f16 and bf16, in floating-point operations (2 M N K per GEMM).
    flops_per_us,
    /// Rate of GEMMs of f32, in floating-point operations.
    flops_f32_per_us,
    /// Rate at which GEMMs, norms and copies on the device read and write device memory.
    memory_bytes_per_us,
    /// Slowdown of the portable kernels that multiply tile by tile: the ratio of their time per
    /// operation to that of a library GEMM.
    tile_core,
    /// Time by which the start of a message overlaps the end of the GEMM before it. At most the
    /// whole fixed time of the message counts.
    overlap_us,
    /// Time of a small launch that waits for no peer.
    launch_us,
    /// Time of a small launch that waits for peers: for their entry into the call, for copied
    /// parts, or for the end of the call.
    gate_us,
    /// Time of an empty copy by a copy engine, until the peer sees its signal.
    engine_us,
    /// Rate of copies by copy engines to all peers together.
    engine_bytes_per_us,
    /// Rate of stores to all peers from the epilogue of a GEMM.
    store_bytes_per_us,
}
