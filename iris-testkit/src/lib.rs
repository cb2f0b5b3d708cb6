//! iris-testkit
