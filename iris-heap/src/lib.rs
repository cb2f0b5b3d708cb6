//! World, bootstrap, symmetric heap, streams: what the ranks of a node share.

pub mod abi;
pub mod backend;
pub mod bootstrap;
mod control;
mod dtype;
pub mod env;
mod error;
mod heap;
pub mod layout;
mod segment;
mod slice;
pub mod stream;
mod wire;
mod world;

pub use abi::MAX_RANKS;
pub use backend::BackendKind;
pub use bootstrap::launch::UniqueId;
pub use control::Control;
pub use dtype::{DType, Element};
pub use env::Settings;
pub use error::{Error, ErrorKind, Result};
pub use heap::{
    ALIGNMENT, DevWords, HeapOptions, PROTOCOL_VERSION, Request, SymmetricHeap, random_unit,
};
pub use slice::{RawSlice, Segment, SymSlice};
pub use stream::{CpuKernel, Event, Group, Stream};
pub use world::World;
