//! Tests of jobs that go on after a lost rank, as processes on the CPU: a rank is killed or stopped in
//! the middle of a call, and the others go on in a new epoch. No id is handed over, and nobody tells
//! the ranks who is lost.
//!
//! The program starts itself as the ranks. The time from the blow to the first right call is printed.

mod sessions;
mod strikes;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use iris_heap::{
    Change, Error, ErrorKind, HeapOptions, Loss, Member, MemberId, Next, Policy, Retired, Stream,
    SymSlice, SymmetricHeap, World,
};
use iris_ops::{AllReduce, CollectiveArgs, MatRef, OpError, all_reduce};
use iris_testkit::harness::{self, Group, named};
use iris_testkit::launch::{self, End, Options, Outcome, launch};
use rustix::process::{Pid, Signal, getpid, kill_process};
use sessions::{
    a_communicator_goes_on, a_session_goes_on_after_a_rank_gave_up,
    a_session_goes_on_and_takes_a_spare, a_session_loses_a_rank_while_it_builds,
    a_session_returns_the_errors_of_its_own_rank,
    a_session_whose_heap_does_not_fit_builds_a_smaller_one,
};
use strikes::ranks_that_are_struck_at_any_time_are_survived;

/// Call of an epoch in which a rank is struck.
const STRUCK: usize = 21;
/// Number of calls of an epoch that is not struck.
const CALLS: usize = 300;
/// Number of elements of a message.
const COUNT: usize = 1000;
/// Sizes of a heap's segments in bytes.
const DATA: u64 = 1 << 20;
const SIGNALS: u64 = 1 << 20;
/// Patience of the jobs, in milliseconds.
const PATIENCE: u64 = 400;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, rank, case] = &arguments[..]
        && rank == "rank"
    {
        launch::end_with_launcher();
        let outcome = match case.split_once(' ') {
            Some(("session", case)) => sessions::run_session(case),
            Some(("comm", case)) => sessions::run_comm(case),
            Some(("strike", seed)) => strikes::run(seed),
            _ => run_rank(case),
        };
        if let Err(error) = &outcome {
            eprintln!("ERROR {error:#}");
        }
        return if outcome.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    harness::run(vec![Group::new(
        None,
        named![
            survivors_of_a_killed_rank_go_on,
            a_stopped_rank_is_left_out_and_changes_nothing,
            a_second_loss_during_the_first_is_survived,
            a_spare_takes_part_when_it_is_needed,
            a_spare_learns_that_the_job_is_over,
            a_spare_may_end_an_epoch,
            too_few_ranks_do_not_go_on,
            a_rank_may_leave_and_another_revoke,
            a_session_goes_on_and_takes_a_spare,
            a_session_loses_a_rank_while_it_builds,
            a_session_goes_on_after_a_rank_gave_up,
            a_session_returns_the_errors_of_its_own_rank,
            a_session_whose_heap_does_not_fit_builds_a_smaller_one,
            a_communicator_goes_on,
            ranks_that_are_struck_at_any_time_are_survived
        ],
    )])
}

/// Blow that a case deals to a member in call [`STRUCK`] of an epoch.
#[derive(Clone, Copy, PartialEq)]
enum Blow {
    Kill,
    /// The process stops itself; another one continues it.
    Stop,
    /// The member leaves the job.
    Leave,
    /// The member revokes the epoch, and goes on with the others.
    Revoke,
    /// The member gives up its heap, and goes on with the others.
    GiveUp,
    /// The step of the member's session fails.
    Fail,
}

/// Blow of the case in an epoch, and the member that it strikes.
fn blow(case: &str, epoch: u64) -> Option<(Blow, usize)> {
    Some(match (case, epoch) {
        ("kill-0" | "too-few", 0) => (Blow::Kill, 0),
        ("kill-2" | "twice" | "no-memory", 0) => (Blow::Kill, 2),
        ("stop-0", 0) => (Blow::Stop, 0),
        ("stop-2", 0) => (Blow::Stop, 2),
        ("spare" | "over" | "spare-revokes", 0) => (Blow::Kill, 1),
        // The ranks make calls until the spare has ended the epoch.
        ("spare-revokes", 1) => (Blow::Revoke, 3),
        ("spare", 1) => (Blow::Kill, 0),
        ("leave", 0) => (Blow::Leave, 3),
        ("leave", 1) => (Blow::Revoke, 1),
        ("give-up", 0) => (Blow::GiveUp, 2),
        ("fail", 0) => (Blow::Fail, 1),
        _ => return None,
    })
}

fn policy(case: &str) -> Policy {
    let policy = Policy::new().patience(Duration::from_millis(PATIENCE));
    match case {
        "spare" | "over" | "spare-revokes" => policy.sizes(&[4, 2]),
        "too-few" => policy.sizes(&[4]),
        _ => policy,
    }
}

/// Heap and operator of one epoch.
struct Model {
    heap: Arc<SymmetricHeap>,
    sum: AllReduce,
    stream: Stream,
    matrix: SymSlice<f32>,
    /// Memory that the rank before this one copies to.
    copied: SymSlice<f32>,
    /// Memory that no call of this epoch writes.
    untouched: SymSlice<f32>,
    /// Members of the epoch, by rank.
    members: Vec<usize>,
}

/// Slices of a heap that peers may write, and one that they do not.
type Slices = ([SymSlice<f32>; 2], SymSlice<f32>);

impl Model {
    /// Makes a model in a heap of `bytes` bytes.
    fn build(world: &World, id: MemberId, bytes: u64) -> Result<Model> {
        let members = world.allgather(&[id.0 as u8])?.iter().map(|it| it[0].into()).collect();
        let options = HeapOptions::new().data_bytes(bytes).signal_bytes(SIGNALS).threads(1);
        let heap = SymmetricHeap::open(world, options)?;
        let sum = AllReduce::new(&heap, &all_reduce::Options::new(COUNT).plan(&heap)?)?;
        let (matrix, stream) = (heap.zeros::<f32>(COUNT)?, heap.stream()?);
        let untouched = heap.full::<f32>(COUNT, 7.5)?;
        let copied = heap.alloc::<f32>(COUNT)?;
        let next = (world.rank() + 1) % world.size();
        heap.copy_on(&stream, (copied, next), (untouched, world.rank()))?;
        Ok(Model { heap, sum, stream, matrix, copied, untouched, members })
    }

    /// Memory that peers may write, and memory that they do not.
    fn slices(&self) -> Slices {
        ([self.matrix, self.copied], self.untouched)
    }

    /// Enqueues a call that sums values of its members and of its number, in place.
    fn start(&self, id: MemberId, call: usize) -> Result<()> {
        self.heap.write(self.matrix, &[(call % 7 * 10 + id.0 + 1) as f32; COUNT])?;
        let matrix = MatRef::vector(self.matrix);
        Ok(self.sum.run(&CollectiveArgs::new(matrix, matrix), &self.stream)?)
    }

    /// Waits for the call and checks its sums.
    fn finish(&self, call: usize) -> Result<()> {
        self.stream.sync()?;
        let wanted: usize = self.members.iter().map(|member| call % 7 * 10 + member + 1).sum();
        let sums = self.heap.read(self.matrix)?;
        assert!(sums.iter().all(|&sum| sum == wanted as f32), "{} is no {wanted}", sums[0]);
        assert!(self.heap.read(self.untouched)?.iter().all(|&it| it == 7.5), "a late store");
        Ok(())
    }
}

fn now() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_micros())
}

/// Processes of the ranks, for the signal that continues a stopped one.
fn pids_of(world: &World) -> Result<Vec<u32>> {
    let pids = world.allgather(&std::process::id().to_le_bytes())?;
    Ok(pids.iter().map(|it| u32::from_le_bytes([it[0], it[1], it[2], it[3]])).collect())
}

fn run_rank(case: &str) -> Result<()> {
    let mut world = World::from_env()?;
    let pids = pids_of(&world)?;
    let member = Member::join(&world, policy(case))?;
    let mut retired = Vec::new();
    loop {
        let error = match epoch(case, &member, &world, &pids, &mut retired) {
            Ok(Done::Closed) => {
                retired.iter().try_for_each(|(heap, slices)| check_retired(heap, *slices))?;
                return world.close().context("closing the world");
            }
            Ok(Done::Left) => return Ok(()),
            Err(error) => error,
        };
        ensure!(is_loss(&error) && member.is_revoked(), "epoch {}: {error:#}", member.epoch());
        let dies_in_next = case == "twice" && member.id() == MemberId(3);
        if dies_in_next {
            // Anywhere in the middle of `next`, at its end at the latest.
            std::thread::spawn(|| {
                std::thread::sleep(Duration::from_millis(1));
                launch::kill_myself()
            });
        }
        world = loop {
            let next = member.next();
            if dies_in_next {
                launch::kill_myself();
            }
            match next {
                Ok(Next::Epoch(world, change)) => {
                    print_epoch(&member, &change);
                    break world;
                }
                Ok(Next::Spare) => {
                    eprintln!("SPARE in epoch {}", member.epoch());
                    if case == "spare-revokes" && member.epoch() == 1 {
                        member.revoke();
                    }
                }
                Ok(Next::Over) => {
                    eprintln!("OVER");
                    return Ok(());
                }
                Ok(Next::TooFew { alive }) => {
                    eprintln!("TOO FEW {alive}");
                    return Ok(());
                }
                Err(error @ Error::Evicted { .. }) => {
                    ensure!(matches!(member.world(), Err(Error::Evicted { .. })), "a world");
                    ensure!(matches!(member.next(), Err(Error::Evicted { .. })), "a second next");
                    eprintln!("EVICTED {error}");
                    return Ok(());
                }
                other => bail!("{other:?}"),
            }
        };
    }
}

/// Prints that this process goes on as a rank.
fn print_epoch(member: &Member, Change { members, from, lost }: &Change) {
    let (rank, epoch) = (members.iter().position(|&id| id == member.id()), member.epoch());
    let rank = rank.expect("a rank of the epoch");
    eprintln!("EPOCH {epoch} rank {rank} from {from:?} lost {lost:?}");
}

/// Whether an error of the heap or of an operator follows from the loss of a rank.
fn is_loss(error: &anyhow::Error) -> bool {
    let of_heap = error.downcast_ref::<Error>().map(Error::kind);
    let kind = of_heap.or_else(|| error.downcast_ref::<OpError>().map(OpError::kind));
    kind == Some(ErrorKind::PeerLost)
}

enum Done {
    /// All calls of the epoch are made, and its heap is closed.
    Closed,
    /// This process has left the job.
    Left,
}

/// Builds the model of an epoch and makes its calls. If the epoch ends early, keeps its heap.
fn epoch(
    case: &str,
    member: &Member,
    world: &World,
    pids: &[u32],
    retired: &mut Vec<(Retired, Slices)>,
) -> Result<Done> {
    let model = Model::build(world, member.id(), DATA)?;
    let done = make_calls(case, member, world, pids, &model);
    if done.is_err() {
        retired.push((model.heap.clone().retire()?, model.slices()));
        ensure!(matches!(model.heap.alloc::<f32>(1), Err(Error::Closed { .. })), "still open");
    }
    done
}

/// Checks that memory of a retired heap is as this process has left it, and that what peers may still
/// write can only be copied.
fn check_retired(heap: &Retired, (written, untouched): Slices) -> Result<()> {
    ensure!(heap.read(untouched)? == [7.5; COUNT], "a retired heap has changed");
    ensure!(!heap.resolve(untouched)?.is_null(), "no address");
    for slice in written {
        heap.read(slice)?;
        let error = heap.resolve(slice.slice(1..)?).err().context("the address of a result")?;
        ensure!(error.to_string().contains("copy this one by Retired::read"), "{error}");
    }
    Ok(())
}

/// Makes the calls of an epoch, and deals the blow of the case.
fn make_calls(
    case: &str,
    member: &Member,
    world: &World,
    pids: &[u32],
    model: &Model,
) -> Result<Done> {
    let (id, number) = (member.id(), member.epoch());
    let blow = blow(case, number);
    let last = if blow.is_some() { usize::MAX } else { CALLS };
    for call in 0..last {
        model.start(id, call)?;
        if let Some((blow, _)) = blow.filter(|&(_, who)| call == STRUCK && who == id.0) {
            eprintln!("BLOW {}", now());
            match blow {
                Blow::Kill => launch::kill_myself(),
                Blow::Stop => kill_process(getpid(), Signal::STOP).expect("a signal to itself"),
                Blow::Leave => return Ok(Done::Left),
                Blow::Revoke => member.revoke(),
                Blow::GiveUp | Blow::Fail => unreachable!("a blow of sessions"),
            }
        }
        model.finish(call)?;
        if number > 0 && call == 0 {
            let lost: Vec<_> = member.lost();
            eprintln!("FIRST {} lost {lost:?}", now());
        }
        // The stopped process is continued in the middle of the epoch, and stores what it had not.
        if case.starts_with("stop") && number > 0 && call == CALLS / 3 {
            if world.rank() == 0 {
                for (lost, _) in member.lost() {
                    let pid = Pid::from_raw(pids[lost.0] as i32).expect("a process");
                    kill_process(pid, Signal::CONT).expect("a signal to a stopped process");
                }
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }
    model.heap.close()?;
    Ok(Done::Closed)
}

/// Runs a job of `ranks` ranks, in which the ranks `killed` are killed and all others end well.
#[track_caller]
fn job(case: &str, ranks: usize, killed: &[usize]) -> Outcome {
    let program = std::env::current_exe().unwrap();
    let options = Options::default().grace(Duration::from_secs(100));
    let options = options.deadline(Duration::from_secs(100));
    let outcome = launch(&program, &["rank", case], ranks, options).unwrap();
    for (rank, it) in outcome.ranks.iter().enumerate() {
        let expected = if killed.contains(&rank) { End::Signalled(9) } else { End::Exited(0) };
        assert_eq!(it.end, expected, "{case}, rank {rank}:\n{}", outcome.report());
    }
    outcome
}

/// Lines of a rank that begin with `start`, without it.
fn lines<'a>(outcome: &'a Outcome, rank: usize, start: &str) -> Vec<&'a str> {
    outcome.ranks[rank].stderr.lines().filter_map(|line| line.strip_prefix(start)).collect()
}

/// Checks that the survivors are in one epoch with the members `lost`, and prints the time from the
/// blow until all have made a right call.
#[track_caller]
fn check(case: &str, outcome: &Outcome, victim: usize, lost: Loss) {
    let survivors: Vec<_> = (0..outcome.ranks.len()).filter(|&rank| rank != victim).collect();
    let from: Vec<_> = survivors.iter().copied().map(Some).collect();
    let mut last = 0;
    for (rank, &member) in survivors.iter().enumerate() {
        let report = outcome.report();
        let epoch = format!(" 1 rank {rank} from {from:?} lost {:?}", [MemberId(victim)]);
        assert_eq!(lines(outcome, member, "EPOCH"), [epoch], "{report}");
        let first = lines(outcome, member, "FIRST ");
        let (time, losses) = first[0].split_once(" lost ").unwrap();
        assert_eq!(losses, format!("{:?}", [(MemberId(victim), lost)]), "{report}");
        last = last.max(time.parse::<u128>().unwrap());
    }
    let blow: u128 = lines(outcome, victim, "BLOW ")[0].parse().unwrap();
    println!(
        "{case}: first right call on all survivors {:.1} ms after the blow",
        (last - blow) as f64 / 1e3
    );
}

fn survivors_of_a_killed_rank_go_on() {
    for (case, victim) in [("kill-0", 0), ("kill-2", 2)] {
        check(case, &job(case, 4, &[victim]), victim, Loss::Dead);
    }
}

fn a_stopped_rank_is_left_out_and_changes_nothing() {
    for (case, victim) in [("stop-0", 0), ("stop-2", 2)] {
        let outcome = job(case, 4, &[]);
        check(case, &outcome, victim, Loss::Evicted);
        assert_eq!(lines(&outcome, victim, "EVICTED ").len(), 1, "{}", outcome.report());
    }
}

fn a_second_loss_during_the_first_is_survived() {
    let outcome = job("twice", 4, &[2, 3]);
    let last: Vec<_> = [0, 1].map(|rank| *lines(&outcome, rank, "EPOCH ").last().unwrap()).into();
    let epoch = last[0].split(' ').next().unwrap();
    for (rank, line) in last.into_iter().enumerate() {
        assert!(line.starts_with(&format!("{epoch} rank {rank} from ")), "{}", outcome.report());
    }
}

fn a_spare_takes_part_when_it_is_needed() {
    let outcome = job("spare", 4, &[0, 1]);
    let report = outcome.report();
    let [second, third] = [2, 3].map(|rank| lines(&outcome, rank, "EPOCH "));
    assert_eq!(second[0], "1 rank 1 from [Some(0), Some(2)] lost [MemberId(1)]", "{report}");
    assert_eq!(second[1], "2 rank 0 from [Some(1), None] lost [MemberId(0)]", "{report}");
    assert_eq!(lines(&outcome, 3, "SPARE ").len(), 1, "{report}");
    assert_eq!(third, ["2 rank 1 from [Some(1), None] lost [MemberId(0)]"], "{report}");
}

fn a_spare_learns_that_the_job_is_over() {
    let outcome = job("over", 4, &[1]);
    assert_eq!(lines(&outcome, 3, "OVER").len(), 1, "{}", outcome.report());
}

fn a_spare_may_end_an_epoch() {
    let outcome = job("spare-revokes", 4, &[1]);
    let report = outcome.report();
    for (rank, member) in [0, 2].into_iter().enumerate() {
        let last = format!("2 rank {rank} from [Some(0), Some(1)] lost []");
        assert_eq!(lines(&outcome, member, "EPOCH ").last(), Some(&last.as_str()), "{report}");
    }
    assert_eq!(lines(&outcome, 3, "SPARE in epoch "), ["1", "2"], "{report}");
    assert_eq!(lines(&outcome, 3, "OVER").len(), 1, "{report}");
}

fn too_few_ranks_do_not_go_on() {
    let outcome = job("too-few", 4, &[0]);
    for rank in 1..4 {
        assert_eq!(lines(&outcome, rank, "TOO FEW "), ["3"], "{}", outcome.report());
    }
}

fn a_rank_may_leave_and_another_revoke() {
    let outcome = job("leave", 4, &[]);
    for rank in 0..3 {
        let epochs = lines(&outcome, rank, "EPOCH ");
        let all = "from [Some(0), Some(1), Some(2)] lost";
        let expected = [1, 2].map(|epoch| {
            let lost = if epoch == 1 { "[MemberId(3)]" } else { "[]" };
            format!("{epoch} rank {rank} {all} {lost}")
        });
        assert_eq!(epochs, expected, "{}", outcome.report());
    }
}
