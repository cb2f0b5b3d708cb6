//! Checks of error texts. Every variant of an error enum must have an example and a section in the
//! user guide; the example's text must give the value, what was expected and what to do.

use std::collections::BTreeSet;
use std::fmt::Display;

/// Lists the variants of an enum of errors in `NAMES`, and defines `name`, which returns the name
/// of a value's variant. The match in `name` has no wildcard, so the compiler demands that each new
/// variant is listed.
#[macro_export]
macro_rules! variants {
    ($enum:ident: $($name:ident),* $(,)?) => {
        const NAMES: &[&str] = &[$(stringify!($name)),*];

        fn name(error: &$enum) -> &'static str {
            match error { $($enum::$name { .. } => stringify!($name),)* }
        }
    };
}

/// Checks that a call fails, with an error whose text contains all `parts`; returns the text.
///
/// # Panics
/// If the call succeeds, or a part is missing.
#[track_caller]
pub fn fails<T>(outcome: Result<T, impl Display>, parts: &[&str]) -> String {
    let Err(error) = outcome else { panic!("a call succeeded, expected an error of {parts:?}") };
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "no {part:?} in: {text}");
    }
    text
}

/// Checks examples of errors: each text contains its parts (the value, what was expected, what to
/// do) and has a section of `guide`; every variant in `names` must have an example.
///
/// # Panics
/// If a part, a section or a variant is missing.
pub fn check_texts<E: Display>(
    guide: &str,
    examples: &[(E, [&str; 3])],
    names: &[&str],
    name: impl Fn(&E) -> &'static str,
) {
    for (error, parts) in examples {
        let text = error.to_string();
        for part in parts {
            assert!(text.contains(part), "{}: no {part:?} in {text:?}", name(error));
        }
        assert!(has_section(guide, &text), "{}: no section of the guide for {text:?}", name(error));
    }
    let shown: BTreeSet<_> = examples.iter().map(|(error, _)| name(error)).collect();
    assert_eq!(shown, names.iter().copied().collect(), "variants with examples");
}

/// Whether a section of `guide` covers an error with this text: headings of the third level quote
/// error texts in backticks, in which `..` stands for any text.
pub fn has_section(guide: &str, text: &str) -> bool {
    let headings = guide.lines().filter_map(|line| line.strip_prefix("### "));
    let quoted = headings.flat_map(|heading| heading.split('`').skip(1).step_by(2));
    quoted.into_iter().any(|pattern| is_like(pattern, text))
}

/// Whether `text` contains, in this order, the parts of `pattern` that `..` separates.
fn is_like(pattern: &str, text: &str) -> bool {
    let parts = pattern.split("..").map(str::trim).filter(|part| !part.is_empty());
    let rest = |rest: &str, part: &str| rest.split_once(part).map(|(_, rest)| rest.to_owned());
    let mut left = Some(text.to_owned());
    for part in parts {
        left = left.and_then(|left| rest(&left, part));
    }
    left.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_is_found_by_parts_of_a_text_in_their_order() {
        let guide = "# Guide\n\n### `waited .. for rank ..`, `.. is lost`\n\ntext\n";
        assert!(has_section(guide, "open: waited 3.0s for rank 1 and 2"));
        assert!(has_section(guide, "rank 3 is lost: it ended"));
        assert!(!has_section(guide, "for rank 1 it waited"));
        assert!(!has_section("# is lost\n`is lost`\n", "rank 3 is lost"));
    }
}
