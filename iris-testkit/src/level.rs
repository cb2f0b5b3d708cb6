//! Test levels by name, for command lines, for `IRIS_TEST_LEVEL` and for tests.
//!
//! xtask includes this file as a module, because it depends on no workspace member. So this file
//! may use only the standard library.

use std::fmt;
use std::str::FromStr;

/// Test level. Each level runs at least the tests of the previous one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Level {
    /// Each operator and variant once or twice, on small matrices; for functional simulators, and
    /// for devices on which iris has not run before.
    Smoke,
    /// A sample of the tests, for use before every push.
    Quick,
    /// All tests that CI runs.
    #[default]
    Normal,
    /// All tests, including long searches and ignored tests.
    Full,
}

impl Level {
    /// All levels, in ascending order.
    pub const ALL: [Level; 4] = [Level::Smoke, Level::Quick, Level::Normal, Level::Full];

    /// Name of the environment variable that holds the level.
    pub const VARIABLE: &'static str = "IRIS_TEST_LEVEL";

    /// Name of the level, which [`FromStr`] reads.
    pub const fn name(self) -> &'static str {
        match self {
            Level::Smoke => "smoke",
            Level::Quick => "quick",
            Level::Normal => "normal",
            Level::Full => "full",
        }
    }

    /// Level from the environment; [`Level::Normal`] if the variable is not set or empty.
    ///
    /// # Panics
    /// If the variable is not a level's name, so that a typing error does not shorten a test.
    pub fn from_env() -> Level {
        match std::env::var(Self::VARIABLE) {
            Ok(name) if !name.is_empty() => {
                name.parse().unwrap_or_else(|error| panic!("{}: {error}", Self::VARIABLE))
            }
            _ => Level::Normal,
        }
    }

    /// Picks one of three values: `quick` for [`Level::Smoke`] and [`Level::Quick`], `normal` for
    /// [`Level::Normal`], `full` for [`Level::Full`].
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
