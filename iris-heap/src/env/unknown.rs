//! Detection of misspelt `IRIS_*` environment variables, which would otherwise be ignored silently.

use std::sync::Once;

use super::VARIABLES;
use crate::bootstrap::notice::notice;

/// Environment variable whose name begins with `IRIS_` but which iris does not read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unknown {
    /// Name of the environment variable that is unknown.
    pub name: String,
    /// Known variable with a similar name, if there is one.
    pub nearest: Option<&'static str>,
}

impl std::fmt::Display for Unknown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} is no variable of iris and is ignored", self.name)?;
        match self.nearest {
            Some(nearest) => write!(f, ": expected {nearest}?"),
            None => f.write_str(": `iris doctor --verbose` lists those that are"),
        }
    }
}

/// Variables of this process that begin with `IRIS_` but which iris does not read.
pub fn unknown() -> Vec<Unknown> {
    among(std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned()))
}

/// Reports unknown variables once per process, to `tracing` if the program has a subscriber, else
/// on stderr. Of several processes, only rank 0 reports.
pub fn tell_unknown() {
    static TOLD: Once = Once::new();
    if std::env::var("RANK").is_ok_and(|rank| rank != "0") {
        return;
    }
    TOLD.call_once(|| unknown().iter().for_each(|it| notice(format_args!("{it}"))));
}

fn among(names: impl Iterator<Item = String>) -> Vec<Unknown> {
    let known = |name: &str| VARIABLES.iter().any(|it| it.name == name);
    let names = names.filter(|name| name.starts_with("IRIS_") && !known(name));
    let mut unknown: Vec<_> = names.map(|name| Unknown { nearest: nearest(&name), name }).collect();
    unknown.sort_by(|a, b| a.name.cmp(&b.name));
    unknown
}

/// Known variable whose name differs from `name` in the fewest letters; `None` if more than a third
/// of the letters after `IRIS_` differ.
fn nearest(name: &str) -> Option<&'static str> {
    let all = VARIABLES.iter().map(|it| (distance(it.name, name), it.name));
    let (letters, found) = all.min()?;
    (3 * letters <= name.len() - "IRIS_".len()).then_some(found)
}

/// Levenshtein distance: least number of letters to change, add or remove to turn one name into the
/// other.
fn distance(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, b) in other.bytes().enumerate() {
            let changed = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_name_is_told_with_the_right_one() {
        let names = ["IRIS_DEADLIN", "IRIS_DEADLINE", "PATH", "IRIS_COLOUR", "IRIS_"];
        let found = among(names.map(String::from).into_iter());
        let texts: Vec<_> = found.iter().map(ToString::to_string).collect();
        assert_eq!(texts.len(), 3, "{texts:?}");
        assert!(texts[1].starts_with("IRIS_COLOUR is no variable") && texts[1].contains("doctor"));
        assert!(texts[2].ends_with("expected IRIS_DEADLINE?"), "{}", texts[2]);
        assert_eq!((distance("kitten", "sitting"), distance("", "abc")), (3, 3));
    }
}
