//! Tests of the launcher's namespaces for simulated nodes, and of ranks in two of them when the
//! cable between them is cut. Ignored where this process may not make namespaces.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;

use iris_heap::{Error, Network, Secret, Settings, UniqueId, World};
use iris_testkit::harness::{self, Group, named};
use iris_testkit::launch::{self, Namespaces, launch};
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

/// Namespaces of two nodes and the cable between them, which has IPv6 addresses too.
struct Cable(Namespaces);

impl Cable {
    fn new() -> Result<Cable, String> {
        let made = Namespaces::new(2).and_then(|nodes| {
            nodes.ip(0, "addr add fd77::1/64 dev node1 nodad")?;
            nodes.ip(1, "addr add fd77::2/64 dev node0 nodad")?;
            Ok(Cable(nodes))
        });
        made.map_err(|error| format!("{error:#}"))
    }

    /// Moves this thread into the network namespace at one end of the cable, 0 or 1.
    fn enter(&self, end: usize) {
        let space = File::open(self.0.network(end)).unwrap();
        move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
    }

    fn cut(&self) {
        self.0.ip(0, "link set node1 down").unwrap();
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
