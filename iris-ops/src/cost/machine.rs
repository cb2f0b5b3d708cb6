//! Parameters of a machine: what its launches, links, engines and GEMMs take.

use serde::{Deserialize, Serialize};

/// Declares the parameters once: fields, names, and the order in which a fit changes them.
macro_rules! machine {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Parameters from which the time of a program is predicted: of one rank on one kind of device, however many
        /// ranks there are. Times are in microseconds, rates in bytes or operations a microsecond.
        #[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct Machine {
            $($(#[$doc])* pub $name: f64,)*
        }

        impl Machine {
            /// Names of the parameters, in the order of [`Machine::values`].
            pub const NAMES: &[&str] = &[$(stringify!($name)),*];

            /// Values of the parameters.
            pub fn values(&self) -> Vec<f64> {
                vec![$(self.$name),*]
            }

            /// The machine with these values, in the order of [`Machine::NAMES`]; missing ones are 0.
            #[must_use]
            pub fn of_values(values: &[f64]) -> Self {
                let mut values = values.iter().copied();
                Machine { $($name: values.next().unwrap_or_default()),* }
            }
        }
    };
}

machine! {
    /// A message by the LL protocol that carries nothing: a launch and one way.
    ll_us,
    /// A message by tiles and signals that carries nothing: a launch, the peers' entry, one way, and taking.
    push_us,
    /// Sums of what came, beside [`Machine::push_us`].
    sum_us,
    /// A second way, of sums back to all or from a relay to the others.
    hop_us,
    /// Each peer beyond the first, each way.
    peer_us,
    /// A barrier of all ranks.
    barrier_us,
    /// Rate of stores to all peers together, of tiles.
    link_bytes_per_us,
    /// Rate of stores to one peer: the same where a switch connects all, less where each pair has a link of its own.
    peer_link_bytes_per_us,
    /// The same of the LL protocol, whose words are twice as many bytes.
    ll_bytes_per_us,
    /// Rate at which what came is read and added up.
    sum_bytes_per_us,
    /// Launch of a GEMM, and its first and last tile.
    gemm_us,
    /// Rate of GEMMs of f16 and bf16, in additions and multiplications.
    flops_per_us,
    /// Rate of GEMMs of f32.
    flops_f32_per_us,
    /// Rate at which GEMMs, norms and copies on the device read and write memory.
    memory_bytes_per_us,
    /// Times as long as a GEMM's operations take on the portable tile core.
    tile_core,
    /// Part of a message's fixed time that passes while the GEMM in front of it ends.
    overlap_us,
    /// A small launch that waits for no peer.
    launch_us,
    /// A small launch at which peers meet: an entry, a gate, the end of a call.
    gate_us,
    /// A copy by an engine that carries nothing, until its signal is seen.
    engine_us,
    /// Rate of copies by engines to all peers together.
    engine_bytes_per_us,
    /// Rate of stores from the epilogue of a GEMM.
    store_bytes_per_us,
}
