//! iris-testkit

pub mod launch;
pub mod numeric;
pub mod oracle;
pub mod suite;
