//! Text form of programs, one step per line.

use std::fmt;

use super::{Alternative, Core, Gemm, Item, KernelOperands, Program, Source, Target, Work};

/// Number of columns by which each loop indents its steps.
const INDENT: usize = 2;

impl fmt::Display for Program {
    /// Prints all alternatives, each with a line of its conditions first, if it has any.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for of in self.alternatives {
            self.show(f, of)?;
        }
        Ok(())
    }
}

impl Program {
    fn show(&self, f: &mut fmt::Formatter<'_>, of: &Alternative) -> fmt::Result {
        if self.alternatives.len() > 1 {
            let conditions: Vec<_> = of.when.iter().map(ToString::to_string).collect();
            match &conditions[..] {
                [] => writeln!(f, "else:")?,
                all => writeln!(f, "if {}:", all.join(", and "))?,
            }
        }
        for item in self.items(of) {
            lines(f, item, INDENT)?;
        }
        Ok(())
    }
}

fn lines(f: &mut fmt::Formatter<'_>, item: &Item, indent: usize) -> fmt::Result {
    let (title, items) = match item {
        Item::Do(step) => {
            writeln!(f, "{:indent$}{}", "", step.work)?;
            if !step.or.is_empty() {
                writeln!(f, "{:indent$}or, if that cannot be done:", "")?;
            }
            ("", step.or)
        }
        Item::Parts(items) => ("for each part:", *items),
        Item::PreviousPart(items) => ("for the part before:", *items),
        Item::Peers(items) => ("for each peer:", *items),
    };
    if !title.is_empty() {
        writeln!(f, "{:indent$}{title}", "")?;
    }
    items.iter().try_for_each(|item| lines(f, item, indent + INDENT))
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Work::Kernel(kernel, of) => write!(f, "{} {of}", kernel.name()),
            Work::Gemm(gemm) => write!(f, "{gemm}"),
            Work::Open(_) => f.write_str("open"),
            Work::Copies(of) => write!(f, "copies of {of}, by engines"),
            Work::Gate(of) => write!(f, "gate for {of}"),
            Work::Sums { to } => write!(f, "sums to {to}"),
            Work::CopyReceived(of) => write!(f, "take {of}"),
            Work::Close(_) => f.write_str("close"),
            Work::Barrier(phase) => write!(f, "barrier {phase}"),
            Work::BarrierCall => f.write_str("barrier"),
            Work::RmsNorm => f.write_str("rms_norm"),
        }
    }
}

impl fmt::Display for KernelOperands {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KernelOperands::Call => f.write_str("of the operands"),
            KernelOperands::Area(area) => write!(f, "of {area}"),
            KernelOperands::OwnRows => f.write_str("of this rank's rows of C"),
            KernelOperands::Of(of) => write!(f, "of {of}"),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Input => f.write_str("A"),
            Source::Shard => f.write_str("this rank's shard of A"),
            Source::Area(area) => write!(f, "{area}"),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::C | Target::Own => f.write_str("C"),
            Target::OwnOfC => f.write_str("this rank's rows of C"),
            Target::Area(area) => write!(f, "{area}"),
        }
    }
}

impl fmt::Display for Gemm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Gemm { source, rows, to, core } = self;
        let core = match core {
            Core::Any => "",
            Core::Adding => ", which adds what the peer sent",
            Core::Gated => ", which waits for parts of A",
            Core::Storing { .. } => ", which stores to peers",
            Core::Exchanging(kernel) => &format!(", which does {}", kernel.name()),
        };
        write!(f, "gemm of {source}, {rows}, to {to}{core}")
    }
}
