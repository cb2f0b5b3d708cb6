//! iris-sync
