//! Bodies of the operators on the CPU: the code that moves, adds and multiplies tiles, and that the
//! protocols of `iris_sync::flow` call. `kernels/iris/body/` has the device versions under the same
//! names.

pub(crate) mod accumulate;
mod combine;
pub(crate) mod deliver;
mod epilogue;
pub(crate) mod gather;
pub(crate) mod ll;
pub(crate) mod ll_list;
pub(crate) mod norm;
pub(crate) mod partial;
pub(crate) mod reduce;
pub(crate) mod sums;
