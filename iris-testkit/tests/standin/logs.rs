//! Logs of the enqueues of every case, to be compared with the logs of another commit: one file for
//! each number of ranks.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::Result;
use iris_heap::World;

use crate::calls::{Calls, Captured, heap, in_line};
use crate::cases::{Extent, Planned, all};
use crate::library::{Machine, Standin};

/// Writes the logs of all cases to `folder`, one file for each of these numbers of ranks.
pub(crate) fn write(
    folder: &Path,
    machine: &Machine,
    worlds: &[usize],
    extent: Extent,
) -> Result<()> {
    std::fs::create_dir_all(folder)?;
    let only = std::env::var("STANDIN_ONLY").unwrap_or_default();
    for &size in worlds {
        let Machine { arch, devices, library } = *machine;
        let shared = if devices < size { "-shared" } else { "" };
        let library = if library { "-library" } else { "" };
        let name = format!("{arch}-{size}{shared}{library}.log");
        let mut to = BufWriter::new(File::create(folder.join(name))?);
        for planned in all(machine.backend(), extent) {
            let title = title(&planned);
            if !title.contains(&only) {
                continue;
            }
            writeln!(to, "## {title}")?;
            for (rank, log) in of_case(&planned, machine, size)?.into_iter().enumerate() {
                writeln!(to, "# rank {rank}\n{log}")?;
            }
        }
        to.flush()?;
    }
    Ok(())
}

/// Title of a case in the logs, in one line.
pub(crate) fn title(planned: &Planned) -> String {
    let Planned { case, what, .. } = planned;
    let options = &case.options;
    format!("{} {} {}x{} {} {what}", case.op, case.variant, options.n, options.k, options.dtype)
}

/// Logs of a case with `size` ranks, one log for each rank.
pub(crate) fn of_case(planned: &Planned, machine: &Machine, size: usize) -> Result<Vec<String>> {
    World::run_threads(size, |world| {
        Standin::get(machine.backend()).rank(world.rank());
        let heap = heap(&world, machine, planned)?;
        let log = match Calls::new(planned, &heap) {
            Ok(calls) => of_rank(&calls, machine)?,
            Err(error) => format!("refused: {}\n", in_line(&error)),
        };
        heap.close()?;
        Ok(log)
    })
}

/// Log of one rank: each call is made twice on a stream, then once in a capture.
fn of_rank(calls: &Calls<'_>, machine: &Machine) -> Result<String> {
    let standin = Standin::get(machine.backend());
    if !calls.takes_part() {
        return Ok("no part in it\n".into());
    }
    let Planned { case, calls: ways, .. } = calls.planned();
    let all = || ways.iter().flat_map(|way| case.rows.iter().map(move |&m| (way, m)));
    let mut log = Log::default();
    let stream = calls.heap().stream()?;
    standin.take();
    for (way, m) in all() {
        for _ in 0..2 {
            let outcome = calls.run(way, m, &stream);
            log.add(&format!("{}, m={m}", way.what), &standin.take(), outcome);
        }
    }
    let captured = Captured::new(calls.heap(), machine)?;
    standin.take();
    let ended = captured.capture(|stream| {
        for (way, m) in all() {
            let outcome = calls.run(way, m, stream);
            log.add(&format!("{}, m={m}, captured", way.what), &captures(&standin.take()), outcome);
        }
    });
    if let Err(code) = ended {
        log.text += &format!("the capture ends with {code}\n");
    }
    Ok(log.text)
}

/// Log of a captured call, from whose lines the mark of captures (`*`) is removed; a line without
/// the mark is flagged.
pub(crate) fn captures(text: &str) -> String {
    let marked = |line: &str| {
        line.split(' ').find(|it| it.starts_with('s')).is_some_and(|it| it.ends_with('*'))
    };
    let mark = |line: &str| match marked(line) {
        true => line.replacen("* ", " ", 1) + "\n",
        false => format!("NOT CAPTURED {line}\n"),
    };
    text.lines().map(mark).collect()
}

/// Log of one rank, shortened: text that repeats is written once.
#[derive(Default)]
struct Log {
    text: String,
    calls: HashMap<String, usize>,
    /// Distinct views of the heap and of an operator's words, each with its number in the log.
    views: HashMap<String, usize>,
}

impl Log {
    fn add(&mut self, what: &str, lines: &str, outcome: Result<()>) {
        let mut own = String::new();
        for line in lines.lines() {
            let line = self.short(line);
            own += &format!("{line}\n");
        }
        if let Err(error) = outcome {
            own += &format!("error: {}\n", in_line(&error));
        }
        let number = self.calls.len();
        match self.calls.get(&own) {
            Some(before) => self.text += &format!("{what}: as call {before}\n"),
            None => {
                self.text += &format!("{what}: call {number}\n{own}");
                self.calls.insert(own, number);
            }
        }
    }

    /// Copy of a log line in which the fields of heap and channel are replaced by the number of
    /// their view.
    fn short(&mut self, line: &str) -> String {
        let of_view = |word: &&str| word.starts_with("heap.") || word.starts_with("channel.");
        let view: Vec<&str> = line.split(' ').filter(of_view).collect();
        if view.is_empty() {
            return line.to_owned();
        }
        let view = view.join(" ");
        let number = self.views.len();
        let number = *self.views.entry(view.clone()).or_insert_with(|| {
            self.text += &format!("view{number}: {view}\n");
            number
        });
        let rest: Vec<&str> = line.split(' ').filter(|word| !of_view(word)).collect();
        format!("{} view{number}", rest.join(" "))
    }
}
