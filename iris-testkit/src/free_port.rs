//! Free TCP ports for jobs on one host.

use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::net::TcpListener;
use std::ops::Range;

/// Ports below the range from which Linux assigns ports to connections and to listeners on port 0
/// (32768 to 60999, unless the host is configured otherwise).
const PORTS: Range<u16> = 15000..32768;

/// Returns a port of `host` at which nobody listens.
///
/// The caller listens at the port later, often in another process. This function tries random ports
/// of a range from which the system assigns none. A port that the system chose could be assigned to
/// another connection before the caller listens at it.
///
/// # Errors
/// `host` is no address of this machine; all ports of the range are taken.
pub fn on(host: &str) -> io::Result<u16> {
    free_of(host, PORTS)
}

fn free_of(host: &str, ports: Range<u16>) -> io::Result<u16> {
    let first = RandomState::new().hash_one(()) as usize % ports.len();
    let mut error = io::ErrorKind::AddrInUse.into();
    for port in ports.clone().cycle().skip(first).take(ports.len()) {
        match TcpListener::bind((host, port)) {
            Ok(_) => return Ok(port),
            Err(taken) if taken.kind() == io::ErrorKind::AddrInUse => error = taken,
            Err(other) => return Err(other),
        }
    }
    Err(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_at_which_somebody_listens_is_not_taken() {
        let listen = |port| TcpListener::bind(("127.0.0.1", port)).ok();
        // Three neighbouring ports, of which the test takes the two outer ones.
        let (ports, _taken) = (0..1000)
            .find_map(|_| {
                let first = on("127.0.0.1").unwrap();
                let taken = (listen(first)?, listen(first + 2)?);
                listen(first + 1).map(|_| (first..first + 3, taken))
            })
            .unwrap();
        let middle = ports.start + 1;
        for _ in 0..20 {
            assert_eq!(free_of("127.0.0.1", ports.clone()).unwrap(), middle);
        }
        let _also = listen(middle).unwrap();
        let error = free_of("127.0.0.1", ports).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn ports_differ_and_are_not_those_that_the_system_gives() {
        let ports: Vec<u16> = (0..4).map(|_| on("127.0.0.1").unwrap()).collect();
        assert!(ports.iter().all(|port| PORTS.contains(port)), "{ports:?}");
        assert!(ports.iter().any(|port| *port != ports[0]), "{ports:?}");
    }
}
