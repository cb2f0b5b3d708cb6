//! Pointers from PROTOCOL.md to the proof. A pointer is a paragraph that begins with `*Proved*` and
//! names clauses of the proof; it follows the text that states the rule of these clauses.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::proof::mutants::clauses;
use crate::proof::report::SYSTEMS;
use crate::proof::rule::Numbers;

/// Sections of PROTOCOL.md, by the clause that each names.
#[derive(Clone, Debug, Default)]
pub struct Pointers {
    /// Heading of the section of PROTOCOL.md that names each clause of the proof, keyed by clause.
    pub sections: BTreeMap<String, String>,
    /// Clauses that more than one section of PROTOCOL.md names.
    twice: Vec<String>,
}

impl Pointers {
    /// Reads PROTOCOL.md of iris-sync.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn of_iris_sync() -> Result<Self, String> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../iris-sync/PROTOCOL.md");
        let text = std::fs::read_to_string(&path);
        text.map(|text| Self::read(&text)).map_err(|error| format!("{}: {error}", path.display()))
    }

    /// Reads the pointers from `text`, in Markdown. A pointer begins at `*Proved*` and ends with
    /// its paragraph; paragraphs with pointers may follow each other.
    pub fn read(text: &str) -> Self {
        let mut pointers = Self::default();
        let (mut section, mut inside) = ("", false);
        for line in text.lines().map(str::trim) {
            if let Some(heading) = line.strip_prefix('#') {
                section = heading.trim_start_matches('#').trim();
            }
            inside = line.starts_with("*Proved*") || inside && !line.is_empty();
            for name in line.split('`').skip(1).step_by(2).filter(|_| inside) {
                let known = pointers.sections.insert(name.into(), section.into());
                pointers.twice.extend(known.map(|_| name.to_string()));
            }
        }
        pointers
    }

    /// Clauses that no section names, names that are no clause, and clauses that are named twice.
    pub fn faults(&self) -> Vec<String> {
        let names = SYSTEMS.iter().flat_map(|make| clauses(&make(Numbers::REAL, None)));
        let known: BTreeSet<&str> = names.collect();
        let missing = known.iter().filter(|it| !self.sections.contains_key(**it));
        let missing = missing.map(|it| format!("no section names the clause \"{it}\""));
        let unknown = self.sections.iter().filter(|(it, _)| !known.contains(it.as_str()));
        let unknown = unknown.map(|(it, section)| {
            format!("section \"{section}\" names \"{it}\", which is no clause")
        });
        let twice = self.twice.iter().map(|it| format!("the clause \"{it}\" is named twice"));
        missing.chain(unknown).chain(twice).map(|what| format!("PROTOCOL.md: {what}")).collect()
    }
}
