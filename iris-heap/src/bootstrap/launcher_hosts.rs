//! Address at which the ranks of several hosts meet, from the launcher's environment variables.

use super::launcher_env::Launch;
use super::launchers::FOR_SEVERAL_HOSTS;
use super::tcp::address::Address;
use crate::encoding::hash;
use crate::env::wrong;
use crate::error::Result;

impl Launch {
    /// Text that identifies the host of rank 0, the same for all names and addresses of that host;
    /// `None` unless `MASTER_ADDR` names another host than this one.
    ///
    /// # Errors
    /// [`Error::Env`](crate::Error::Env) for a `MASTER_ADDR` that is more than a host.
    pub(crate) fn other_host(&self) -> Result<Option<String>> {
        Ok(match &self.master {
            Some(("MASTER_ADDR", host)) => {
                Address::of_variable("MASTER_ADDR", host, 0)?.other_host()
            }
            _ => None,
        })
    }

    /// Host and port at which the ranks of several hosts meet.
    ///
    /// # Errors
    /// [`Error::Env`](crate::Error::Env) if no variable names the host of rank 0, or it names more
    /// than a host; the error's text has a command that sets the variable, or the right value of
    /// the variable.
    pub(crate) fn master(&self) -> Result<Address> {
        let host = self.master.as_ref().ok_or_else(|| {
            let why = self.several_hosts.as_deref().unwrap_or("IRIS_NODE is set");
            let command =
                self.launcher.map_or_else(String::new, |it| it.passing(&FOR_SEVERAL_HOSTS));
            let expected =
                format!("the host of rank 0, since ranks are on several hosts ({why}): {command}");
            wrong("MASTER_ADDR", "(not set)", &expected)
        })?;
        let (name, host) = match host {
            ("MASTER_ADDR", host) => ("MASTER_ADDR", host.clone()),
            (name, list) => (*name, first_host(name, list)?),
        };
        let [master, own] = self.ports;
        // Port: `IRIS_PORT`, or else `MASTER_PORT` + 1, because torchrun's own store uses
        // `MASTER_PORT`.
        let port = match (own, master) {
            (Some(port), _) => port,
            (None, Some(u16::MAX)) => u16::MAX - 1,
            (None, Some(port)) => port + 1,
            // Jobs may overlap on a host, so each uses a port derived from its identity.
            (None, None) => 20_000 + (hash(&[self.job.as_bytes()]) % 10_000) as u16,
        };
        Address::of_variable(name, &host, port)
    }
}

/// First host of a host list in Slurm's notation: `gpu[07-09,12],login1` begins with `gpu07`.
fn first_host(name: &str, list: &str) -> Result<String> {
    let part = list.trim().split_once('[').map_or_else(
        || list.split(',').next().map(|host| host.trim().to_string()),
        |(prefix, rest)| match prefix.split_once(',') {
            Some((host, _)) => Some(host.to_string()),
            None => {
                let (range, rest) = rest.split_once(']')?;
                let number = range.split(['-', ',']).next()?;
                let suffix = rest.split(',').next().unwrap_or_default();
                Some(format!("{prefix}{number}{suffix}"))
            }
        },
    );
    let plain = |host: &String| !host.is_empty() && !host.contains(['[', ']']);
    part.filter(plain).ok_or_else(|| wrong(name, list, "a list of hosts, or set MASTER_ADDR"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detect(vars: &[(&str, &str)]) -> Result<Launch> {
        Launch::detect(&|name| Ok(vars.iter().find(|v| v.0 == name).map(|v| v.1.to_string())))
    }

    #[test]
    fn several_hosts_have_a_place_to_meet() {
        let master = |vars: &[(&str, &str)]| detect(vars).and_then(|launch| launch.master());
        let torchrun = [
            ("RANK", "2"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", "0"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "host-a"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_RUN_ID", "7"),
        ];
        let launch = detect(&torchrun).unwrap();
        let says = launch.several_hosts.unwrap();
        assert_eq!((launch.rank, says.as_str()), (2, "LOCAL_WORLD_SIZE=2, WORLD_SIZE=4"));
        assert_eq!(master(&torchrun).unwrap().to_string(), "host-a:29501");
        let own = [&torchrun[..], &[("IRIS_PORT", "4000")]].concat();
        assert_eq!(master(&own).unwrap().to_string(), "host-a:4000");
        let mpirun = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
            ("PMIX_NAMESPACE", "prterun-7"),
        ];
        let text = master(&mpirun).unwrap_err().to_string();
        assert!(text.contains("MASTER_ADDR=(not set)") && text.contains("mpirun -x"), "{text}");
        let with = [&mpirun[..], &[("MASTER_ADDR", "::1")]].concat();
        let address = master(&with).unwrap().to_string();
        let port = address.strip_prefix("[::1]:").and_then(|port| port.parse().ok());
        assert!(port.is_some_and(|port| (20_000..30_000).contains(&port)), "{address}");
        let mpiexec = [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALNRANKS", "1")];
        let mpiexec =
            [&mpiexec[..], &[("MPI_LOCALRANKID", "0"), ("MASTER_PORT", "29500")]].concat();
        let text = master(&mpiexec).unwrap_err().to_string();
        let command = "mpiexec -genv MASTER_ADDR HOST -genv IRIS_SECRET_FILE FILE PROGRAM";
        assert!(text.contains(command), "{text}");
        let srun = [
            ("SLURM_PROCID", "5"),
            ("SLURM_STEP_NUM_TASKS", "8"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_JOB_ID", "77"),
            ("SLURM_STEP_NUM_NODES", "2"),
            ("SLURM_STEP_NODELIST", "gpu[07-08]"),
        ];
        let address = master(&srun).unwrap().to_string();
        let port = address.strip_prefix("gpu07:").and_then(|port| port.parse().ok());
        assert!(port.is_some_and(|port| (20_000..30_000).contains(&port)), "{address}");
        assert_eq!(detect(&srun).unwrap().several_hosts.unwrap(), "SLURM_STEP_NUM_NODES=2");
        for (list, host) in
            [("a", "a"), ("a,b", "a"), ("n1-[3,5]-ib,x", "n1-3-ib"), ("l,g[1-2]", "l")]
        {
            assert_eq!(first_host("X", list).unwrap(), host, "{list}");
        }
        assert!(first_host("X", "[").is_err() && first_host("X", "").is_err());
        // If no variable says that there are several hosts, `MASTER_PORT` need not be a number.
        let here = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "a name")];
        assert_eq!(detect(&here).unwrap().several_hosts, None);
    }
}
