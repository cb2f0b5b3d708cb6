//! iris-ops
