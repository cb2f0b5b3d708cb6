//! Event simulation of calls over several nodes: ranks, their streams, and every message between
//! nodes. It checks the closed-form prediction of [`Plan::forecast`], and shows the effects of a
//! late rank and of a lost node.
//!
//! A call is a graph of tasks. A task starts when the tasks on which it depends have ended and its
//! resource (a port of the network) is free. Messages follow NCCL's algorithms: rings in rounds, a
//! double binary tree in chunks.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use super::exchange::{Kind, Sent};
use super::steps::{NodeStep, steps};
use crate::cost::network::{ALGORITHMS, Algorithm, NetworkRate};
use crate::device::Device;
use crate::op_names::Op;
use crate::op_row::Composition;
use crate::ops::row;
use crate::options::Request;
use crate::plan::Plan;
use crate::topology::Topology;

/// Number of chunks into which an algorithm that uses a tree splits its data.
const CHUNKS: usize = 64;
/// Number of chunks of a broadcast, whose data passes through all nodes one after the other.
const LINKS: usize = 2048;

#[derive(Default)]
struct Task {
    /// Time in microseconds for which the task occupies its resource.
    us: f64,
    /// Time in microseconds from the moment the resource is free again to the end of the task.
    latency_us: f64,
    resource: Option<usize>,
    after: Vec<usize>,
    node: usize,
    /// Time at which the task ends, in microseconds; `None` if it never ends.
    end_us: Option<f64>,
}

/// Disturbance of a simulated call, or an intentional error in the simulation itself.
#[derive(Clone, Copy)]
enum Fault {
    None,
    /// Rank `rank` begins its step number `step` late, after a delay of `us` microseconds.
    Late {
        rank: usize,
        step: usize,
        us: f64,
    },
    /// Node `node` stops at the time `us`, in microseconds, and does nothing afterwards.
    Lost {
        node: usize,
        us: f64,
    },
    /// Intentional error: the caller's stream does not wait for exchanges.
    NoWaits,
    /// Intentional error: messages arrive as soon as they are sent.
    NoLatency,
}

/// Stream of a rank: its tasks in order, each with the step of the call that it simulates.
type Stream = Vec<(usize, NodeStep)>;

struct Simulation<'a> {
    plan: &'a Plan,
    network: NetworkRate,
    tasks: Vec<Task>,
}

impl Simulation<'_> {
    fn task(&mut self, node: usize, us: f64, after: Vec<usize>) -> usize {
        self.tasks.push(Task { us, after, node, ..Task::default() });
        self.tasks.len() - 1
    }

    /// Adds the task of a message over the port of a rank; the task ends when the message arrives.
    fn message(
        &mut self,
        (node, port): (usize, usize),
        us: f64,
        latency_us: f64,
        after: Vec<usize>,
    ) -> usize {
        let task = self.task(node, us, after);
        self.tasks[task] =
            Task { latency_us, resource: Some(port), ..std::mem::take(&mut self.tasks[task]) };
        task
    }

    /// Adds the messages of one exchange among ranks with the same local rank, one rank on each
    /// node. `start` and the result have one task for each node.
    fn exchange(
        &mut self,
        kind: Kind,
        bytes: f64,
        start: Vec<usize>,
        local: (usize, usize),
    ) -> Vec<usize> {
        let nodes = start.len();
        let algorithm = *self.algorithm(kind, bytes, nodes);
        let (rate, hop) = (algorithm.rate(self.network.bytes_per_us), algorithm.far_us(1));
        let port = |node: usize| (node, node * local.1 + local.0);
        let begun: Vec<_> =
            (0..nodes).map(|node| self.task(node, algorithm.fixed_us, vec![start[node]])).collect();
        // Tasks that must end before a node has finished the exchange, as one list for each node.
        let mut seen: Vec<Vec<usize>> = begun.iter().map(|&it| vec![it]).collect();
        match kind {
            Kind::AllReduce if algorithm.is_tree => {
                for mirrored in [false, true] {
                    let id = |at: usize| if mirrored { nodes - 1 - at } else { at };
                    let us = bytes / 2.0 / CHUNKS as f64 / rate;
                    for _ in 0..CHUNKS {
                        let children = |at: usize| {
                            [2 * at + 1, 2 * at + 2].into_iter().filter(|&it| it < nodes)
                        };
                        let mut up: Vec<usize> = vec![0; nodes];
                        for at in (1..nodes).rev() {
                            let after =
                                children(at).map(|it| up[it]).chain([begun[id(at)]]).collect();
                            up[at] = self.message(port(id(at)), us, hop, after);
                        }
                        let mut sum =
                            children(0).map(|it| up[it]).chain([begun[id(0)]]).collect::<Vec<_>>();
                        let root = self.task(id(0), 0.0, std::mem::take(&mut sum));
                        let mut down = vec![root; nodes];
                        for at in 0..nodes {
                            seen[id(at)].push(down[at]);
                            for child in children(at) {
                                down[child] = self.message(port(id(at)), us, hop, vec![down[at]]);
                            }
                        }
                    }
                }
            }
            Kind::AllReduce | Kind::AllGather => {
                let (rounds, part) = match kind {
                    Kind::AllReduce => (2 * (nodes - 1), bytes / nodes as f64),
                    _ => (nodes - 1, bytes),
                };
                let mut last = begun.clone();
                for _ in 0..rounds {
                    let sent: Vec<_> = (0..nodes)
                        .map(|node| {
                            self.message(
                                port(node),
                                part / rate,
                                hop,
                                vec![last[node], begun[node]],
                            )
                        })
                        .collect();
                    last = (0..nodes).map(|node| sent[(node + nodes - 1) % nodes]).collect();
                    (0..nodes).for_each(|node| seen[node].push(last[node]));
                }
            }
            Kind::AllToAll => {
                for step in 1..nodes {
                    for node in 0..nodes {
                        let us = bytes / nodes as f64 / rate;
                        let sent = self.message(port(node), us, hop, vec![begun[node]]);
                        seen[(node + step) % nodes].push(sent);
                    }
                }
            }
            Kind::Shifts { shifts, sent } => {
                let part = match sent {
                    Sent::Block => bytes,
                    Sent::Slot => bytes / nodes as f64,
                };
                // The distances between sender and receiver are counted from 1 here. The actual
                // distances do not matter, because in the model all nodes own equally many rows.
                for distance in 1..=shifts {
                    for node in 0..nodes {
                        let sent = self.message(port(node), part / rate, hop, vec![begun[node]]);
                        seen[(node + distance) % nodes].push(sent);
                    }
                }
            }
            Kind::Broadcast => {
                for _ in 0..LINKS {
                    let mut last = begun[0];
                    for node in 1..nodes {
                        let us = bytes / LINKS as f64 / rate;
                        last = self.message(port(node - 1), us, hop, vec![last, begun[node - 1]]);
                        seen[node].push(last);
                    }
                }
            }
        }
        seen.into_iter().enumerate().map(|(node, after)| self.task(node, 0.0, after)).collect()
    }

    /// Algorithm of NCCL with the shortest predicted time for an exchange of this kind and size.
    fn algorithm(&self, kind: Kind, bytes: f64, nodes: usize) -> &'static Algorithm {
        let collective = kind.collective(bytes, nodes);
        let time = |it: &Algorithm| self.network.time(it, collective, (nodes, 1), f64::INFINITY);
        let timed = ALGORITHMS.iter().filter_map(|it| Some((it, time(it)?)));
        timed.min_by(|one, other| one.1.total_cmp(&other.1)).unwrap().0
    }

    /// Adds the tasks of a call of `m` rows, and returns each rank's main stream.
    fn call(&mut self, m: usize, fault: Fault) -> Vec<Stream> {
        let ranks = self.plan.topology();
        let (nodes, local) = (ranks.nodes(), ranks.local().size);
        let node_of = |rank: usize| rank / local;
        let mut streams: Vec<Stream> = vec![Vec::new(); ranks.size];
        let mut last: Vec<usize> =
            (0..ranks.size).map(|rank| self.task(node_of(rank), 0.0, vec![])).collect();
        let mut lane = last.clone();
        // Task at whose end an exchange is complete, by exchange and rank.
        let mut ends: Vec<Vec<usize>> = Vec::new();
        for (index, step) in steps(self.plan, m).unwrap().into_iter().enumerate() {
            if let Fault::Late { rank, step: at, us } = fault
                && at == index
            {
                last[rank] = self.task(node_of(rank), us, vec![last[rank]]);
            }
            match step {
                NodeStep::Part { role, size } => {
                    let part = &self.plan.composed().unwrap().parts[&role];
                    let (us, alone) = (part.predicted_us(size).unwrap(), part.row().is_local());
                    for node in 0..nodes {
                        let of_node = node * local..(node + 1) * local;
                        if alone {
                            of_node.for_each(|rank| {
                                last[rank] = self.task(node, us, vec![last[rank]])
                            });
                        } else {
                            // All ranks of the node must begin before any of them ends.
                            let work = self.task(node, us, last[of_node.clone()].to_vec());
                            last[of_node].fill(work);
                        }
                    }
                }
                NodeStep::Exchange { kind, bytes } => {
                    for of in 0..local {
                        let start =
                            |node: usize| vec![last[node * local + of], lane[node * local + of]];
                        let start: Vec<_> =
                            (0..nodes).map(|node| self.task(node, 0.0, start(node))).collect();
                        let end = self.exchange(kind, bytes as f64, start, (of, local));
                        end.into_iter()
                            .enumerate()
                            .for_each(|(node, end)| lane[node * local + of] = end);
                    }
                    ends.push(lane.clone());
                }
                NodeStep::Wait(_) if matches!(fault, Fault::NoWaits) => {}
                NodeStep::Wait(exchange) => {
                    for rank in 0..ranks.size {
                        last[rank] =
                            self.task(node_of(rank), 0.0, vec![last[rank], ends[exchange][rank]]);
                    }
                }
            }
            (0..ranks.size).for_each(|rank| streams[rank].push((last[rank], step)));
        }
        streams
    }

    /// Runs all tasks in the order of their start times, with the disturbance `fault`.
    fn run(&mut self, fault: Fault) {
        let mut next: Vec<Vec<usize>> = vec![Vec::new(); self.tasks.len()];
        let mut missing = vec![0; self.tasks.len()];
        for (index, task) in self.tasks.iter().enumerate() {
            missing[index] = task.after.len();
            task.after.iter().for_each(|&before| next[before].push(index));
        }
        // Positive floats have the same order as their bits, so the bits serve as keys.
        let mut ready: BinaryHeap<Reverse<(u64, usize)>> = (0..self.tasks.len())
            .filter(|&it| missing[it] == 0)
            .map(|it| Reverse((0, it)))
            .collect();
        let mut from_us = vec![0.0_f64; self.tasks.len()];
        let mut free_us: BTreeMap<usize, f64> = BTreeMap::new();
        while let Some(Reverse((bits, index))) = ready.pop() {
            let task = &mut self.tasks[index];
            let free = task.resource.map(|it| free_us.entry(it).or_default());
            let begin = free.as_ref().map_or(0.0, |it| **it).max(f64::from_bits(bits));
            let done = begin + task.us;
            if matches!(fault, Fault::Lost { node, us } if node == task.node && done > us) {
                continue;
            }
            if let Some(free) = free {
                *free = done;
            }
            let latency = if matches!(fault, Fault::NoLatency) { 0.0 } else { task.latency_us };
            let end = done + latency;
            task.end_us = Some(end);
            for &after in &next[index] {
                from_us[after] = from_us[after].max(end);
                missing[after] -= 1;
                if missing[after] == 0 {
                    ready.push(Reverse((from_us[after].to_bits(), after)));
                }
            }
        }
    }
}

/// Simulates a call: returns its time (`None` if a task waits forever), the tasks, and each rank's
/// stream.
fn simulate(plan: &Plan, m: usize, fault: Fault) -> (Option<f64>, Vec<Task>, Vec<Stream>) {
    let mut simulation = Simulation { plan, network: NETWORK, tasks: Vec::new() };
    let streams = simulation.call(m, fault);
    simulation.run(fault);
    let mut ends = simulation.tasks.iter().map(|task| task.end_us);
    let us = ends.try_fold(0.0_f64, |last, end| Some(last.max(end?)));
    (us, simulation.tasks, streams)
}

/// Network of the simulations: ports of 400 Gbit/s.
const NETWORK: NetworkRate = NetworkRate { bytes_per_us: 50e3 };

/// Operators with steps between nodes.
fn operators() -> impl Iterator<Item = Op> {
    Op::ALL.into_iter().filter(|&op| !row(op).is_local())
}

fn plans((nodes, local): (usize, usize)) -> Vec<(Plan, usize)> {
    let ranks =
        Topology::new(0, nodes * local).on_nodes(nodes).on_device(Device::named("h200").unwrap());
    let mut plans = Vec::new();
    for op in operators() {
        for m in [64, 1024, 8192] {
            let request = Request { dtype: iris_heap::DType::BF16, ..op.request(m, 8192, 3584) };
            plans.push((Plan::new(ranks, &request).unwrap(), m));
        }
    }
    plans
}

/// Largest relative difference that is allowed between the simulated time of a call and the
/// closed-form prediction.
const BOUND: f64 = 0.05;
/// Largest fraction by which a simulated call with several all-reduces by trees may be faster than
/// the closed-form prediction. In the simulation, a node that has finished one all-reduce starts
/// the next one while the last nodes are still receiving; the closed form ignores this overlap.
const OVERLAP: f64 = 0.25;
/// Largest part by which a simulated call with one all-reduce may be faster on 16 nodes or more: the
/// chunks of a short message overlap on their way through a tree, which the closed form does not count.
const TREE: f64 = 0.1;

/// Whether the simulated time of a call agrees with the closed-form prediction.
fn agrees(plan: &Plan, m: usize, fault: Fault) -> bool {
    let forecast = plan.forecast(&NETWORK, m).unwrap();
    let faster = match plan.row().composed {
        Composition::AllReduce { .. } if forecast.blocks > 1 => OVERLAP,
        Composition::AllReduce { .. } if plan.topology().nodes() >= 16 => TREE,
        _ => BOUND,
    };
    let ratio = simulate(plan, m, fault).0.unwrap() / forecast.total_us;
    (1.0 - faster..1.0 + BOUND).contains(&ratio)
}

#[test]
fn the_closed_form_is_that_of_the_simulated_messages() {
    // Intentional errors that changed the time of a call: pairs of the error's index in the list
    // below and the operator.
    let mut seen = BTreeSet::new();
    for world in [(2, 1), (2, 8), (3, 2), (4, 2), (16, 2), (64, 1)] {
        for (plan, m) in plans(world) {
            assert!(agrees(&plan, m, Fault::None), "{world:?} {} of {m} rows", plan.op());
            for (index, planted) in [Fault::NoWaits, Fault::NoLatency].into_iter().enumerate() {
                if !agrees(&plan, m, planted) {
                    seen.insert((index, plan.op()));
                }
            }
        }
    }
    for op in operators() {
        // In a reduce-scatter, the work after the exchange is short. Without its wait for the
        // exchange, the time of the call changes too little to be noticed.
        let is_short = row(op).composed == Composition::ReduceScatter;
        assert!(is_short || seen.contains(&(0, op)), "{op} without waits");
        assert!(seen.contains(&(1, op)), "{op} without latency");
    }
}

/// Tests that a late rank delays a call by at most the rank's own delay, because no step waits for
/// the rank a second time.
#[test]
fn a_late_rank_is_waited_for_once() {
    let (late_us, rank) = (500.0, 3);
    for (plan, m) in plans((4, 2)) {
        let usual = simulate(&plan, m, Fault::None).0.unwrap();
        for step in 0..steps(&plan, m).unwrap().len() {
            let late = Fault::Late { rank, step, us: late_us };
            let us = simulate(&plan, m, late).0.unwrap();
            let (least, most) = (usual * (1.0 - BOUND), usual * (1.0 + BOUND) + late_us);
            assert!(
                (least..most).contains(&us),
                "{} step {step}: {usual:.0} us, then {us:.0}",
                plan.op()
            );
        }
        // A rank that is late from the start must delay the whole call, except the work that
        // overlaps.
        let late = Fault::Late { rank, step: 0, us: late_us };
        assert!(simulate(&plan, m, late).0.unwrap() > late_us, "{}", plan.op());
    }
}

/// Tests that a lost node stops the call on every other node, and that each rank there waits in an
/// exchange between nodes, not for the peers of its own node. A rank whose deadline passes must
/// therefore blame the lost node.
#[test]
fn a_lost_node_is_waited_for_in_exchanges() {
    for (plan, m) in plans((4, 2)) {
        // The root of a broadcast waits for no rank, so the node of the root is the lost node.
        let lost = if plan.row().composed == Composition::Broadcast { 0 } else { 2 };
        let (us, tasks, streams) = simulate(&plan, m, Fault::Lost { node: lost, us: -1.0 });
        assert_eq!(us, None, "{}", plan.op());
        for (rank, stream) in streams.iter().enumerate().filter(|(rank, _)| rank / 2 != lost) {
            let stuck = stream.iter().find(|(task, _)| tasks[*task].end_us.is_none());
            let step = stuck.map(|(_, step)| step);
            assert!(matches!(step, Some(NodeStep::Wait(_))), "{} rank {rank}: {step:?}", plan.op());
        }
    }
}
