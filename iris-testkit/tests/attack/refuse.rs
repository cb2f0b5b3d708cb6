//! Refused system calls: a filter of this process (seccomp) passes calls to a thread outside of the
//! filter, which counts them and refuses one use of one call, as a sandbox may.

#![allow(unsafe_code, reason = "libc's functions take pointers")]

use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use anyhow::{Context, Error, Result, bail};
use rustix::io::Errno;

/// Use of a system call that is refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Refusal {
    /// Name of the call, or its number as `#318` if [`NAMES`] does not have it.
    pub(super) call: String,
    /// Number of the use that is refused, counted from 1 over all threads of the process.
    pub(super) nth: u32,
    /// Error with which the call is refused: EPERM or EMFILE.
    pub(super) error: Errno,
}

/// Errors with which calls are refused, by name.
pub(super) const ERRORS: [(&str, Errno); 2] = [("EPERM", Errno::PERM), ("EMFILE", Errno::MFILE)];

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let error = ERRORS.iter().find(|(_, error)| *error == self.error);
        write!(f, "{}:{}:{}", self.call, self.nth, error.map_or("", |(name, _)| name))
    }
}

impl FromStr for Refusal {
    type Err = Error;

    fn from_str(text: &str) -> Result<Refusal> {
        let parts: Vec<_> = text.split(':').collect();
        let [call, nth, error] = parts[..] else { bail!("{text}: expected CALL:USE:ERROR") };
        number(call)?;
        let error = ERRORS.iter().find(|(name, _)| *name == error);
        let error = error.with_context(|| format!("{text}: expected EPERM or EMFILE"))?.1;
        Ok(Refusal { call: call.into(), nth: nth.parse()?, error })
    }
}

/// Calls whose refusal ends the process in the standard library, in the C library or in the
/// allocator, which have nobody to return an error to.
const ENDING: [&str; 10] = [
    "brk",
    "clock_nanosleep",
    "close",
    "getrandom",
    "mmap",
    "mprotect",
    "mremap",
    "munmap",
    "rseq",
    "rt_sigprocmask",
];

/// Words by which messages name a call, if they do not use its name.
const WORDS: [(&str, &[&str]); 22] = [
    ("accept4", &["accept"]),
    ("bind", &["listening"]),
    ("clone3", &["thread", "fork", "spawn"]),
    ("connect", &["listener"]),
    ("fcntl", &["socket", "seals"]),
    ("flock", &["making a file", "locking"]),
    ("fstat", &["stat", "metadata"]),
    ("getdents64", &["folder", "directory"]),
    ("getsockopt", &["reading the user"]),
    ("ioctl", &["listening", "connecting"]),
    ("listen", &["listening"]),
    ("mkdir", &["making the folder"]),
    ("mmap", &["thread"]),
    ("mprotect", &["thread"]),
    ("newfstatat", &["stat", "metadata"]),
    ("openat", &["open", "reading", "writing", "creating", "making a file"]),
    ("prlimit64", &["getrlimit", "limit"]),
    ("recvfrom", &["recv"]),
    ("rename", &["making a file", "listening"]),
    ("sendto", &["send"]),
    ("socket", &["listening", "listener", "connecting"]),
    ("statx", &["stat", "metadata"]),
];

impl Refusal {
    /// Whether `error` names the call and the error with which it was refused.
    pub(super) fn is_told_by(&self, error: &str) -> bool {
        let words =
            WORDS.iter().filter(|(call, _)| *call == self.call).flat_map(|(_, words)| *words);
        let named =
            error.contains(&self.call) || words.into_iter().any(|word| error.contains(word));
        named && error.contains(&format!("os error {}", self.error.raw_os_error()))
    }

    /// Whether the refusal may end the process, by a signal or a panic, before any code of ours can
    /// tell of it.
    pub(super) fn ends_the_process(&self) -> bool {
        ENDING.contains(&&*self.call)
    }
}

macro_rules! names {
    ($($name:ident)*) => { &[$((stringify!($name), libc::$name)),*] };
}

/// System calls by name, with their numbers.
const NAMES: &[(&str, i64)] = names![
    SYS_read SYS_write SYS_close SYS_fstat SYS_lseek SYS_mmap SYS_mprotect SYS_munmap SYS_brk
    SYS_rt_sigaction SYS_rt_sigprocmask SYS_ioctl SYS_pread64 SYS_pwrite64 SYS_readv SYS_writev
    SYS_sched_yield SYS_mremap SYS_msync SYS_madvise SYS_dup SYS_nanosleep SYS_getpid SYS_socket
    SYS_connect SYS_sendto SYS_recvfrom SYS_sendmsg SYS_recvmsg SYS_shutdown SYS_bind SYS_listen
    SYS_getsockname SYS_getpeername SYS_socketpair SYS_setsockopt SYS_getsockopt SYS_clone SYS_fcntl
    SYS_flock SYS_fsync SYS_ftruncate SYS_getcwd SYS_fchmod SYS_fchown SYS_umask SYS_getrlimit
    SYS_sysinfo SYS_getuid SYS_getgid SYS_geteuid SYS_getegid SYS_getppid SYS_prctl SYS_gettid
    SYS_futex SYS_sched_setaffinity SYS_sched_getaffinity SYS_getdents64 SYS_clock_gettime
    SYS_clock_nanosleep SYS_kill SYS_tgkill SYS_openat SYS_mkdirat SYS_unlinkat SYS_renameat2
    SYS_linkat SYS_readlinkat SYS_fchmodat SYS_faccessat SYS_ppoll SYS_set_robust_list SYS_eventfd2
    SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait SYS_dup3 SYS_pipe2 SYS_accept4 SYS_prlimit64
    SYS_getrandom SYS_memfd_create SYS_statx SYS_clone3 SYS_close_range SYS_pidfd_open SYS_newfstatat
    SYS_rseq SYS_membarrier SYS_fallocate SYS_statfs SYS_fstatfs SYS_uname SYS_sigaltstack
    SYS_getgroups SYS_fadvise64 SYS_execve SYS_wait4 SYS_waitid
];

/// System calls that only older architectures have.
#[cfg(target_arch = "x86_64")]
const OLD_NAMES: &[(&str, i64)] = names![
    SYS_poll SYS_open SYS_stat SYS_lstat SYS_access SYS_pipe SYS_select SYS_dup2 SYS_mkdir SYS_rmdir
    SYS_unlink SYS_rename SYS_readlink SYS_chmod SYS_epoll_wait SYS_link
];
#[cfg(not(target_arch = "x86_64"))]
const OLD_NAMES: &[(&str, i64)] = &[];

/// Calls that are neither counted nor refused. A process that ends, or returns from a handler of a
/// signal, has nobody to tell of an error. Every lock of the standard library relies on futex: if a
/// wake-up is refused, the sleeper sleeps on. The others cannot fail, so a program takes the error
/// for a value.
const FREE: [i64; 11] = [
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_rt_sigreturn,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_getgid,
    libc::SYS_geteuid,
    libc::SYS_getegid,
];

fn name(number: usize) -> String {
    let found = NAMES.iter().chain(OLD_NAMES).find(|(_, it)| *it == number as i64);
    found.map_or_else(|| format!("#{number}"), |(name, _)| name.replacen("SYS_", "", 1))
}

fn number(name: &str) -> Result<i64> {
    if let Some(number) = name.strip_prefix('#') {
        return Ok(number.parse()?);
    }
    let found = NAMES.iter().chain(OLD_NAMES).find(|(it, _)| it.strip_prefix("SYS_") == Some(name));
    Ok(found.with_context(|| format!("system call {name}: not known"))?.1)
}

/// Descriptor from which the thread reads calls; -1 before the filter is installed.
static LISTENER: AtomicI32 = AtomicI32::new(-1);
/// Number of uses of each system call since the filter was installed.
static USES: [AtomicU32; 512] = [const { AtomicU32::new(0) }; 512];

/// Counts the system calls of the calling thread and of all threads that it starts from now on, or
/// only uses of one call, of which one is refused.
pub(super) fn install(refusal: Option<&Refusal>) -> Result<()> {
    let refused = match refusal {
        Some(it) => Some((number(&it.call)?, it.nth, it.error.raw_os_error())),
        None => None,
    };
    // This thread is not filtered, because it starts before the filter is installed.
    std::thread::Builder::new().name("refuse".into()).spawn(move || supervise(refused))?;
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let (equal, end) = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::BPF_RET | libc::BPF_K);
    let (allow, tell) = (libc::SECCOMP_RET_ALLOW, libc::SECCOMP_RET_USER_NOTIF);
    let code = |code: u32, value: u32, jt: u8| libc::sock_filter {
        code: code as u16,
        jt,
        jf: 0,
        k: value,
    };
    // The first word that a filter can load is the number of the call.
    let mut program = vec![code(load, 0, 0)];
    let (special, [of_special, of_others]) = match refused {
        Some((number, ..)) => (vec![number], [tell, allow]),
        None => (FREE.to_vec(), [allow, tell]),
    };
    for (at, number) in special.iter().enumerate() {
        program.push(code(equal, *number as u32, (special.len() - at) as u8));
    }
    program.extend([code(end, of_others, 0), code(end, of_special, 0)]);
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    rustix::thread::set_no_new_privs(true)?;
    // SAFETY: `filter` and the instructions it points to live until the call returns.
    let listener = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &raw const filter,
        )
    };
    // No call between the installation and this store, because nobody would answer it.
    LISTENER.store(listener as i32, Ordering::Release);
    if listener < 0 {
        return Err(io::Error::last_os_error()).context("seccomp");
    }
    Ok(())
}

/// Answers each call that the filter passes on. It must not allocate memory: the thread that waits
/// for the answer may hold the allocator's lock.
fn supervise(refused: Option<(i64, u32, i32)>) {
    let listener = loop {
        match LISTENER.load(Ordering::Acquire) {
            -1 => std::thread::yield_now(),
            listener => break listener,
        }
    };
    loop {
        // SAFETY: a notification of zeros is valid, and the system asks for zeros.
        let mut asked: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the request fills a structure of this type.
        let read = unsafe { libc::ioctl(listener, libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut asked) };
        if read < 0 {
            match io::Error::last_os_error().raw_os_error() {
                // A signal came, or the thread that made the call has ended.
                Some(libc::EINTR | libc::ENOENT) => continue,
                _ => return,
            }
        }
        let number = asked.data.nr;
        let uses =
            USES.get(number as usize).map_or(0, |uses| uses.fetch_add(1, Ordering::Relaxed) + 1);
        let go_on = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32;
        let mut answer = libc::seccomp_notif_resp { id: asked.id, val: 0, error: 0, flags: go_on };
        if let Some((call, nth, error)) = refused
            && (i64::from(number), uses) == (call, nth)
        {
            (answer.error, answer.flags) = (-error, 0);
        }
        // SAFETY: the request reads a structure of this type. An error means that the thread which
        // made the call has ended.
        let _ = unsafe { libc::ioctl(listener, libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut answer) };
    }
}

/// Number of uses of each system call so far, as `openat=12 read=5`.
pub(super) fn counts() -> String {
    let uses = USES.iter().map(|uses| uses.load(Ordering::Relaxed)).enumerate();
    let used: Vec<_> = uses.filter(|(_, uses)| *uses > 0).collect();
    let words: Vec<_> = used.iter().map(|(call, uses)| format!("{}={uses}", name(*call))).collect();
    words.join(" ")
}
