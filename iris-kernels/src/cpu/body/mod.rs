//! The bodies of the operators, as `kernels/iris/body/` has them under the same names.

pub(crate) mod accumulate;
pub(crate) mod deliver;
mod epilogue;
pub(crate) mod gather;
pub(crate) mod ll;
pub(crate) mod norm;
pub(crate) mod partial;
pub(crate) mod reduce;
pub(crate) mod sums;
