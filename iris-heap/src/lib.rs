//! iris-heap
