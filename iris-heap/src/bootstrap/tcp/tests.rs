//! Tests of ranks that meet over loopback, and of hostile connections to their port.
//!
//! This file is long because all tests share the functions that make a meeting.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::thread;

use iris_testkit::free_port;

use super::seal::GREETING;
use super::*;
use crate::bootstrap::frames::Frame;
use crate::bootstrap::{Bootstrap, Step};

fn meeting(host: &str, size: usize) -> Meeting {
    static JOBS: AtomicU16 = AtomicU16::new(0);
    let number = JOBS.fetch_add(1, Ordering::Relaxed);
    let job = format!("job {number} of process {}", std::process::id());
    let bare = host.trim_matches(['[', ']']);
    let terms = Terms { key: Key::Secret([5; 32]), job, size };
    at(&format!("{host}:{}", free_port::on(bare).unwrap()), terms)
}

/// Meeting at an address.
fn at(address: &str, terms: Terms) -> Meeting {
    let address = Address::parse(address).unwrap();
    let addresses = address.look_up().unwrap();
    Meeting::new(address, addresses, terms, Duration::from_secs(20))
}

impl Meeting {
    /// Connects `rank` as the only rank of its node.
    fn join(&self, rank: usize, timeout: Duration) -> Result<Processes> {
        self.rendezvous(self.node(rank), rank, timeout)
    }

    /// Place where the ranks of `node` meet.
    fn node(&self, node: usize) -> Place {
        Place::new(format!("{}, node {node}", self.terms.job), false).unwrap()
    }
}

const PLENTY: Duration = Duration::from_secs(300);

fn step() -> Step {
    Step { what: "test".into(), deadline: Instant::now() + PLENTY, on_missing: None, numbers: None }
}

/// Lets all ranks meet over loopback and exchange their rank numbers; `before` runs on each rank
/// first.
fn meet(meeting: &Meeting, before: impl Fn(usize) + Sync) {
    thread::scope(|scope| {
        let rank_main = |rank: usize| {
            before(rank);
            let ranks = meeting.join(rank, PLENTY).unwrap();
            let all = ranks.allgather(&vec![rank as u8; 1000 * rank], &step()).unwrap();
            let lens: Vec<_> = all.iter().map(Vec::len).collect();
            assert_eq!(lens, (0..meeting.terms.size).map(|r| 1000 * r).collect::<Vec<_>>());
            ranks.leave(true);
        };
        let threads: Vec<_> =
            (0..meeting.terms.size).map(|rank| scope.spawn(move || rank_main(rank))).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn ranks_meet_over_ipv4_and_ipv6() {
    meet(&meeting("127.0.0.1", 4), |_| ());
    if TcpListener::bind("[::1]:0").is_ok() {
        meet(&meeting("[::1]", 3), |_| ());
    }
    // The meeting works by host name, too, because launchers often give a name instead of an
    // address.
    meet(&meeting("localhost", 2), |_| ());
}

#[test]
fn late_ranks_are_waited_for() {
    // In the second world rank 0 comes last, so that the first attempts of the other ranks are
    // refused.
    for late in [2, 0] {
        let wait = |rank: usize| {
            if rank == late {
                thread::sleep(Duration::from_millis(500));
            }
        };
        meet(&meeting("127.0.0.1", 3), wait);
    }
}

#[test]
fn rank_0_listens_only_at_its_address() {
    let meeting = meeting("127.0.0.1", 2);
    let _listening = meeting.listen().unwrap();
    let mut address = meeting.addresses[0];
    TcpStream::connect(address).unwrap();
    // All addresses of 127.0.0.0/8 reach this host, so 127.0.0.2 stands for another interface of
    // it.
    address.set_ip([127, 0, 0, 2].into());
    let error = TcpStream::connect(address).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{error}");
}

/// Tests that rank 0 listens at all addresses of its name that belong to its host, and that errors
/// name these addresses.
#[test]
fn rank_0_listens_at_all_addresses_of_its_host() {
    let right = meeting("127.0.0.1", 2);
    let port = right.addresses[0].port();
    let all =
        [[192, 0, 2, 1], [127, 0, 0, 1], [127, 0, 0, 2]].map(|ip| SocketAddr::from((ip, port)));
    let (listeners, listening) =
        Meeting { addresses: all.into(), ..right.clone() }.listen().unwrap();
    assert_eq!(listening.addresses, all[1..]);
    all[1..].iter().for_each(|address| drop(TcpStream::connect(address).unwrap()));
    let told = format!("rank 0 listens at 127.0.0.1:{port} and 127.0.0.2:{port}");
    assert!(listening.to_string().contains(&told), "{listening}");
    drop(listeners);
    let Err(error) = Meeting { addresses: all[..1].into(), ..right }.listen() else {
        panic!("it listens at an address of another host")
    };
    assert!(error.to_string().contains(&format!("bind at 192.0.2.1:{port}")), "{error}");
}

#[test]
fn another_size_is_told_to_all() {
    let right = meeting("127.0.0.1", 2);
    let wrong = Meeting { terms: Terms { size: 3, ..right.terms.clone() }, ..right.clone() };
    thread::scope(|scope| {
        let rank_0 = scope.spawn(|| right.join(0, PLENTY).err());
        let told = [wrong.join(1, PLENTY).err(), rank_0.join().unwrap()];
        for told in told.map(|error| error.expect("an error").to_string()) {
            assert!(told.contains("size of the world is 2 on rank 0, 3 on rank 1"), "{told}");
        }
    });
}

#[test]
fn another_secret_or_job_is_refused_and_told_so() {
    let right = meeting("127.0.0.1", 2);
    let other = |terms| Meeting { terms, ..right.clone() };
    let key = Terms { key: Key::Secret([6; 32]), ..right.terms.clone() };
    // The other job's name has this process's id, because several runs of this test may share a
    // host.
    let another = format!("another than {}", right.terms.job);
    let job = Terms { job: another.clone(), ..right.terms.clone() };
    let both = Terms { size: 3, ..job.clone() };
    let none = Terms { key: Key::OfUser([0; 32]), ..right.terms.clone() };
    let jobs = format!("the job is {} on rank 0, {another} on rank 1", right.terms.job);
    let sizes = format!("{jobs}; the size of the world is 2 on rank 0, 3 on rank 1");
    let secret = "IRIS_SECRET_FILE on rank 0 has another secret than on rank 1";
    let no_secret = "IRIS_SECRET_FILE is set on rank 0, not set on rank 1";
    thread::scope(|scope| {
        let rank_0 = scope.spawn(|| right.join(0, PLENTY).map(|it| it.leave(true)));
        for (terms, told) in [(key, secret), (job, &jobs), (both, &sizes), (none, no_secret)] {
            let Err(error) = other(terms).join(1, PLENTY) else { panic!("it was let in") };
            let text = error.to_string();
            assert!(text.contains(told), "{text}");
        }
        let rank_1 = right.join(1, PLENTY).unwrap();
        rank_0.join().unwrap().unwrap();
        rank_1.leave(true);
    });
}

/// Tests that ranks without a secret get the key of rank 0, and that rank 0 refuses, with a reason,
/// ranks of another network, user or configuration.
#[test]
fn ranks_of_one_user_need_no_secret() {
    let meeting = meeting("127.0.0.1", 2);
    let of = |key| Meeting { terms: Terms { key, ..meeting.terms.clone() }, ..meeting.clone() };
    let [zero, one, open] = [Key::OfUser([1; 32]), Key::OfUser([2; 32]), Key::Open].map(of);
    // A port forwarder, such as ssh, offers no Unix socket that proves the user.
    let through = TcpListener::bind("127.0.0.1:0").unwrap();
    let detour = Meeting { addresses: vec![through.local_addr().unwrap()], ..one.clone() };
    let cases = [
        (&zero, &open, "not set on rank 0, not set, with IRIS_TRUST_NETWORK=1, on rank 1"),
        (&open, &one, "not set, with IRIS_TRUST_NETWORK=1, on rank 0, not set on rank 1"),
        (&zero, &detour, "only to processes of its user on its host, which rank 1 is not"),
    ];
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..REFUSALS {
                let (mut near, _) = through.accept().unwrap();
                let mut far = loop {
                    if let Ok(far) = TcpStream::connect(meeting.addresses[0]) {
                        break far;
                    }
                    thread::sleep(Duration::from_millis(5));
                };
                let mut greeting = [0; GREETING];
                near.read_exact(&mut greeting).unwrap();
                far.write_all(&greeting).unwrap();
                let mut reply = [0; REPLY];
                far.read_exact(&mut reply).unwrap();
                near.write_all(&reply).unwrap();
            }
        });
        for (rank_0, wrong, told) in cases {
            let right = if matches!(rank_0.terms.key, Key::Open) { &open } else { &one };
            let rank_0 = scope.spawn(|| rank_0.join(0, PLENTY).map(|it| it.leave(true)));
            let text = wrong.join(1, PLENTY).err().expect("it was let in").to_string();
            assert!(text.contains(told) && text.contains("IRIS_SECRET_FILE"), "{text}");
            let rank_1 = right.join(1, PLENTY).unwrap();
            rank_0.join().unwrap().unwrap();
            rank_1.leave(true);
        }
    });
}

/// Tests that a rank does not wait for an address that it can never reach: a link-local address
/// without a zone.
#[test]
fn an_address_that_cannot_be_reached_is_an_error_at_once() {
    let meeting = at("[fe80::1]:9", meeting("127.0.0.1", 2).terms);
    let told = meeting.join(1, PLENTY).err().expect("an error").to_string();
    assert!(told.starts_with("rank 1 failed in rendezvous at tcp [fe80::1]:9"), "{told}");
    let words = ["connect to [fe80::1]:9: ", "(os error ", "a link-local address needs a zone"];
    assert!(words.iter().all(|word| told.contains(word)), "{told}");
}

/// Tests that rank 0 gives up at once if it can accept no connection at its port or at the socket
/// for its key. A socket that does not listen stands for a socket on which the system forbids the
/// call.
#[test]
fn a_port_that_never_accepts_is_an_error_of_rank_0() {
    let socket = || pair().unwrap().0.cast::<OwnedFd>();
    let desk = KeyDesk { key: [0; 32], sockets: vec![socket().cast()] };
    for (desk, listeners) in [(None, vec![socket().cast()]), (Some(desk), vec![])] {
        let mut door = Door::new(meeting("127.0.0.1", 2), desk, listeners);
        let told = door.gather_others(Instant::now() + PLENTY).unwrap_err().to_string();
        assert!(told.starts_with("rank 0 failed in rendezvous at tcp 127.0.0.1:"), "{told}");
        assert!(told.contains("accept: Invalid argument (os error 22)"), "{told}");
    }
}

/// Tests the error for a port at which another program listens that never answers.
#[test]
fn a_listener_that_does_not_answer_is_told() {
    let meeting = meeting("127.0.0.1", 2);
    let listener = TcpListener::bind(meeting.addresses[0]).unwrap();
    let told = meeting.join(1, Duration::from_millis(1500)).err().expect("an error").to_string();
    assert!(told.contains("another program may listen there"), "{told}");
    drop(listener);
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let meeting = meeting("127.0.0.1", 3);
    let soon = Duration::from_millis(700);
    thread::scope(|scope| {
        let run = |rank: usize| meeting.join(rank, soon).err().map(|error| error.to_string());
        let rank_1 = scope.spawn(move || run(1));
        for told in [run(0), rank_1.join().unwrap()] {
            let told = told.expect("an error");
            assert!(told.contains("waited") && told.contains("for rank 2"), "{told}");
        }
    });
    // Rank 3 does not come, and is on another node than ranks 1 and 2.
    let meeting = self::meeting("127.0.0.1", 4);
    let soon = Duration::from_secs(5);
    thread::scope(|scope| {
        let run = |rank: usize, node: usize| {
            meeting.rendezvous(meeting.node(node), rank, soon).err().map(|e| e.to_string())
        };
        let others = [1, 2].map(|rank| scope.spawn(move || run(rank, 1)));
        for told in [run(0, 0)].into_iter().chain(others.map(|rank| rank.join().unwrap())) {
            let told = told.expect("an error");
            assert!(told.contains("waited") && told.contains("for rank 3"), "{told}");
        }
    });
    // No process listens on the port, so the rank must give up after its timeout.
    let Err(error) = meeting.join(1, soon) else { panic!("nobody listens") };
    assert!(matches!(&error, Error::Absent { ranks, .. } if ranks == &[0]), "{error}");
    assert!(error.to_string().contains("refused"), "{error}");
}

/// Answers each connection with random bytes, `piece` bytes at a time, until `over` is true.
fn be_a_false_rank_0(listener: &TcpListener, piece: usize, over: &AtomicBool) {
    while let (Ok((mut stream, _)), false) = (listener.accept(), over.load(Ordering::Relaxed)) {
        for bytes in [7; REPLY].chunks(piece) {
            if stream.write_all(bytes).is_err() {
                break;
            }
            thread::sleep(Duration::from_millis(if piece < REPLY { 500 } else { 0 }));
        }
    }
}

#[test]
fn a_false_rank_0_holds_a_rank_no_longer_than_its_deadline() {
    for piece in [REPLY, 1] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let meeting = at(&address.to_string(), meeting("127.0.0.1", 2).terms);
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| be_a_false_rank_0(&listener, piece, &over));
            let result = meeting.join(1, Duration::from_millis(700));
            over.store(true, Ordering::Relaxed);
            // A last connection makes the false rank's `accept` return.
            TcpStream::connect(address).unwrap();
            let Err(error) = result else { panic!("noise was taken for an answer") };
            let Error::Absent { ranks, waited, .. } = &error else { panic!("{error}") };
            // The answer in single bytes would take 24 s, so the rank must have given up before.
            assert!(*ranks == [0] && *waited < Duration::from_secs(12), "{error}");
        });
    }
}

#[test]
fn a_stranger_that_sends_single_bytes_keeps_no_rank_out() {
    let meeting = meeting("127.0.0.1", 2);
    let (greeting, _) = meeting.terms.greet(1).unwrap();
    let plenty = Duration::from_secs(15);
    thread::scope(|scope| {
        let rank_0 = scope.spawn(|| meeting.join(0, plenty));
        let address = meeting.addresses[0];
        let mut stranger = loop {
            match TcpStream::connect(address) {
                Ok(stream) => break stream,
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        };
        // The last byte never comes: rank 0 must not wait for it.
        for byte in &greeting[..GREETING - 1] {
            stranger.write_all(&[*byte]).unwrap();
            thread::sleep(Duration::from_millis(5));
        }
        let rank_1 = meeting.join(1, plenty).unwrap();
        rank_0.join().unwrap().unwrap().leave(true);
        rank_1.leave(true);
    });
}

#[test]
fn two_processes_of_one_rank_are_told_to_all() {
    // The two processes with the same rank are first on one node, then on different nodes.
    for node_of_twin in [1, 2] {
        let meeting = &meeting("127.0.0.1", 3);
        thread::scope(|scope| {
            let run = move |rank: usize, node: usize| {
                meeting.rendezvous(meeting.node(node), rank, PLENTY).err().map(|e| e.to_string())
            };
            let threads: Vec<_> = [0, 1].map(|rank| scope.spawn(move || run(rank, rank))).into();
            let twin = scope.spawn(move || run(1, node_of_twin));
            for thread in threads {
                let told = thread.join().unwrap().expect("an error");
                let named = told.contains("two processes have rank 1") || told.contains("lost");
                assert!(named, "{told}");
            }
            assert!(twin.join().unwrap().is_some());
        });
    }
}

/// Tests that a relay that has not said hello yet when the world fails is told the reason.
#[test]
fn a_relay_is_told_the_reason_before_its_hello() {
    let meeting = meeting("127.0.0.1", 3);
    let soon = Instant::now() + PLENTY;
    thread::scope(|scope| {
        let rank_0 = scope.spawn(|| meeting.join(0, PLENTY).err().map(|e| e.to_string()));
        let reach = |rank| loop {
            match meeting.reach(rank, soon) {
                Ok(reached) => break reached,
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        };
        // The connection that stays silent comes last, so rank 0 has not read from it when the
        // world fails.
        let twins = [reach(1), reach(1)];
        let (silent, keys) = reach(2);
        let relays = twins.map(|(stream, keys)| meeting.greet_hub(stream, &keys, 1).unwrap());
        let told = rank_0.join().unwrap().expect("an error");
        assert!(told.contains("two processes have rank 1"), "{told}");
        let mut silent = Peer::new(silent).unwrap();
        silent.inbox = Inbox::sealed(&keys);
        silent.inbox.trust();
        let frame = loop {
            if let Some(frame) = silent.read_if_ready().pop() {
                break frame;
            }
            assert!(!silent.gone, "the connection has ended without a reason");
        };
        let Frame::Refuse { error } = frame else { panic!("{frame:?}") };
        assert!(error.to_string().contains("two processes have rank 1"), "{error}");
        drop(relays);
    });
}

/// Tests that a rank of rank 0's node is told why rank 0 cannot listen.
#[test]
fn a_port_that_is_taken_is_told_on_the_node() {
    let meeting = meeting("127.0.0.1", 2);
    let taken = TcpListener::bind(meeting.addresses[0]).unwrap();
    let place = meeting.node(0);
    let Err(error) = meeting.start_hub(&place, Instant::now() + PLENTY) else {
        panic!("it listens at a port that is taken");
    };
    assert!(error.to_string().contains("a port that is free there"), "{error}");
    drop(taken);
    let told = meeting.rendezvous(place, 1, PLENTY).err().expect("an error").to_string();
    assert!(told.contains("rank 0") && told.contains("a port that is free there"), "{told}");
}

/// Tests that a wait in another thread of the same rank ends when the rank leaves with an error.
#[test]
fn a_rank_that_leaves_ends_its_own_waits() {
    let meeting = meeting("127.0.0.1", 2);
    let (mine, other) = thread::scope(|scope| {
        let other = scope.spawn(|| meeting.join(1, PLENTY).unwrap());
        (meeting.join(0, PLENTY).unwrap(), other.join().unwrap())
    });
    thread::scope(|scope| {
        let waiting = scope.spawn(|| mine.barrier(&step()).unwrap_err());
        mine.leave(false);
        let own = waiting.join().unwrap();
        // Rank 0 may have entered the first barrier before it left, but it enters no second
        // barrier.
        let theirs = other.barrier(&step()).and_then(|_| other.barrier(&step())).unwrap_err();
        for error in [own, theirs] {
            assert!(matches!(error, Error::PeerLost { rank: 0 }), "{error}");
        }
    });
}

/// Connects and sends data that no rank would send; `kind` selects one of ten kinds of data.
/// `recorded` is a rank's greeting to be replayed.
fn hostile(meeting: &Meeting, kind: usize, recorded: &[u8]) -> Option<TcpStream> {
    let address = meeting.addresses[0];
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(5)).ok()?;
    let wrong = Terms { key: Key::Secret([9; 32]), ..meeting.terms.clone() };
    let (other_key, _) = wrong.greet(1).unwrap();
    // Greeting of rank 77, which does not exist in the job.
    let (too_high, _) = meeting.terms.greet(77).unwrap();
    let noise: Vec<u8> =
        (0..4096).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    // A write may fail, because rank 0 may have refused the connection.
    let _ = match kind % 10 {
        0 => Ok(()),
        1 => stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
        2 => stream.write_all(&noise),
        3 => stream.write_all(&recorded[..GREETING / 2]),
        4 => stream.write_all(recorded),
        // This connection replays a recorded greeting, followed by noise in place of the hello.
        5 => stream.write_all(&[recorded, &noise].concat()),
        6 => stream.write_all(&other_key),
        7 => stream.write_all(&too_high),
        8 => stream.write_all(&recorded[..1]).and_then(|()| stream.shutdown(Shutdown::Write)),
        _ => stream.write_all(&[0; GREETING]),
    };
    Some(stream)
}

#[test]
fn two_thousand_hostile_connections_harm_nobody() {
    let meeting = meeting("127.0.0.1", 3);
    let (recorded, _) = meeting.terms.greet(1).unwrap();
    thread::scope(|scope| {
        let rank_0 = scope.spawn(|| meeting.join(0, PLENTY));
        while TcpStream::connect(meeting.addresses[0]).is_err() {
            thread::sleep(Duration::from_millis(5));
        }
        // Half of the connections stay open and silent while the ranks meet; the other half is
        // closed at once.
        let mut open = Vec::new();
        for kind in 0..1000 {
            open.extend(hostile(&meeting, kind, &recorded).filter(|_| kind % 2 == 0));
        }
        let ranks: Vec<_> = [1, 2]
            .map(|rank| {
                let meeting = &meeting;
                scope.spawn(move || meeting.join(rank, PLENTY))
            })
            .into();
        for kind in 1000..2000 {
            open.extend(hostile(&meeting, kind, &recorded).filter(|_| kind % 2 == 0));
        }
        let mut met: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect();
        met.insert(0, rank_0.join().unwrap().unwrap());
        // Once the ranks have met, nobody listens on the port, and the open hostile connections
        // have received nothing that is meant for a rank.
        let others: Vec<_> = met[1..].iter().collect();
        thread::scope(|scope| {
            for rank in &others {
                scope.spawn(|| rank.barrier(&step()).unwrap());
            }
            met[0].barrier(&step()).unwrap();
        });
        let mut told = 0;
        for mut stream in open {
            stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            assert!(answer.len() <= REPLY, "{} bytes", answer.len());
            told += answer.len();
        }
        assert!(told > 0, "some were answered");
        met.iter().for_each(|rank| rank.leave(true));
    });
}

#[test]
fn a_rank_that_ends_is_lost_to_the_others() {
    let meeting = meeting("127.0.0.1", 3);
    thread::scope(|scope| {
        let run = |rank: usize| {
            let ranks = meeting.join(rank, PLENTY).unwrap();
            ranks.barrier(&step()).unwrap();
            if rank == 1 {
                // Rank 1 drops its connection without a message, like a process that ends.
                drop(ranks);
                return;
            }
            let error = ranks.barrier(&step()).unwrap_err();
            assert!(matches!(error, Error::PeerLost { rank: 1 }), "{error}");
            ranks.leave(false);
        };
        let threads: Vec<_> = (0..3).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// Tests that a sealed frame which was changed on its way is reported as such, and not as the end
/// of a process: once in a frame to the hub, once in a frame from the hub.
#[test]
fn a_broken_sealed_frame_is_no_ended_process() {
    for to_hub in [true, false] {
        let meeting = meeting("127.0.0.1", 3);
        let through = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = through.local_addr().unwrap();
        // Rank 1 reaches rank 0 through a forwarder, which can change a byte of a frame of either direction.
        let detour = at(&address.to_string(), meeting.terms.clone());
        let (breaks, pause) = (&AtomicBool::new(false), Duration::from_millis(5));
        let forward = move |mut from: TcpStream, mut to: TcpStream, is_broken: bool| {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = from.read(&mut bytes) {
                if is_broken && breaks.load(Ordering::Relaxed) {
                    bytes[count - 1] ^= 1;
                }
                if to.write_all(&bytes[..count]).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(Shutdown::Both);
        };
        thread::scope(|scope| {
            let others = [0, 2].map(|rank| {
                let meeting = &meeting;
                scope.spawn(move || meeting.join(rank, PLENTY).unwrap())
            });
            let rank_1 = scope.spawn(|| detour.join(1, PLENTY).unwrap());
            let ranks = loop {
                let (near, _) = through.accept().unwrap();
                let Ok(far) = TcpStream::connect(meeting.addresses[0]) else {
                    thread::sleep(pause);
                    continue;
                };
                let (from, to) = (near.try_clone().unwrap(), far.try_clone().unwrap());
                scope.spawn(move || forward(from, to, to_hub));
                scope.spawn(move || forward(far, near, !to_hub));
                let mut ranks = Vec::from(others.map(|rank| rank.join().unwrap()));
                ranks.insert(1, rank_1.join().unwrap());
                break ranks;
            };
            breaks.store(true, Ordering::Relaxed);
            // If only rank 1's answer is broken, other ranks may complete the first barrier, so
            // each rank enters two barriers.
            let barrier = |rank: &Processes| {
                let end = rank.barrier(&step()).and_then(|_| rank.barrier(&step()));
                end.unwrap_err().to_string()
            };
            let told: Vec<_> = thread::scope(|scope| {
                let told: Vec<_> = ranks.iter().map(|rank| scope.spawn(|| barrier(rank))).collect();
                told.into_iter().map(|it| it.join().unwrap()).collect()
            });
            let named = |text: &String, rank: usize| {
                text.starts_with(&format!("broken message in messages of rank {rank}: "))
            };
            let from = usize::from(to_hub);
            assert!(told.iter().all(|text| named(text, from)), "{told:?}");
            ranks.iter().for_each(|rank| rank.leave(false));
        });
    }
}
