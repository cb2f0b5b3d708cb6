//! Tests of ranks in network namespaces of their own, joined by a virtual cable that is cut.
//! Also tests the launcher's namespaces for simulated nodes. Ignored where this process may not make namespaces.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, ExitCode};

use iris_heap::{Error, Network, Secret, Settings, UniqueId, World};
use iris_testkit::harness::{self, Group, named};
use iris_testkit::launch::{self, launch};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

fn main() -> ExitCode {
    let missing = Cable::new().err();
    harness::run(vec![Group::new(
        missing,
        named![
            ranks_meet_over_ipv4_and_ipv6,
            a_cut_network_is_told_to_both_ends,
            launched_nodes_have_a_network_and_a_name_of_their_own
        ],
    )])
}

/// Two network namespaces and a virtual cable between them; all are removed when this is dropped.
struct Cable {
    names: [String; 2],
}

fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip").args(arguments.split(' ')).output();
    let output = output.map_err(|e| format!("ip, of iproute2, does not start: {e}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("ip {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

impl Cable {
    fn new() -> Result<Cable, String> {
        let id = std::process::id();
        let names = ["a", "b"].map(|end| format!("iris-{end}-{id}"));
        let cable = Cable { names };
        let [a, b] = &cable.names;
        ip(&format!("netns add {a}"))?;
        ip(&format!("netns add {b}"))?;
        ip(&format!("-n {a} link add up0 type veth peer name up0 netns {b}"))?;
        for (name, host) in [(a, 1), (b, 2)] {
            ip(&format!("-n {name} addr add 10.77.0.{host}/30 dev up0"))?;
            ip(&format!("-n {name} addr add fd77::{host}/64 dev up0 nodad"))?;
            ip(&format!("-n {name} link set up0 up"))?;
        }
        Ok(cable)
    }

    /// Moves this thread into the network namespace at one end of the cable, 0 or 1.
    fn enter(&self, end: usize) {
        let space = File::open(format!("/run/netns/{}", self.names[end])).unwrap();
        move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
    }

    fn cut(&self) {
        ip(&format!("-n {} link set up0 down", self.names[0])).unwrap();
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = ip(&format!("netns del {name}"));
        }
    }
}

/// Runs `f` on two ranks, one at each end of the cable.
fn run<T: Send>(cable: &Cable, address: &str, f: impl Fn(World) -> T + Sync) -> Vec<T> {
    let network = Network::new(address, &UniqueId::new().unwrap()).secret(Secret::new().unwrap());
    std::thread::scope(|scope| {
        let rank_main = |rank: usize| {
            cable.enter(rank);
            // The two ranks count as two nodes, because the network namespace is a part of the
            // host's identity.
            let settings = Settings::default().deadline(0.1);
            f(World::over_network_with(&network, rank, 2, settings).unwrap())
        };
        let ranks = [0, 1].map(|rank| scope.spawn(move || rank_main(rank)));
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn ranks_meet_over_ipv4_and_ipv6() {
    let cable = Cable::new().unwrap();
    for address in ["10.77.0.1:4077", "[fd77::1]:4077"] {
        run(&cable, address, |world| {
            assert_eq!((world.nodes(), world.local_size()), (2, 1));
            world.barrier().unwrap();
            world.close().unwrap();
        });
    }
}

fn a_cut_network_is_told_to_both_ends() {
    let cable = Cable::new().unwrap();
    let errors = run(&cable, "10.77.0.1:4077", |world| {
        world.barrier().unwrap();
        if world.rank() == 0 {
            cable.cut();
        }
        // The barrier is repeated until it fails, because data that the other end sent before the
        // cut still arrives.
        loop {
            if let Err(error) = world.barrier() {
                break error;
            }
        }
    });
    for (rank, error) in errors.into_iter().enumerate() {
        // The error must be a loss; an absence would mean that only the deadline of the exchange
        // had passed.
        assert!(matches!(error, Error::RankLost { rank: lost, .. } if lost == 1 - rank), "{error}");
    }
}

fn launched_nodes_have_a_network_and_a_name_of_their_own() {
    let options = launch::Options::default().nodes(2).namespaces(true).stdout(std::io::sink());
    // Every node must have a route to node 0.
    let program = "hostname; readlink /proc/self/ns/net; ip route get $MASTER_ADDR >/dev/null";
    let outcome = launch(Path::new("sh"), &["-c", program], 4, options).unwrap();
    assert!(outcome.ok(), "{}", outcome.report());
    let stdout: Vec<_> = outcome.ranks.iter().map(|rank| rank.stdout.as_str()).collect();
    let names = ["node0", "node0", "node1", "node1"];
    assert!(stdout.iter().zip(names).all(|(text, name)| text.starts_with(name)), "{stdout:?}");
    assert_eq!((stdout[0], stdout[2]), (stdout[1], stdout[3]));
    let network = |rank: usize| stdout[rank].lines().nth(1).unwrap();
    assert_ne!(network(0), network(2));
}
