//! Comparison of two records: times of the calls that both measured.

use anyhow::Result;
use comfy_table::Table;
use iris_testkit::say;

use super::{Line, Subject};
use crate::timing::median;

/// Measured call that both records have, with the same variant.
#[derive(Debug)]
struct Pair {
    subject: Subject,
    variant: String,
    /// Times in microseconds: in the old record, in the new one.
    us: [f64; 2],
    /// New time divided by the old one. If both records have the time of the vendor's libraries,
    /// measured in the same way, each time is first divided by the libraries' time of the same run.
    /// This removes differences in clock frequency between the two runs.
    ratio: f64,
}

/// Last line of `lines` that measured the same call as `line` in the same way; `None` if there is
/// none.
fn same<'a>(lines: &'a [Line], line: &Line) -> Option<&'a Line> {
    lines.iter().rev().find(|other| {
        (other.subject(), &other.variant, other.workgroups, other.tile)
            == (line.subject(), &line.variant, line.workgroups, line.tile)
    })
}

fn pairs(old: &[Line], new: &[Line]) -> Vec<Pair> {
    let pair = |(index, line): (usize, &Line)| {
        // Earlier lines of a call that a later line measures again are not compared.
        if same(&new[index + 1..], line).is_some() {
            return None;
        }
        let before = same(old, line)?;
        let ratio = match (line.ratio(), before.ratio()) {
            (Some(new), Some(old))
                if line.windowed_us.is_some() == before.windowed_us.is_some() =>
            {
                new / old
            }
            _ => line.us / before.us,
        };
        let (subject, variant) = (line.subject(), line.variant.clone());
        Some(Pair { subject, variant, us: [before.us, line.us], ratio })
    };
    let mut pairs: Vec<Pair> = new.iter().enumerate().filter_map(pair).collect();
    pairs.sort_by(|a, b| a.ratio.total_cmp(&b.ratio));
    pairs
}

/// Prints the pairs, the largest gain first, and the median of their ratios.
pub(crate) fn print(old: &[Line], new: &[Line]) -> Result<()> {
    let pairs = pairs(old, new);
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::NOTHING);
    table.set_header(["operator", "m x n x k", "variant", "on", "old us", "new us", "new / old *"]);
    for Pair { subject, variant, us: [before, now], ratio } in &pairs {
        let Subject { op, m, n, k, columns, device, .. } = subject;
        let other = subject.other_type();
        let columns = if *columns { " c" } else { "" };
        table.add_row([
            op.clone(),
            format!("{m} x {n} x {k}{columns}{other}"),
            variant.clone(),
            device.clone(),
            format!("{before:.1}"),
            format!("{now:.1}"),
            format!("{ratio:.3}"),
        ]);
    }
    if pairs.is_empty() {
        say!("the records have no subject in common")?;
        return Ok(());
    }
    say!("{table}")?;
    let middle = median(pairs.iter().map(|pair| pair.ratio).collect());
    say!("* each time divided by the libraries' time in its run, if both records have it")?;
    say!("{} in common; median {middle:.3}", pairs.len())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tests::line;
    use super::*;

    #[test]
    fn the_clocks_of_a_run_are_divided_out() {
        let old = [line("all_reduce", 1, 10.0, 10.0), line("all_reduce", 8, 20.0, 10.0)];
        // Two lines measure the same case, the first at half the clock frequency. Only the second
        // is compared.
        let new = [
            line("all_reduce", 1, 99.0, 20.0),
            line("all_reduce", 1, 20.0, 20.0),
            line("all_reduce", 8, 30.0, 20.0),
            line("all_reduce", 64, 30.0, 20.0),
        ];
        let found: Vec<_> =
            pairs(&old, &new).into_iter().map(|it| (it.subject.m, it.us, it.ratio)).collect();
        assert_eq!(found, [(8, [20.0, 30.0], 0.75), (1, [10.0, 20.0], 1.0)]);
    }

    #[test]
    fn without_the_libraries_times_are_compared_as_they_are() {
        let bare = |us| Line { baseline_us: None, ..line("matmul", 1, us, 1.0) };
        assert_eq!(pairs(&[bare(4.0)], &[bare(2.0)])[0].ratio, 0.5);
        // The ratio is the quotient of the plain times if the libraries were timed in different
        // ways.
        let windowed = Line { windowed_us: Some(5.0), ..line("matmul", 1, 2.0, 5.0) };
        assert_eq!(pairs(&[line("matmul", 1, 4.0, 9.0)], &[windowed])[0].ratio, 0.5);
        let other = Line { tile: Some([8, 8]), ..bare(2.0) };
        assert!(pairs(&[bare(4.0)], &[other]).is_empty());
    }
}
