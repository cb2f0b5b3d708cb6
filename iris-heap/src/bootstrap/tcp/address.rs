//! Address of rank 0: host and port as the user gives them, and the socket addresses that they name.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};

use crate::env::wrong;
use crate::error::{Error, Result};
use crate::util::host_name;

/// Host and port at which rank 0 listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    /// Host name or IP address, without brackets; an IPv6 address may have a zone.
    host: String,
    port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Address { host, port } = self;
        match host.contains(':') {
            true => write!(f, "[{host}]:{port}"),
            false => write!(f, "{host}:{port}"),
        }
    }
}

impl Address {
    /// Address of the host that the environment variable `name` gives as `text`.
    ///
    /// # Errors
    /// [`Error::Env`] for a text that is more than a host; the error shows the right value.
    pub(crate) fn of_variable(name: &str, text: &str, port: u16) -> Result<Address> {
        let host = checked_host(text).ok_or_else(|| {
            let (_, rest) = text.split_once("://").unwrap_or(("", text));
            let expected = match rest.trim_end_matches('/').rsplit_once(':') {
                Some((host, port)) => format!(
                    "a host name or IP address alone: {name}={}, and the port as MASTER_PORT={port}",
                    host.trim_matches(['[', ']'])
                ),
                None => "a host name or IP address alone".into(),
            };
            wrong(name, text, &expected)
        })?;
        Ok(Address { host, port })
    }

    /// Address of the text `host:port`, where an IPv6 address may be in brackets.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a text in another form.
    pub(crate) fn parse(text: &str) -> Result<Address> {
        let parts = text.rsplit_once(':').and_then(|(host, port)| {
            Some(Address { host: checked_host(host)?, port: port.parse().ok()? })
        });
        let expected = "HOST:PORT, with a host name or IP address and without a scheme";
        parts.ok_or_else(|| Error::invalid("address of the network", text, expected))
    }

    /// Socket addresses of the host, IPv4 and IPv6, each once.
    pub(crate) fn look_up(&self) -> std::io::Result<Vec<SocketAddr>> {
        let mut found: Vec<SocketAddr> = Vec::new();
        for address in (self.host.as_str(), self.port).to_socket_addrs()? {
            if !found.contains(&address) {
                found.push(address);
            }
        }
        match found.is_empty() {
            true => Err(std::io::Error::other("the host has no address")),
            false => Ok(found),
        }
    }

    /// Looks up this address, and returns the result of [`other_host`] for the addresses found.
    pub(crate) fn other_host(&self) -> Option<String> {
        self.other_host_of(&self.look_up())
    }

    /// Result of [`other_host`] for the addresses `found` by a look-up. If the look-up failed,
    /// compares the names of the hosts instead, and returns a text with the name.
    pub(crate) fn other_host_of(&self, found: &std::io::Result<Vec<SocketAddr>>) -> Option<String> {
        match found {
            Ok(addresses) => other_host(addresses),
            Err(_) => (self.host != host_name()).then(|| format!("rank 0 at {}", self.host)),
        }
    }

    /// Whether a failed look-up may succeed later: a resolver may learn a name after this process
    /// has started. False for a numeric address, and for errors of system calls, which do not come
    /// from the resolver.
    pub(crate) fn may_appear(&self, error: &std::io::Error) -> bool {
        !self.host.contains(':') && error.raw_os_error().is_none()
    }
}

/// Host of a text that is a host name or IP address; `None` for another text.
fn checked_host(text: &str) -> Option<String> {
    let text = text.trim();
    let host = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    // A text with exactly one colon is `host:port`; an IPv6 address has at least two colons.
    let is_host =
        !host.is_empty() && !host.contains(['/', '[', ']', ' ']) && host.matches(':').count() != 1;
    is_host.then(|| host.into())
}

/// Text that stands for the host of rank 0 in the identity of a meeting on this host, the same for
/// all names and addresses of that host; `None` if rank 0 is on this host.
pub(crate) fn other_host(addresses: &[SocketAddr]) -> Option<String> {
    let is_here = |address: &SocketAddr| {
        let ip = address.ip().to_canonical();
        let mut any_port = *address;
        any_port.set_port(0);
        ip.is_loopback() || UdpSocket::bind(any_port).is_ok()
    };
    let first = addresses.iter().map(|address| address.ip().to_canonical()).min()?;
    (!addresses.iter().any(is_here)).then(|| format!("rank 0 at {first}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_told_from_what_is_more() {
        let of = |text: &str| Address::of_variable("MASTER_ADDR", text, 7);
        for (text, shown) in [
            ("host-a", "host-a:7"),
            (" 10.0.0.1 ", "10.0.0.1:7"),
            ("fe80::1%eth0", "[fe80::1%eth0]:7"),
            ("[::1]", "[::1]:7"),
        ] {
            assert_eq!(of(text).unwrap().to_string(), shown);
            assert_eq!(Address::parse(shown).unwrap(), of(text).unwrap());
        }
        for text in ["host-a:29500", "tcp://host-a:29500", "tcp://host-a:29500/"] {
            let told = of(text).unwrap_err().to_string();
            let expected = format!(
                "MASTER_ADDR={text}: expected a host name or IP address alone: MASTER_ADDR=host-a, and the port \
                 as MASTER_PORT=29500"
            );
            assert!(told.starts_with(&expected), "{told}");
        }
        let told = of("[::1]:29500").unwrap_err().to_string();
        assert!(told.contains("MASTER_ADDR=::1, and the port as MASTER_PORT=29500"), "{told}");
        for text in ["", "tcp://host-a", "a b"] {
            assert!(of(text).is_err(), "{text}");
        }
        for text in ["host-a", "tcp://host-a:1", "host-a:port", ":1"] {
            let told = Address::parse(text).unwrap_err().to_string();
            assert!(told.contains("expected HOST:PORT"), "{told}");
        }
    }

    #[test]
    fn an_address_with_a_zone_is_understood() {
        let zone = Address::parse("[fe80::1%lo]:7").unwrap();
        let found = zone.look_up().unwrap();
        assert!(matches!(found[..], [SocketAddr::V6(found)] if found.scope_id() == 1), "{found:?}");
        let unknown = Address::parse("[fe80::1%none]:7").unwrap();
        assert!(!unknown.may_appear(&unknown.look_up().unwrap_err()));
    }

    #[test]
    fn names_of_one_host_are_one_host() {
        let term = |hosts: &[&str]| {
            let found =
                |host: &&str| Address::of_variable("X", host, 7).unwrap().look_up().unwrap();
            other_host(&hosts.iter().flat_map(found).collect::<Vec<_>>())
        };
        for here in ["localhost", "127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1"] {
            assert_eq!(term(&[here]), None, "{here}");
        }
        assert_eq!(term(&["192.0.2.1", "127.0.0.1"]), None);
        let other = Some("rank 0 at 192.0.2.1".to_string());
        assert_eq!(term(&["192.0.2.1"]), other);
        assert_eq!(term(&["2001:db8::1", "192.0.2.1"]), other);
        assert_ne!(term(&["192.0.2.2"]), other);
    }
}
