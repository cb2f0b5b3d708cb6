//! Loop without iris that repeats the driver calls of a captured graph: the least host time that
//! these enqueues can take, as a baseline for the host time of `run`.

#![allow(unsafe_code, reason = "the driver's own calls")]

use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::Arc;

use anyhow::Result;
use cudarc::driver::{CudaEvent, CudaGraph, CudaStream, sys};
use libloading::{Library, Symbol};

/// Type of the driver function cuGraphNodeGetDependencies_v2 (CUDA 12.3). It also returns 8 bytes
/// of data for each edge; graphs whose kernels launch before their predecessors end have such data.
type Dependencies = unsafe extern "C" fn(
    sys::CUgraphNode,
    *mut sys::CUgraphNode,
    *mut [u8; 8],
    *mut usize,
) -> sys::CUresult;

/// Type of the driver function cuFuncGetName (CUDA 12.3), which returns a kernel's name.
type NameOf = unsafe extern "C" fn(*mut *const c_char, sys::CUfunction) -> sys::CUresult;

/// Sequence of enqueues read from a graph: kernels for the captured stream, copies for a second
/// one.
pub(super) struct Bare {
    steps: Vec<Step>,
    main: Arc<CudaStream>,
    side: Arc<CudaStream>,
}

/// One enqueue (a kernel launch or a copy), and its order relative to steps of the other stream.
struct Step {
    what: Enqueue,
    /// Indices of steps on the other stream that this step waits for.
    waits: Vec<usize>,
    /// Event recorded after the step, if a step of the other stream waits for it.
    event: Option<CudaEvent>,
}

enum Enqueue {
    Kernel(sys::CUDA_KERNEL_NODE_PARAMS),
    Copy(sys::CUDA_MEMCPY3D),
}

impl Enqueue {
    fn is_copy(&self) -> bool {
        matches!(self, Enqueue::Copy(_))
    }
}

impl Bare {
    /// Reads a graph, which must outlive the result because it owns the parameters. Returns `None`
    /// if the driver is older than CUDA 12.3, or if the graph has nodes other than kernels of iris
    /// and copies. Launches of cuBLASLt are such nodes, because their attributes are unknown here.
    pub(super) fn new(graph: &CudaGraph, main: &Arc<CudaStream>) -> Result<Option<Bare>> {
        // SAFETY: the CUDA driver is already loaded in this process, so loading it again runs no
        // initialisation code.
        let Ok(driver) = (unsafe { Library::new("libcuda.so.1") }) else { return Ok(None) };
        // SAFETY: `Dependencies` is the type that the driver's header declares for this function.
        let dependencies: Result<Symbol<'_, Dependencies>, _> =
            unsafe { driver.get(b"cuGraphNodeGetDependencies_v2") };
        // SAFETY: `NameOf` is the type that the driver's header declares for this function.
        let name_of: Result<Symbol<'_, NameOf>, _> = unsafe { driver.get(b"cuFuncGetName") };
        let (Ok(dependencies), Ok(name_of)) = (dependencies, name_of) else { return Ok(None) };
        let nodes = listed(|list, count| {
            // SAFETY: `graph` is borrowed, so its handle is valid; the driver writes at most
            // `count` nodes to `list`.
            unsafe { sys::cuGraphGetNodes(graph.cu_graph(), list, count) }
        })?;
        let mut before = Vec::new();
        for &node in &nodes {
            before.push(listed(|list, count| {
                let mut edges = vec![[0; 8]; if list.is_null() { 0 } else { *count }];
                let data = if edges.is_empty() { null_mut() } else { edges.as_mut_ptr() };
                // SAFETY: `graph` is borrowed, so its nodes are valid; the driver writes at most
                // `count` nodes and edges.
                unsafe { dependencies(node, list, data, count) }
            })?);
        }
        let Some(order) = sorted(&nodes, &before) else { return Ok(None) };
        let mut steps: Vec<Step> = Vec::new();
        for &at in &order {
            let Some(what) = read(nodes[at])? else { return Ok(None) };
            if let Enqueue::Kernel(kernel) = &what {
                let mut name = null();
                // SAFETY: `kernel.func` belongs to a node of the borrowed graph, and its name lives
                // as long as the function.
                let name = unsafe {
                    name_of(&mut name, kernel.func).result()?;
                    CStr::from_ptr(name)
                };
                if !name.to_bytes().starts_with(b"iris_") {
                    return Ok(None);
                }
            }
            let place = |node| order.iter().position(|&of| nodes[of] == node);
            let others = before[at].iter().filter_map(|&node| place(node));
            let waits: Vec<usize> =
                others.filter(|&it| steps[it].what.is_copy() != what.is_copy()).collect();
            for &it in &waits {
                if steps[it].event.is_none() {
                    steps[it].event = Some(main.context().new_event(None)?);
                }
            }
            steps.push(Step { what, waits, event: None });
        }
        Ok(Some(Bare { steps, main: main.clone(), side: main.context().new_stream()? }))
    }

    /// Enqueues all steps by single driver calls, as a launch of the graph would.
    pub(super) fn enqueue(&self) -> Result<()> {
        for Step { what, waits, event } in &self.steps {
            let stream = if what.is_copy() { &self.side } else { &self.main };
            for event in waits.iter().filter_map(|&at| self.steps[at].event.as_ref()) {
                stream.wait(event)?;
            }
            // SAFETY: the graph that owns the parameters outlives `self`, and they are passed
            // unchanged.
            unsafe {
                match what {
                    Enqueue::Kernel(it) => sys::cuLaunchKernel(
                        it.func,
                        it.gridDimX,
                        it.gridDimY,
                        it.gridDimZ,
                        it.blockDimX,
                        it.blockDimY,
                        it.blockDimZ,
                        it.sharedMemBytes,
                        stream.cu_stream(),
                        it.kernelParams,
                        it.extra,
                    ),
                    Enqueue::Copy(it) => sys::cuMemcpy3DAsync_v2(it, stream.cu_stream()),
                }
            }
            .result()?;
            if let Some(event) = event {
                event.record(stream)?;
            }
        }
        Ok(())
    }

    /// Waits until the steps on both streams are done.
    pub(super) fn sync(&self) -> Result<()> {
        self.side.synchronize()?;
        Ok(self.main.synchronize()?)
    }
}

/// Lists nodes by calling a driver function twice: first for their number, then for the nodes.
fn listed(
    list: impl Fn(*mut sys::CUgraphNode, &mut usize) -> sys::CUresult,
) -> Result<Vec<sys::CUgraphNode>> {
    let mut count = 0;
    list(null_mut(), &mut count).result()?;
    let mut nodes = vec![null_mut(); count];
    if count > 0 {
        list(nodes.as_mut_ptr(), &mut count).result()?;
    }
    Ok(nodes)
}

/// Topological order of `nodes`, as indices, as close as possible to the order in which the driver
/// lists them; `None` if the graph has a cycle.
fn sorted<T: PartialEq>(nodes: &[T], before: &[Vec<T>]) -> Option<Vec<usize>> {
    let mut order: Vec<usize> = Vec::new();
    while order.len() < nodes.len() {
        let is_done = |node: &T| order.iter().any(|&at| nodes[at] == *node);
        let is_next = |at: &usize| !order.contains(at) && before[*at].iter().all(is_done);
        let next = (0..nodes.len()).find(is_next)?;
        order.push(next);
    }
    Some(order)
}

/// Reads the parameters of a node; `None` if it is neither a kernel nor a copy.
fn read(node: sys::CUgraphNode) -> Result<Option<Enqueue>> {
    use sys::CUgraphNodeType::{CU_GRAPH_NODE_TYPE_KERNEL, CU_GRAPH_NODE_TYPE_MEMCPY};
    let mut kind = CU_GRAPH_NODE_TYPE_KERNEL;
    // SAFETY: `node` belongs to a graph that is alive; the driver writes its results to locals of
    // the right types.
    unsafe {
        sys::cuGraphNodeGetType(node, &mut kind).result()?;
        Ok(match kind {
            CU_GRAPH_NODE_TYPE_KERNEL => {
                let mut kernel = MaybeUninit::zeroed();
                sys::cuGraphKernelNodeGetParams_v2(node, kernel.as_mut_ptr()).result()?;
                Some(Enqueue::Kernel(kernel.assume_init()))
            }
            CU_GRAPH_NODE_TYPE_MEMCPY => {
                // A zeroed memory type is not a valid enum value, so the parameters may be read
                // only after the driver has written them.
                let mut copy = MaybeUninit::zeroed();
                sys::cuGraphMemcpyNodeGetParams(node, copy.as_mut_ptr()).result()?;
                Some(Enqueue::Copy(copy.assume_init()))
            }
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_behind_those_before_them() {
        let of = |before: [&[char]; 3]| sorted(&['a', 'b', 'c'], &before.map(<[char]>::to_vec));
        assert_eq!(of([&[], &['a'], &['b']]), Some(vec![0, 1, 2]));
        assert_eq!(of([&['c'], &[], &['b']]), Some(vec![1, 2, 0]));
        assert_eq!(of([&[], &['c'], &['b']]), None);
    }
}
