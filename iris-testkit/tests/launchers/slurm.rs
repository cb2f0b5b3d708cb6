//! Slurm with two nodes on this host, in a temporary folder.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use iris_heap::UniqueId;
use iris_testkit::free_port;
use tempfile::TempDir;

use crate::job::within_limit;

/// Packages of Debian with [`PROGRAMS`].
pub(crate) const PACKAGES: &str = "slurmctld slurmd slurm-client munge";
pub(crate) const PROGRAMS: [&str; 4] = ["srun", "slurmctld", "slurmd", "munged"];

/// Daemons of Slurm and of munge, which end with this value.
pub(crate) struct Slurm {
    folder: TempDir,
    daemons: Vec<Child>,
}

impl Slurm {
    /// Starts the daemons, and waits until both nodes run a task.
    pub(crate) fn start() -> Result<Slurm> {
        let folder = tempfile::tempdir()?;
        let mut slurm = Slurm { folder, daemons: Vec::new() };
        let f = slurm.folder.path().display().to_string();
        let key = slurm.folder.path().join("munge.key");
        fs::write(&key, format!("{}{}", UniqueId::new()?, UniqueId::new()?))?;
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600))?;
        let ask = |program: &str, option: &str| -> Result<String> {
            let output = Command::new(program).arg(option).output().context(program.to_owned())?;
            Ok(String::from_utf8(output.stdout)?.trim().to_owned())
        };
        let (host, user) = (ask("hostname", "-s")?, ask("id", "-un")?);
        let port = || free_port::on("127.0.0.1");
        let (control, n1, n2) = (port()?, port()?, port()?);
        let text = format!(
            "ClusterName=iris\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={control}\n\
             SlurmUser={user}\nSlurmdUser={user}\nAuthType=auth/munge\nAuthInfo=socket={f}/munge\n\
             StateSaveLocation={f}/state\nSlurmdSpoolDir={f}/spool.%n\n\
             SlurmctldPidFile={f}/slurmctld.pid\nSlurmdPidFile={f}/slurmd.%n.pid\n\
             ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n\
             SelectType=select/cons_tres\nSelectTypeParameters=CR_CPU\n\
             SlurmdParameters=config_overrides\nReturnToService=2\n\
             NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 CPUs=8 Port={n1}\n\
             NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 CPUs=8 Port={n2}\n\
             PartitionName=p Nodes=ALL Default=YES OverSubscribe=FORCE:8 State=UP\n"
        );
        fs::write(slurm.conf(), text)?;
        fs::create_dir(slurm.folder.path().join("state"))?;
        // `--force`: the folder is closed to other users, of which munged would complain.
        let munge = ["key-file", "socket", "pid-file", "log-file", "seed-file"]
            .into_iter()
            .zip(["munge.key", "munge", "munge.pid", "munge.log", "munge.seed"])
            .map(|(option, file)| format!("--{option}={f}/{file}"));
        let mut munged = Command::new("munged");
        slurm.daemon(munged.args(["--foreground", "--force"]).args(munge))?;
        let conf = slurm.conf();
        slurm.daemon(Command::new("slurmctld").arg("-D").arg("-f").arg(&conf))?;
        for node in ["n1", "n2"] {
            slurm.daemon(Command::new("slurmd").args(["-D", "-N", node, "-f"]).arg(&conf))?;
        }
        let mut task = Command::new("timeout");
        task.args(["30", "srun", "-N2", "true"]).env("SLURM_CONF", &conf);
        let mut error = String::new();
        let runs = within_limit(|| match task.output() {
            Ok(output) if output.status.success() => true,
            failed => {
                let text = |it: Output| String::from_utf8_lossy(&it.stderr).into_owned();
                error = failed.map_or_else(|error| error.to_string(), text);
                // A task may fail at once while the daemons start.
                thread::sleep(Duration::from_millis(500));
                false
            }
        });
        ensure!(runs, "Slurm runs no task: {error}{}", slurm.logs());
        Ok(slurm)
    }

    /// Starts a daemon that logs into a file.
    fn daemon(&mut self, command: &mut Command) -> Result<()> {
        let log = self.folder.path().join(format!("{}.log", self.daemons.len()));
        let log = fs::File::create(log)?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let name = command.get_program().display().to_string();
        self.daemons.push(command.spawn().context(name)?);
        Ok(())
    }

    /// Path of the configuration, the value of `SLURM_CONF`.
    pub(crate) fn conf(&self) -> PathBuf {
        self.folder.path().join("slurm.conf")
    }

    /// Text of the daemons' logs.
    fn logs(&self) -> String {
        let files = self.folder.path().read_dir().into_iter().flatten().flatten();
        let logs =
            files.map(|file| file.path()).filter(|it| it.extension() == Some(OsStr::new("log")));
        logs.filter_map(|log| fs::read_to_string(log).ok()).collect()
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        for daemon in self.daemons.iter_mut().rev() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}
