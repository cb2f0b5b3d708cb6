//! iris-kernels
