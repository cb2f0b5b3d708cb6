//! How much is tested: the one list of names, for command lines, for `IRIS_TEST_LEVEL` and for the
//! code that reads it.
//!
//! xtask depends on no member, so it takes this file in as a module of its own. Nothing beside the
//! standard library is used here.

use std::fmt;
use std::str::FromStr;

/// How much is tested. Each level does at least what the one before it does, for the same test.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Level {
    /// Each operator and variant once or twice, on small matrices: for a device that is slow, as a
    /// functional simulator is, or that was never tried.
    Smoke,
    /// A sample: before every push.
    Quick,
    /// What CI runs.
    #[default]
    Normal,
    /// The long searches and the ignored tests, too.
    Full,
}

impl Level {
    /// All of them, from the least on.
    pub const ALL: [Level; 4] = [Level::Smoke, Level::Quick, Level::Normal, Level::Full];

    /// The variable that tests read.
    pub const VARIABLE: &'static str = "IRIS_TEST_LEVEL";

    /// The name that [`FromStr`] reads.
    pub const fn name(self) -> &'static str {
        match self {
            Level::Smoke => "smoke",
            Level::Quick => "quick",
            Level::Normal => "normal",
            Level::Full => "full",
        }
    }

    /// The level that the environment asks for; not set, or empty, is [`Level::Normal`].
    ///
    /// # Panics
    /// On a name that is none, so that a misspelt one is not a shorter test.
    pub fn from_env() -> Level {
        match std::env::var(Self::VARIABLE) {
            Ok(name) if !name.is_empty() => {
                name.parse().unwrap_or_else(|error| panic!("{}: {error}", Self::VARIABLE))
            }
            _ => Level::Normal,
        }
    }

    /// One of three values: the first for the levels up to [`Level::Quick`].
    pub fn pick<T>(self, quick: T, normal: T, full: T) -> T {
        match self {
            Level::Smoke | Level::Quick => quick,
            Level::Normal => normal,
            Level::Full => full,
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Level {
    type Err = String;

    fn from_str(text: &str) -> Result<Level, String> {
        let found = Level::ALL.into_iter().find(|level| level.name() == text);
        found.ok_or_else(|| {
            format!("the level is {text:?}, expected {}", Level::ALL.map(Level::name).join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_has_one_name() {
        for level in Level::ALL {
            assert_eq!(level.to_string().parse(), Ok(level));
        }
        let error = "smokey".parse::<Level>().unwrap_err();
        assert!(error.contains("\"smokey\", expected smoke, quick, normal, full"), "{error}");
        assert!(Level::ALL.is_sorted());
        assert_eq!(Level::ALL.map(|level| level.pick(1, 2, 3)), [1, 1, 2, 3]);
    }
}
