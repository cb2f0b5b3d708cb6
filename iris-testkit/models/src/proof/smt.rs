//! Terms as SMT-LIB text, and runs of the solver: the program z3, as Debian packages it.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

use super::system::{Clause, System};
use super::term::text::{bind, put, sort, text};
use super::term::{Function, Sort, Term, Variable};

/// Answer of the solver to a goal.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer {
    /// The solver found that no counterexample exists.
    Proved,
    /// The solver found a counterexample.
    Refuted,
    /// The solver gave up at its limit of work.
    Unknown,
    /// The solver could not be asked; the text is the reason.
    Failed(String),
}

/// Declarations of a system's sorts and functions in SMT-LIB.
pub fn declarations(system: &System) -> String {
    let mut out = String::new();
    for name in [Sort::Rank, Sort::Agent, Sort::Word, Sort::Tile].map(sort) {
        let _ = writeln!(out, "(declare-sort {name} 0)");
    }
    for Function { name, arguments, value } in system.fixed.iter().chain(system.state) {
        let arguments: Vec<_> = arguments.iter().map(|&it| sort(it)).collect();
        let _ = writeln!(out, "(declare-fun {name} ({}) {})", arguments.join(" "), sort(*value));
    }
    out
}

/// Declarations in SMT-LIB of a constant for each variable.
pub fn constants(over: &[Variable]) -> String {
    over.iter().fold(String::new(), |mut out, (name, of)| {
        let _ = writeln!(out, "(declare-const {name} {})", sort(*of));
        out
    })
}

/// SMT-LIB assertion that a clause holds for all values of its variables.
pub fn assert_clause(clause: &Clause) -> String {
    let mut out = String::from("(assert ");
    if clause.over.is_empty() {
        put(&mut out, &clause.body);
    } else {
        out.push_str("(forall ");
        bind(&mut out, &clause.over);
        out.push(' ');
        put(&mut out, &clause.body);
        out.push(')');
    }
    out.push_str(")\n");
    out
}

/// SMT-LIB assertion that the term holds.
pub fn assert(term: &Term) -> String {
    format!("(assert {})\n", text(term))
}

/// Asks z3 whether these assertions can hold together, with this seed and a limit in z3's units of
/// work.
pub fn ask(assertions: &str, seed: u32, limit: u64) -> Answer {
    let script = format!(
        "(set-option :smt.random_seed {seed})\n(set-option :sat.random_seed {seed})\n(set-option :rlimit {limit})\n\
         {assertions}(check-sat)\n"
    );
    match talk(&script) {
        Ok(said) => match said.trim() {
            "unsat" => Answer::Proved,
            "sat" => Answer::Refuted,
            "unknown" => Answer::Unknown,
            other => Answer::Failed(format!("z3 said {other:?}")),
        },
        Err(error) => Answer::Failed(format!("z3: {error}")),
    }
}

fn talk(script: &str) -> std::io::Result<String> {
    let mut z3 = Command::new("z3")
        .args(["-smt2", "-in"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    if let Some(mut input) = z3.stdin.take() {
        input.write_all(script.as_bytes())?;
    }
    let output = z3.wait_with_output()?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Output of `z3 --version`; `None` if z3 is not installed.
pub fn version() -> Option<String> {
    let output = Command::new("z3").arg("--version").output().ok()?;
    let said = String::from_utf8_lossy(&output.stdout);
    output.status.success().then(|| said.trim().to_string())
}
