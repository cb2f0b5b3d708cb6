//! Worlds over a network: the address where ranks meet, and the host of each rank.

use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::secret::Secret;
use super::{World, check_size};
use crate::bootstrap::launcher_env::{Get, Launch};
use crate::bootstrap::nodes::Nodes;
use crate::bootstrap::notice::{Patience, notice};
use crate::bootstrap::rendezvous;
use crate::bootstrap::tcp::Meeting;
use crate::bootstrap::tcp::address::{Address, other_host};
use crate::bootstrap::tcp::seal::{Key, Terms};
use crate::bootstrap::unique_id::UniqueId;
use crate::bootstrap::{Bootstrap, Step};
use crate::encoding::hash;
use crate::env::{Settings, read, wrong};
use crate::error::{Error, Result};
use crate::util::host_name;

/// Meeting point of the ranks of a job on several hosts, for [`World::over_network`] in programs
/// with a launcher of their own.
#[derive(Clone, Debug)]
pub struct Network {
    address: String,
    job: String,
    secret: Option<Secret>,
    trusted: bool,
    node: Option<String>,
    /// Text of the variables by which a launcher says that ranks are on several hosts; `None` if no
    /// variable says so, or if the user has named the nodes.
    several_hosts: Option<String>,
    /// Whether a launcher may have made the folder in which the ranks of a node meet.
    launched: bool,
}

impl Network {
    /// Describes a network in which rank 0 listens at `address`: `host:port`, where `host` is an IP
    /// address or a name. Rank 0 listens at all addresses of a name, and at no others. `id` names
    /// the job and is not secret.
    pub fn new(address: impl Into<String>, id: &UniqueId) -> Network {
        let job = format!("unique id {id}");
        Network {
            address: address.into(),
            job,
            secret: None,
            trusted: false,
            node: None,
            several_hosts: None,
            launched: false,
        }
    }

    /// Sets the secret by which the ranks authenticate each other. Without a secret only loopback
    /// addresses are accepted, and only processes of rank 0's user.
    #[must_use]
    pub fn secret(self, secret: Secret) -> Network {
        Network { secret: Some(secret), ..self }
    }

    /// Accepts any address without a secret, for a network that no stranger can reach.
    #[must_use]
    pub fn trusted(self) -> Network {
        Network { trusted: true, ..self }
    }

    /// Sets the name of this rank's node, which replaces the host's identity: ranks with the same
    /// name share memory. Lets tests simulate several nodes on one host.
    #[must_use]
    pub fn node(self, name: impl Into<String>) -> Network {
        Network { node: Some(name.into()), ..self }
    }

    /// Adds the address and the secret that environment variables describe; `get` reads a variable.
    fn completed(&self, get: Get<'_>, launch: &Launch) -> Result<Network> {
        let address = launch.master()?.to_string();
        let load = |file: String| {
            Secret::load(&file).map_err(|error| {
                wrong(
                    "IRIS_SECRET_FILE",
                    &file,
                    &format!("a file with the job's secret, but {error}"),
                )
            })
        };
        let secret = get("IRIS_SECRET_FILE")?.map(load).transpose()?;
        let trusted = match get("IRIS_TRUST_NETWORK")?.as_deref() {
            None | Some("0") => false,
            Some("1") => true,
            Some(other) => return Err(wrong("IRIS_TRUST_NETWORK", other, "0 or 1")),
        };
        Ok(Network { address, secret, trusted, ..self.clone() })
    }

    /// Identity and name of this rank's node.
    fn own_node(&self) -> (String, String) {
        let name = host_name();
        match &self.node {
            Some(node) => (format!("IRIS_NODE={node}"), format!("{name} (node {node})")),
            None => (identity(), name),
        }
    }

    /// Place where the ranks of this rank's node, which has this identity and name, meet.
    /// `other_host` describes the host of rank 0; `None` if that is this host. The place depends on
    /// it, so that two jobs on this host do not meet if they use the same port but their ranks 0
    /// are on different hosts.
    fn place(
        &self,
        (identity, name): &(String, String),
        other_host: Option<String>,
    ) -> Result<rendezvous::Place> {
        let hash = hash(&[identity.as_bytes()]);
        let other = other_host.unwrap_or_else(|| "rank 0 here".into());
        let job = format!("{}, {other}, relay of {name}, {hash:032x}", self.job);
        rendezvous::Place::new(job, self.launched)
    }

    /// Waits until the address of rank 0's host can be resolved, and returns its addresses; `found`
    /// is the outcome of the first attempt. Rank 0 itself fails at once. The other ranks try again,
    /// because a resolver may learn the name later, until `timeout` is over or a note at `place`
    /// says that the meeting has failed.
    fn await_host(
        &self,
        (address, mut found): (&Address, std::io::Result<Vec<SocketAddr>>),
        rank: usize,
        place: &rendezvous::Place,
        timeout: Duration,
    ) -> Result<Vec<SocketAddr>> {
        let started = Instant::now();
        let mut patience = Patience::new(started, started + timeout);
        loop {
            let error = match found {
                Ok(addresses) => return Ok(addresses),
                Err(error) => error,
            };
            let waited = started.elapsed();
            if rank == 0 || !address.may_appear(&error) || waited >= timeout {
                let place = format!("tcp {address} ({})", self.job);
                let problem = format!(
                    "rank {rank} looks the host of rank 0 up: {error}; set MASTER_ADDR to a name or an address of \
                     that host which every host can look up"
                );
                return Err(Error::Rendezvous { place, problem });
            }
            if let Some(error) = place.came_to_nothing(Some(started)) {
                return Err(error);
            }
            if patience.is_over().is_some() {
                notice(format_args!(
                    "rank {rank} looks up the host of rank 0, {address}: {waited:.1?} of {timeout:.1?}; last: {error}"
                ));
            }
            std::thread::sleep(LOOK_UP.min(timeout - waited));
            found = address.look_up();
        }
    }

    /// Checks that a job without a secret meets at loopback addresses, unless the network is
    /// trusted. Returns the addresses at which `rank` listens or connects: those of rank 0's host;
    /// or, on rank 0, all interfaces if its own address is a loopback address but ranks of other
    /// hosts must reach it.
    fn checked(&self, rank: usize, addresses: Vec<SocketAddr>) -> Result<Vec<SocketAddr>> {
        let is_loopback = addresses.iter().all(|it| it.ip().to_canonical().is_loopback());
        let reached = self.several_hosts.as_ref().filter(|_| rank == 0 && is_loopback);
        let address = &self.address;
        let (why, or) = match reached {
            Some(several) => (
                format!(
                    "rank 0 listens on all interfaces, as ranks are on several hosts ({several}) and {address} is \
                     reached from this one alone"
                ),
                "set the same IRIS_NODE for all ranks if they are on one host",
            ),
            None => (
                format!("{address} is reached over a network"),
                "set IRIS_TRUST_NETWORK=1 where nobody else can reach the port",
            ),
        };
        if self.secret.is_none() && (reached.is_some() || !is_loopback && !self.trusted) {
            let expected = format!(
                "a file with the secret of the job, since {why}: make one with `iris secret FILE`, and give all \
                 ranks a copy; or {or}"
            );
            return Err(wrong("IRIS_SECRET_FILE", "(not set)", &expected));
        }
        if self.secret.is_none() && !is_loopback {
            tracing::warn!(at = address, "no secret: whoever reaches this port can join the job");
        }
        let port = addresses.first().map_or(0, SocketAddr::port);
        let all = || [(Ipv4Addr::UNSPECIFIED, port).into(), (Ipv6Addr::UNSPECIFIED, port).into()];
        Ok(if reached.is_some() { all().into() } else { addresses })
    }
}

/// Network that the environment describes; `None` if all ranks are on one host.
pub(super) fn from_env(launch: &Launch, number: usize) -> Result<Option<Network>> {
    detect(&read, launch, number)
}

/// Network that environment variables, read by `get`, describe; `None` if all ranks are on one
/// host.
fn detect(get: Get<'_>, launch: &Launch, number: usize) -> Result<Option<Network>> {
    let node = get("IRIS_NODE")?;
    if launch.size == 1 || (launch.several_hosts.is_none() && node.is_none()) {
        return Ok(None);
    }
    let job = format!("{}, world {number}", launch.job);
    let several_hosts = launch.several_hosts.clone().filter(|_| node.is_none());
    let (address, launched) = (String::new(), launch.folder.is_some());
    let network =
        Network { address, job, secret: None, trusted: false, node, several_hosts, launched };
    network.completed(get, launch).map(Some).or_else(|error| {
        // For rank 0 the host of rank 0 is this host, whatever its MASTER_ADDR is.
        let other = launch.master().ok().filter(|_| launch.rank > 0);
        let place = network.place(&network.own_node(), other.and_then(|it| it.other_host()))?;
        place.prepared(launch.rank, Err(error))
    })
}

impl World {
    /// Opens the world of `size` ranks on one or several hosts that meet at `network`. Ranks must
    /// be numbered node by node; which ranks share a node is detected.
    ///
    /// # Errors
    /// Errors of [`World::from_env`]; [`Error::Invalid`] for a size or rank outside its range;
    /// [`Error::Env`] if there is no secret and the address can be reached from other hosts.
    pub fn over_network(network: &Network, rank: usize, size: usize) -> Result<World> {
        World::meet_over(network, rank, size, Settings::from_env())
            .map_err(|error| error.on_rank(rank))
    }

    /// Opens a world like [`World::over_network`], with the program's own settings.
    ///
    /// # Errors
    /// The errors of [`World::over_network`] and of [`Settings::check`].
    pub fn over_network_with(
        network: &Network,
        rank: usize,
        size: usize,
        settings: Settings,
    ) -> Result<World> {
        World::meet_over(network, rank, size, Ok(settings)).map_err(|error| error.on_rank(rank))
    }

    /// Opens a world over several hosts. If the settings have an error, tells it to ranks that
    /// already wait.
    pub(super) fn meet_over(
        network: &Network,
        rank: usize,
        size: usize,
        settings: Result<Settings>,
    ) -> Result<World> {
        check_size("size of the world", size)?;
        if rank >= size {
            return Err(Error::invalid("rank of over_network", rank, format!("0 to {}", size - 1)));
        }
        let started = Instant::now();
        let node = network.own_node();
        let address = Address::parse(&network.address);
        let address = network.place(&node, None)?.prepared(rank, address)?;
        let found = address.look_up();
        // For rank 0 the host of rank 0 is this host, whatever its MASTER_ADDR is.
        let other = |other: Option<String>| other.filter(|_| rank != 0);
        let place = network.place(&node, other(address.other_host_of(&found)))?;
        let prepared = settings.and_then(Settings::checked).and_then(|settings| {
            let timeout = settings.meeting_deadline();
            let found = network.await_host((&address, found), rank, &place, timeout)?;
            let place = network.place(&node, other(other_host(&found)))?;
            let key = match &network.secret {
                Some(secret) => Key::Secret(secret.0),
                None if network.trusted => Key::Open,
                None => Key::OfUser(Secret::new()?.0),
            };
            let terms = Terms { key, job: network.job.clone(), size };
            let addresses = network.checked(rank, found)?;
            let meeting = Meeting::new(address, addresses, terms, settings.silence());
            Ok((meeting, place, settings))
        });
        let (meeting, place, settings) = place.prepared(rank, prepared)?;
        let (job, timeout) = (network.job.as_str(), settings.meeting_deadline());
        let all = meeting.rendezvous(place, rank, timeout.saturating_sub(started.elapsed()))?;
        tracing::debug!(rank, size, job, "all ranks have met over the network");
        let step = Step {
            what: "finding out which ranks share a node".into(),
            deadline: Instant::now() + timeout,
            on_missing: None,
            numbers: None,
        };
        let node = (node.0.as_str(), node.1.as_str());
        let (nodes, hosts) = Nodes::join(all, node, job, timeout, &step)?;
        Ok(World::on_nodes(Arc::new(nodes) as Arc<dyn Bootstrap>, settings, hosts, None))
    }
}

/// Pause between two attempts to resolve the host of rank 0.
const LOOK_UP: Duration = Duration::from_millis(250);

/// Identity of a machine since it was started: the system's boot id, or the host's name if there is
/// no boot id. All containers of one machine have the same identity.
pub(crate) fn machine() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id");
    boot.unwrap_or_else(|_| format!("host {}", host_name()))
}

/// Identity of a host: equal for two processes exactly if they can share memory. It combines the
/// machine's identity with the namespaces that a container may have separately.
fn identity() -> String {
    let machine = machine();
    let namespace = |name: &str| {
        // Read the namespaces of this thread, which may differ from the namespaces of its process.
        let link = fs::read_link(format!("/proc/thread-self/ns/{name}"));
        link.map_or_else(|_| format!("{name}:?"), |link| link.display().to_string())
    };
    let spaces = ["ipc", "net", "pid", "uts"].map(namespace);
    format!("{} {}", machine.trim(), spaces.join(" "))
}

impl Settings {
    /// Time after which the ranks of an unreachable host count as lost.
    pub(crate) fn silence(&self) -> Duration {
        (self.host_deadline() / 36).clamp(SILENCE.0, SILENCE.1)
    }
}

/// Minimum and maximum of [`Settings::silence`]; the minimum exists because the system counts
/// keepalive probes in whole seconds.
const SILENCE: (Duration, Duration) = (Duration::from_secs(3), Duration::from_secs(60));

#[cfg(test)]
mod tests {
    use super::*;

    /// Network of one rank on each of two hosts, with the variables `vars`.
    fn detected(vars: &[(&str, Option<&str>)]) -> Result<Option<Network>> {
        let two = ["WORLD_SIZE=2", "LOCAL_WORLD_SIZE=1", "MASTER_PORT=29500"];
        let get = |name: &str| {
            let given = vars.iter().find(|v| v.0 == name).and_then(|v| v.1);
            let mut usual = two.iter().filter_map(|v| v.strip_prefix(name)?.strip_prefix('='));
            Ok(given.or(usual.next()).map(String::from))
        };
        detect(&get, &Launch::detect(&get)?, 0)
    }

    /// Text of the error by which a network is refused; `None` if it is trusted.
    fn refused(network: Network) -> Option<String> {
        refused_on(1, network)
    }

    /// Text of the error by which `rank` refuses a network; `None` if it is trusted.
    fn refused_on(rank: usize, network: Network) -> Option<String> {
        let addresses = Address::parse(&network.address).unwrap().look_up().unwrap();
        network.checked(rank, addresses).err().map(|e| e.to_string())
    }

    /// Tests the error for a Slurm node name that cannot be resolved. The name has two dots in a
    /// row, which no resolver accepts.
    #[test]
    fn a_node_name_that_does_not_resolve_leads_to_master_addr() {
        let vars = "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_JOB_ID=7 \
                    SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=no..node[07-08] IRIS_PORT=29500";
        let get = |name: &str| {
            let value = |v: &str| Some(v.strip_prefix(name)?.strip_prefix('=')?.to_owned());
            Ok(vars.split_whitespace().find_map(value))
        };
        let network = detect(&get, &Launch::detect(&get).unwrap(), 0).unwrap().expect("two hosts");
        let settings = Settings::default();
        let text = World::meet_over(&network, 0, 2, Ok(settings)).unwrap_err().to_string();
        assert!(
            text.contains("tcp no..node07:29500") && text.contains("set MASTER_ADDR to"),
            "{text}"
        );
    }

    #[test]
    fn a_network_is_trusted_by_a_variable_of_0_or_1() {
        let detected = |trust: Option<&str>| {
            detected(&[
                ("RANK", Some("1")),
                ("LOCAL_RANK", Some("0")),
                ("MASTER_ADDR", Some("192.0.2.1")),
                ("IRIS_TRUST_NETWORK", trust),
            ])
        };
        let network = |trust| detected(trust).unwrap().expect("two hosts");
        assert_eq!(refused(network(Some("1"))), None);
        for trust in [None, Some("0")] {
            let text = refused(network(trust)).expect("no trust");
            assert!(text.contains("IRIS_TRUST_NETWORK=1"), "{text}");
        }
        let text = detected(Some("yes")).unwrap_err().to_string();
        assert!(text.contains("IRIS_TRUST_NETWORK=yes") && text.contains("0 or 1"), "{text}");
    }

    #[test]
    fn ranks_of_other_hosts_reach_a_rank_0_at_loopback_by_a_secret_alone() {
        let detected = |node: Option<&str>| {
            let [master, trust] = [("MASTER_ADDR", "localhost"), ("IRIS_TRUST_NETWORK", "1")];
            let vars = [("RANK", "0"), master, trust].map(|(name, value)| (name, Some(value)));
            detected(&[&vars[..], &[("IRIS_NODE", node)]].concat()).unwrap().expect("two hosts")
        };
        let network = detected(None);
        let text = refused_on(0, network.clone()).expect("no secret");
        let why = "(LOCAL_WORLD_SIZE=1, WORLD_SIZE=2) and localhost:29501 is reached from this one";
        assert!(text.starts_with("IRIS_SECRET_FILE=(not set)") && text.contains(why), "{text}");
        let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 29501));
        let listens = |network: &Network| network.checked(0, vec![loopback]).unwrap();
        let secret = network.clone().secret(Secret::new().unwrap());
        let all = listens(&secret).into_iter().map(|it| it.to_string()).collect::<Vec<_>>();
        assert_eq!(all, ["0.0.0.0:29501", "[::]:29501"]);
        // If the user names the nodes, they are on one host, so only loopback is used.
        assert_eq!(listens(&detected(Some("a"))), [loopback]);
        assert_eq!(secret.checked(1, vec![loopback]).unwrap(), [loopback]);
    }

    #[test]
    fn without_a_secret_only_loopback_is_taken() {
        let network = |address: &str| Network::new(address, &UniqueId::new().unwrap());
        assert_eq!(refused(network("127.0.0.1:1")).or(refused(network("[::1]:1"))), None);
        let text = refused(network("192.0.2.1:1")).unwrap();
        assert!(
            text.contains("IRIS_SECRET_FILE=(not set)") && text.contains("iris secret"),
            "{text}"
        );
        assert_eq!(refused(network("192.0.2.1:1").trusted()), None);
        assert_eq!(refused(network("192.0.2.1:1").secret(Secret::new().unwrap())), None);
    }
}
