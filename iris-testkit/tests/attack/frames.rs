//! Invalid frames for rank 0's socket, sent by strangers, who have not sent a hello, or by a rank
//! after its own hello.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::Random;

/// Path of rank 0's socket in the job's folder `folder`; waits until the socket exists.
fn socket(folder: &Path) -> Result<PathBuf> {
    let until = Instant::now() + Duration::from_secs(20);
    while Instant::now() < until {
        for entry in std::fs::read_dir(folder)?.flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_socket()) {
                return Ok(entry.path());
            }
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    bail!("no socket in {}", folder.display())
}

/// Connects to rank 0's socket in the job's folder `folder`.
fn connect(folder: &Path) -> Result<UnixStream> {
    let mut socket = self::socket(folder)?;
    let until = Instant::now() + Duration::from_secs(1);
    let stream = loop {
        match UnixStream::connect(&socket) {
            // Rank 0 makes its socket, listens on it, then renames it: the connection is tried again.
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused)
                    && Instant::now() < until =>
            {
                std::thread::sleep(Duration::from_millis(2));
                socket = self::socket(folder)?;
            }
            connected => break connected.context("rank 0 does not listen")?,
        }
    };
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.set_write_timeout(Some(Duration::from_secs(5)))?;
    Ok(stream)
}

fn frame(kind: u32, descriptors: u32, length: u64, body: &[u8]) -> Vec<u8> {
    [&length.to_le_bytes()[..], &kind.to_le_bytes(), &descriptors.to_le_bytes(), body].concat()
}

fn hello(job: &str, rank: u64, size: u64) -> Vec<u8> {
    let mut body = (job.len() as u64).to_le_bytes().to_vec();
    body.extend(job.as_bytes());
    body.extend(rank.to_le_bytes());
    body.extend(size.to_le_bytes());
    frame(1, 0, body.len() as u64, &body)
}

/// Number of kinds of frames, which are numbered from 1.
const KINDS: u64 = 17;

/// Bytes that a stranger sends: noise, or a frame of any kind whose body, length or number of
/// descriptors may be wrong.
fn of_stranger(random: &mut Random) -> Vec<u8> {
    let body: Vec<u8> = (0..random.below(96)).map(|_| random.next() as u8).collect();
    let length = match random.below(4) {
        0 => random.next(),
        1 => random.below(1 << 24),
        _ => body.len() as u64,
    };
    match random.below(5) {
        0 => body,
        // Hello with the name of another job, which rank 0 must refuse.
        1 => hello(&format!("job {}", random.next()), random.below(9), random.below(9)),
        _ => frame(random.below(KINDS + 3) as u32, random.below(3) as u32, length, &body),
    }
}

/// Frame of any valid kind, from rank 0 or from another rank, with mostly small numbers in its
/// body.
fn of_rank(random: &mut Random) -> Vec<u8> {
    let words = random.below(8);
    let mut word = || match random.below(8) {
        0 => random.next(),
        _ => random.below(6),
    };
    let body: Vec<u8> = (0..words).flat_map(|_| word().to_le_bytes()).collect();
    frame(1 + random.below(KINDS) as u32, 0, body.len() as u64, &body)
}

/// Connects to rank 0 at the port at which the ranks of several nodes meet, once it listens there.
fn connect_by_network() -> Result<TcpStream> {
    let port: u16 = std::env::var("IRIS_PORT").context("IRIS_PORT")?.parse()?;
    let until = Instant::now() + Duration::from_secs(20);
    let stream = loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Err(error)
                if error.kind() == ErrorKind::ConnectionRefused && Instant::now() < until =>
            {
                std::thread::sleep(Duration::from_millis(2));
            }
            connected => break connected.context("rank 0 does not listen")?,
        }
    };
    // Rank 0 may wait for the rest of a frame as long as this stranger waits for an answer.
    stream.set_read_timeout(Some(Duration::from_millis(100)))?;
    stream.set_write_timeout(Some(Duration::from_secs(5)))?;
    Ok(stream)
}

/// Sends `count` frames as strangers, each over a connection of its own; some connections stay
/// open.
pub(super) fn by_strangers(
    folder: &Path,
    nodes: usize,
    count: usize,
    random: &mut Random,
) -> Result<()> {
    if nodes > 1 {
        return send_as_strangers(connect_by_network, count, random);
    }
    send_as_strangers(|| connect(folder), count, random)
}

fn send_as_strangers<S: Read + Write>(
    connect: impl Fn() -> Result<S>,
    count: usize,
    random: &mut Random,
) -> Result<()> {
    let mut open = Vec::new();
    for _ in 0..count {
        let mut stream = connect()?;
        // Write errors are ignored, because rank 0 may close the connection during the write.
        let _ = stream.write_all(&of_stranger(random));
        match random.below(4) {
            0 => open.push(stream),
            1 => drop(stream.read(&mut [0; 64])),
            _ => {}
        }
    }
    Ok(())
}

/// Connects to rank 0 as rank `rank` with a valid hello, then sends `count` frames that no honest
/// rank would send.
pub(super) fn by_rank(
    folder: &Path,
    (rank, size): (usize, usize),
    count: usize,
    random: &mut Random,
) -> Result<()> {
    let mut stream = connect(folder)?;
    let job = format!("IRIS_RENDEZVOUS={}, world 0", folder.display());
    stream.write_all(&hello(&job, rank as u64, size as u64))?;
    for at in 0..count {
        if stream.write_all(&of_rank(random)).is_err() {
            // A failed write means that rank 0 has closed this connection.
            break;
        }
        if at % 10 == 0 {
            std::thread::sleep(Duration::from_millis(random.below(3)));
        }
    }
    Ok(())
}
