//! Operators over one or several nodes. Over several nodes, an operator consists of operators
//! within each node and of steps between nodes, planned as
//! [`Composed`](crate::plan::composed::Composed). On one node, it is just an operator of that node.

mod call;
pub(crate) mod exchange;
mod fabric;
mod forecast;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;
mod nccl;
#[cfg(test)]
mod simulation;
pub(crate) mod steps;

pub(crate) use call::give_up;
pub use forecast::Forecast;

use std::collections::BTreeMap;
use std::panic::Location;
use std::sync::Arc;

use iris_heap::{RawSlice, Stream, SymmetricHeap, World};
use iris_kernels::args::TileView;
use iris_kernels::trace::TraceSpan;
use iris_kernels::vendor::Nccl;

use crate::args::{CallArgs, Matrices};
use crate::counters::Counters;
use crate::error::{Error, InOp, Result};
use crate::op_names::Op;
use crate::operand::sealed::MatrixArg;
use crate::operator;
use crate::plan::Plan;
use crate::plan::composed::{Area, Role, alloc_areas};
use crate::workspace::{Workspace, check_nodes, outcome};
use fabric::{Engine, Fabric, Sockets};

/// Operator of a rank, whose world may have one node or several.
#[derive(Debug)]
pub(crate) enum Operator {
    /// Operator of a world whose ranks are all on one node.
    Node(Box<operator::Operator>),
    /// Operator of a world whose ranks are on several nodes.
    Nodes(Box<Composite>),
}

/// Operator over several nodes, on one rank.
#[derive(Debug)]
pub(crate) struct Composite {
    heap: Arc<SymmetricHeap>,
    plan: Plan,
    /// Text by which errors name the operator.
    label: Arc<str>,
    parts: BTreeMap<Role, operator::Operator>,
    areas: BTreeMap<Area, RawSlice>,
    /// Whether the memory areas belong to a shared workspace. If so, the workspace frees them.
    shares_areas: bool,
    fabric: Arc<dyn Fabric>,
    /// Hash of the properties of the plan on which all ranks must agree.
    digest: u64,
    /// Steps that calls have enqueued, for the test of [`steps::steps`].
    #[cfg(test)]
    log: std::sync::Mutex<Vec<call::NodeStep>>,
}

impl Operator {
    #[track_caller]
    pub(crate) fn new(op: Op, heap: &Arc<SymmetricHeap>, plan: &Plan) -> Result<Self> {
        match plan.composed() {
            None => operator::Operator::new(op, heap, plan).map(Box::new).map(Self::Node),
            Some(_) => Composite::new(op, heap, plan, None).map(Box::new).map(Self::Nodes),
        }
    }

    #[track_caller]
    pub(crate) fn within(op: Op, workspace: &Arc<Workspace>, plan: &Plan) -> Result<Self> {
        if plan.composed().is_none() {
            let operator = operator::Operator::within(op, workspace, plan)?;
            return Ok(Self::Node(Box::new(operator)));
        }
        let composite = Composite::new(op, workspace.heap(), plan, Some(workspace))?;
        Ok(Self::Nodes(Box::new(composite)))
    }

    pub(crate) fn run(&self, stream: &Stream, matrices: &Matrices) -> Result<()> {
        match self {
            Self::Node(operator) => operator.run(stream, matrices),
            Self::Nodes(composite) => composite.run(stream, matrices),
        }
    }

    /// Enqueues a call. First checks for each matrix that `stream` may use its memory; afterwards
    /// tells each matrix that a call uses its memory.
    pub(crate) fn run_lent(&self, stream: &Stream, args: &impl CallArgs) -> Result<()> {
        let op = self.plan().op();
        let heap = match self {
            Self::Node(operator) => operator.heap(),
            Self::Nodes(composite) => &composite.heap,
        };
        args.all().try_for_each(|matrix| matrix.check(op, heap, stream))?;
        let outcome = self.run(stream, &args.matrices());
        // The operands are notified even if the call failed, because some of its steps may already
        // be enqueued and use the operands' memory.
        let told = args.all().try_for_each(|matrix| matrix.enqueued(op));
        outcome.and_then(|()| told.map_err(|error| call::give_up(op, heap, stream, error)))
    }

    pub(crate) fn beside(&self, stream: &Stream, matrices: &Matrices) -> Result<TileView> {
        match self {
            Self::Node(operator) => operator.beside(stream, matrices),
            Self::Nodes(composite) => composite.parts[&Role::Main].beside(stream, matrices),
        }
    }

    pub(crate) fn plan(&self) -> &Plan {
        match self {
            Self::Node(operator) => operator.plan(),
            Self::Nodes(composite) => &composite.plan,
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        match self {
            Self::Node(operator) => operator.check(),
            Self::Nodes(composite) => composite.parts[&Role::Main].check(),
        }
    }

    pub(crate) fn counters(&self) -> Result<Counters> {
        match self {
            Self::Node(operator) => operator.counters(),
            Self::Nodes(composite) => {
                let mut sum = Counters::default();
                for part in composite.parts.values() {
                    let Counters { pushed, pulled, flags, waits } = part.counters()?;
                    sum.pushed += pushed;
                    sum.pulled += pulled;
                    sum.flags += flags;
                    sum.waits += waits;
                }
                Ok(sum)
            }
        }
    }

    pub(crate) fn trace(&self) -> Result<Vec<Vec<TraceSpan>>> {
        match self {
            Self::Node(operator) => operator.trace(),
            // An operator over several nodes has no trace.
            Self::Nodes(_) => Ok(Vec::new()),
        }
    }

    #[track_caller]
    pub(crate) fn free(self) -> Result<()> {
        match self {
            Self::Node(operator) => operator.free(),
            Self::Nodes(composite) => composite.free(),
        }
    }
}

impl Composite {
    /// Makes the operator: collective over all nodes. All ranks compare their plans first.
    #[track_caller]
    fn new(
        op: Op,
        heap: &Arc<SymmetricHeap>,
        plan: &Plan,
        workspace: Option<&Arc<Workspace>>,
    ) -> Result<Self> {
        let label = plan.request().label(Some(Location::caller()));
        // Avoids a closure, which would hide the caller's location from `#[track_caller]`;
        // collective calls report this location.
        match Self::labelled(op, heap, plan, &label, workspace) {
            Ok(operator) => Ok(operator),
            Err(error) => Err(error.labelled(&label)),
        }
    }

    #[track_caller]
    fn labelled(
        op: Op,
        heap: &Arc<SymmetricHeap>,
        plan: &Plan,
        label: &Arc<str>,
        workspace: Option<&Arc<Workspace>>,
    ) -> Result<Self> {
        heap.check_before_step().in_op(op)?;
        let world = heap.whole_world();
        let checked = check(op, heap, plan);
        let mut items = plan.fingerprint_of_all();
        items.push(("steps between nodes", engine_name(heap).into()));
        items.push(("blocks", plan.composed().map_or(1, |composed| composed.blocks).to_string()));
        let told = world.agree(op.name(), &items).in_op(op);
        let all = world.all_ok(op.name(), outcome(&checked)).in_op(op);
        checked.and(told).and(all)?;
        let text: Vec<_> = items.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let digest = iris_heap::fnv(&[text.join("\n").as_bytes()]) as u64;
        let made = Self::make(heap, plan, workspace);
        let told = world.all_ok(op.name(), outcome(&made)).in_op(op);
        let (parts, areas) = made?;
        let fabric = match told {
            Ok(()) => Self::fabric(op, heap, plan, &areas),
            Err(error) => Err(error),
        };
        let fabric = match fabric {
            Ok(fabric) => fabric,
            Err(error) => {
                // `give_back` is collective, and all ranks of this node call it here unless the
                // world is broken. If the world is broken, `give_back` fails at once.
                let own = if workspace.is_some() { BTreeMap::new() } else { areas };
                give_back_or_warn(heap, op, parts, &own);
                return Err(error);
            }
        };
        let (heap, plan) = (Arc::clone(heap), plan.clone());
        Ok(Self {
            heap,
            plan,
            label: label.clone(),
            parts,
            areas,
            shares_areas: workspace.is_some(),
            fabric,
            digest,
            #[cfg(test)]
            log: Default::default(),
        })
    }

    /// Returns the transport for the steps between nodes: collective over all nodes, which all get
    /// an error if one of them does.
    #[track_caller]
    fn fabric(
        op: Op,
        heap: &Arc<SymmetricHeap>,
        plan: &Plan,
        areas: &BTreeMap<Area, RawSlice>,
    ) -> Result<Arc<dyn Fabric>> {
        let across = heap.across().cloned().ok_or_else(|| other_world(op, heap, plan))?;
        Ok(match areas.get(&Area::Records) {
            None => Arc::new(Sockets::new(heap, across, engine(heap.whole_world()))),
            Some(&records) => nccl::Link::of(op, heap, &across, records)?,
        })
    }

    /// Makes the operators within this node that the plan lists, and allocates memory for the steps
    /// between nodes.
    #[track_caller]
    #[allow(clippy::type_complexity, reason = "the parts of an operator, taken apart at once")]
    fn make(
        heap: &Arc<SymmetricHeap>,
        plan: &Plan,
        workspace: Option<&Arc<Workspace>>,
    ) -> Result<(BTreeMap<Role, operator::Operator>, BTreeMap<Area, RawSlice>)> {
        let op = plan.op();
        let Some(composed) = plan.composed() else { return Err(other_world(op, heap, plan)) };
        let areas = match workspace {
            Some(workspace) => workspace.areas_for(plan, &composed.areas)?,
            None => alloc_areas(heap, op, &composed.areas)?,
        };
        let mut parts = BTreeMap::new();
        for (&role, part) in &composed.parts {
            let made = match workspace {
                Some(workspace) => operator::Operator::within(part.op(), workspace, part),
                None => operator::Operator::new(part.op(), heap, part),
            };
            match made {
                Ok(made) => drop(parts.insert(role, made)),
                Err(error) => {
                    let own = if workspace.is_some() { BTreeMap::new() } else { areas };
                    give_back_or_warn(heap, op, parts, &own);
                    return Err(error);
                }
            }
        }
        Ok((parts, areas))
    }

    #[track_caller]
    fn free(self) -> Result<()> {
        let own = if self.shares_areas { BTreeMap::new() } else { self.areas };
        give_back(&self.heap, self.plan.op(), self.parts, &own)
    }
}

/// Name of the engine that moves the data of steps between nodes. All ranks must use the same
/// engine.
fn engine_name(heap: &SymmetricHeap) -> &'static str {
    let kind = heap.device().kind;
    if !kind.traits().host_threads {
        return Nccl::name(kind);
    }
    #[cfg(feature = "mpi")]
    if mpi::is_ready(heap.whole_world()) {
        return "mpi";
    }
    "sockets"
}

/// Engine that moves the data of steps between nodes; `None` if the sockets of the rendezvous move
/// the data. With MPI, this function is collective over the world.
fn engine(world: &World) -> Option<Arc<dyn Engine>> {
    #[cfg(feature = "mpi")]
    if mpi::is_ready(world) {
        return Some(Arc::new(mpi::Communicator::new(world)));
    }
    let _ = world;
    None
}

#[track_caller]
fn give_back(
    heap: &SymmetricHeap,
    op: Op,
    parts: BTreeMap<Role, operator::Operator>,
    areas: &BTreeMap<Area, RawSlice>,
) -> Result<()> {
    for part in parts.into_values() {
        part.free()?;
    }
    if areas.is_empty() {
        return Ok(());
    }
    heap.free_many(&areas.values().copied().collect::<Vec<_>>()).in_op(op)
}

#[track_caller]
fn give_back_or_warn(
    heap: &SymmetricHeap,
    op: Op,
    parts: BTreeMap<Role, operator::Operator>,
    areas: &BTreeMap<Area, RawSlice>,
) {
    if let Err(error) = give_back(heap, op, parts, areas) {
        tracing::warn!(%op, rank = heap.rank(), %error, "memory is not given back");
    }
}

/// Checks that a plan belongs to this operator, rank and world.
fn check(op: Op, heap: &SymmetricHeap, plan: &Plan) -> Result<()> {
    if plan.op() != op {
        let value = format!("one of {}", plan.op());
        return Err(Error::invalid(op, "plan", value, format!("one of {op}")));
    }
    let backend = heap.device().kind;
    if !backend.traits().host_threads
        && let Err(error) = Nccl::get(backend)
    {
        let name = Nccl::name(backend);
        let expected = format!("{name} 2.18 or later, which moves data between nodes");
        return Err(Error::invalid(op, format!("{name} between nodes"), error, expected));
    }
    let (ranks, world) = (plan.topology(), heap.whole_world());
    let planned = (ranks.rank, ranks.size, ranks.nodes());
    if planned != (world.rank(), world.size(), world.nodes()) {
        return Err(other_world(op, heap, plan));
    }
    Ok(())
}

/// Error for a plan that was made for another rank, world or number of nodes than the heap's.
fn other_world(op: Op, heap: &SymmetricHeap, plan: &Plan) -> Error {
    let (ranks, world) = (plan.topology(), heap.whole_world());
    if let Err(error) = check_nodes(heap, plan) {
        return error;
    }
    Error::OtherWorld {
        op: op.into(),
        planned_rank: ranks.rank,
        planned_size: ranks.size,
        rank: world.rank(),
        size: world.size(),
    }
}
