//! Simulated nodes, each with its own network and host name, by Linux namespaces.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};

/// IPv4 address of node 0, which all other nodes can reach.
pub(super) const FIRST: &str = "10.77.0.1";

/// Namespaces of all nodes, each kept by a waiting shell. A virtual cable (veth pair) connects node
/// 0 with each other node, because ranks meet at node 0. Namespaces and cables end with the shells,
/// and the shells end when this object is dropped or the launcher ends.
#[derive(Debug)]
pub struct Namespaces {
    shells: Vec<Child>,
}

impl Namespaces {
    /// Makes the namespaces of `nodes` nodes, with the host names node0, node1 and so on.
    ///
    /// # Errors
    /// A program of util-linux or iproute2 is missing, or fails, for example because this process
    /// may not make namespaces.
    pub fn new(nodes: usize) -> Result<Namespaces> {
        ensure!(nodes < 255, "{nodes} nodes: expected at most 254, the hosts of one IPv4 network");
        let mut all = Namespaces { shells: Vec::new() };
        for node in 0..nodes {
            all.shells.push(shell(node)?);
            if node > 0 {
                all.connect(node)?;
            }
        }
        Ok(all)
    }

    /// Connects node 0 with `node` by a virtual cable (veth pair).
    fn connect(&self, node: usize) -> Result<()> {
        let (pid, own) = (self.shells[node].id(), format!("10.77.0.{}", node + 1));
        self.ip(0, &format!("link add node{node} type veth peer name node0 netns {pid}"))?;
        self.ip(0, &format!("addr add {FIRST} peer {own} dev node{node}"))?;
        self.ip(0, &format!("link set node{node} up"))?;
        self.ip(node, &format!("addr add {own} peer {FIRST} dev node0"))?;
        self.ip(node, "link set node0 up")
    }

    /// Runs the program `ip` on `node`, with arguments that are separated by spaces. On node 0 the
    /// device of the cable to node N is named nodeN; on the other nodes it is named node0.
    ///
    /// # Errors
    /// `ip` or `nsenter` is missing, or `ip` fails; the error has its message.
    pub fn ip(&self, node: usize, arguments: &str) -> Result<()> {
        let output = self.command(node, Path::new("ip")).args(arguments.split(' ')).output();
        let output = output.context("nsenter, of util-linux, does not start")?;
        let text = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "ip {arguments}: {}", text.trim());
        Ok(())
    }

    /// File of the network namespace of `node`.
    pub fn network(&self, node: usize) -> PathBuf {
        format!("/proc/{}/ns/net", self.shells[node].id()).into()
    }

    /// Command that runs `program` on `node`.
    pub(super) fn command(&self, node: usize, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        let pid = self.shells[node].id().to_string();
        command.args(["--target", &pid, "--net", "--uts", "--"]).arg(program);
        command
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for shell in &mut self.shells {
            let _ = shell.kill();
            let _ = shell.wait();
        }
    }
}

/// Shell in new namespaces for `node`, which ends when its stdin is closed.
fn shell(node: usize) -> Result<Child> {
    const PROGRAM: &str = "hostname \"$0\" && ip link set lo up && echo ready && read -r _";
    let mut child = Command::new("unshare")
        .args(["--net", "--uts", "sh", "-c", PROGRAM, &format!("node{node}")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("unshare, of util-linux, does not start")?;
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout).read_line(&mut line)?;
    }
    if line != "ready\n" {
        let mut text = String::new();
        if let Some(mut stderr) = child.stderr.take() {
            stderr.read_to_string(&mut text)?;
        }
        child.wait()?;
        anyhow::bail!("no namespaces for node {node}: {}", text.trim());
    }
    Ok(child)
}
