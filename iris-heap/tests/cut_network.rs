//! Tests of the launcher's namespaces for simulated nodes, and of ranks in several of them: names of
//! one host, jobs that share a host, and a cable that is cut. Ignored where this process may not make
//! namespaces.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use iris_heap::{Error, Network, Secret, Settings, UniqueId, World};
use iris_testkit::harness::{self, Group, named};
use iris_testkit::launch::{self, Namespaces, launch};
use iris_testkit::worlds::on_threads;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Variable of a process of this program that is a rank.
const IS_RANK: &str = "CUT_NETWORK_RANK";

fn main() -> ExitCode {
    if std::env::var_os(IS_RANK).is_some() {
        let met = World::from_env().and_then(|world| {
            world.barrier()?;
            let found = format!("rank {} of {} nodes", world.rank(), world.nodes());
            world.close().map(|()| found)
        });
        println!("{}", met.unwrap_or_else(|error| error.to_string()));
        return ExitCode::SUCCESS;
    }
    let missing = Cable::new().err();
    harness::run(vec![Group::new(
        missing,
        named![
            ranks_meet_over_ipv4_and_ipv6,
            a_cut_network_is_told_to_both_ends,
            a_master_pod_has_another_name_for_itself_than_its_workers,
            jobs_of_two_masters_stay_apart_on_a_host_that_they_share,
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
    on_threads(0..2, |rank| {
        cable.enter(rank);
        // The two ranks count as two nodes, because the network namespace is a part of the host's
        // identity.
        let settings = Settings::default().deadline(0.1);
        f(World::over_network_with(&network, rank, 2, settings).unwrap())
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

/// Tests ranks with the variables of an operator of Kubernetes: its master is `localhost` to itself
/// and the name of a service to the workers, in whose hosts file this test puts that name.
fn a_master_pod_has_another_name_for_itself_than_its_workers() {
    let cable = Cable::new().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let [hosts, secret] = ["hosts", "secret"].map(|name| folder.path().join(name));
    std::fs::write(&hosts, "127.0.0.1 localhost\n10.77.0.1 train-master-0\n").unwrap();
    Secret::new().unwrap().save(&secret).unwrap();
    const POD: &str = "mount --bind \"$0\" /etc/hosts && exec \"$1\"";
    let run = |with_secret: bool| {
        let pods = [(0, "localhost"), (1, "train-master-0")].map(|(rank, master)| {
            let mut pod = Command::new("nsenter");
            pod.arg(format!("--net={}", cable.0.network(rank).display()));
            pod.args(["unshare", "--mount", "sh", "-c", POD]).arg(&hosts);
            pod.arg(std::env::current_exe().unwrap()).env(IS_RANK, "1");
            pod.envs([("MASTER_ADDR", master), ("MASTER_PORT", "23456"), ("WORLD_SIZE", "2")]);
            pod.env("RANK", rank.to_string()).env("LOCAL_RANK", "0").env("LOCAL_WORLD_SIZE", "1");
            pod.env("TMPDIR", folder.path()).env("IRIS_DEADLINE", "0.05");
            if with_secret {
                pod.env("IRIS_SECRET_FILE", &secret);
            }
            pod.stdout(Stdio::piped()).spawn().unwrap()
        });
        pods.map(|pod| String::from_utf8(pod.wait_with_output().unwrap().stdout).unwrap())
    };
    assert_eq!(run(true), ["rank 0 of 2 nodes\n", "rank 1 of 2 nodes\n"]);
    let told = run(false);
    assert!(told.iter().all(|text| text.contains("IRIS_SECRET_FILE=(not set)")), "{told:?}");
    assert!(told[0].contains("listens on all interfaces"), "{told:?}");
}

/// Tests two jobs of one id and one port, whose ranks 1 and 2 share the host of node 0.
fn jobs_of_two_masters_stay_apart_on_a_host_that_they_share() {
    let nodes = Cable(Namespaces::new(3).unwrap());
    let (id, secret) = (UniqueId::new().unwrap(), Secret::new().unwrap());
    let network = |ip: &str| Network::new(format!("{ip}:4078"), &id).secret(secret.clone());
    let jobs = [(1, network("10.77.0.2")), (2, network("10.77.0.3"))];
    let ranks = [1, 2, 0].into_iter().flat_map(|rank| jobs.iter().map(move |job| (rank, job)));
    on_threads(ranks, |(rank, (master, network)): (usize, &(usize, Network))| {
        let node = if rank == 0 { *master } else { 0 };
        nodes.enter(node);
        let settings = Settings::default().deadline(0.1);
        let world = World::over_network_with(network, rank, 3, settings).unwrap();
        let all = world.allgather(&[node as u8]).unwrap().concat();
        assert_eq!(all, [*master as u8, 0, 0]);
        world.close().unwrap();
    });
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
