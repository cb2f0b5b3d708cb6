//! Control-flow graph of a function of AMD machine code, independent of the order in which the
//! compiler laid out its blocks.

use std::collections::{BTreeSet, HashMap};

/// Successors and predecessors of each instruction.
pub(super) struct Ways<'a> {
    lines: &'a [&'a str],
    behind: Vec<Vec<usize>>,
    before: Vec<Vec<usize>>,
}

impl<'a> Ways<'a> {
    /// Builds the graph of a function from its instructions and labels.
    pub(super) fn of(lines: &'a [&'a str]) -> Self {
        let label = |(at, line): (usize, &&'a str)| Some((line.strip_suffix(':')?, at));
        let labels: HashMap<&str, usize> = lines.iter().enumerate().filter_map(label).collect();
        let mut ways = Self {
            lines,
            behind: vec![Vec::new(); lines.len()],
            before: vec![Vec::new(); lines.len()],
        };
        for (at, line) in lines.iter().enumerate() {
            let mut words = line.split_whitespace();
            let (instruction, to) = (words.next().unwrap_or_default(), words.next());
            let jumps = instruction == "s_branch" || instruction.starts_with("s_cbranch");
            let ends = ["s_branch", "s_endpgm", "s_setpc_b64"].contains(&instruction);
            let next = (!ends && at + 1 < lines.len()).then_some(at + 1);
            let there = to.filter(|_| jumps).and_then(|to| labels.get(to).copied());
            for to in next.into_iter().chain(there) {
                ways.behind[at].push(to);
                ways.before[to].push(at);
            }
        }
        ways
    }

    /// Last barriers on the paths to the instruction `at`.
    pub(super) fn barriers_before(&self, at: usize) -> BTreeSet<usize> {
        self.barriers(at, &self.before)
    }

    /// First barriers on the paths from the instruction `at`.
    pub(super) fn barriers_after(&self, at: usize) -> BTreeSet<usize> {
        self.barriers(at, &self.behind)
    }

    fn barriers(&self, at: usize, steps: &[Vec<usize>]) -> BTreeSet<usize> {
        let (mut barriers, mut seen) = (BTreeSet::new(), BTreeSet::new());
        let mut left = steps[at].clone();
        while let Some(at) = left.pop() {
            if !seen.insert(at) {
                continue;
            }
            if self.lines[at] == "s_barrier" {
                barriers.insert(at);
            } else {
                left.extend(&steps[at]);
            }
        }
        barriers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests that paths follow jumps, not the order of the text: code above a barrier may run after
    /// it.
    #[test]
    fn a_way_is_that_of_jumps() {
        let lines = [
            "s_barrier",
            "s_cbranch_execz .LBB0_2",
            ".LBB0_1:",
            "buffer_wbl2",
            "s_endpgm",
            ".LBB0_2:",
            "s_barrier",
            "s_branch .LBB0_3",
            "s_nop 0",
            ".LBB0_3:",
            "s_cbranch_scc0 .LBB0_1",
            "s_endpgm",
        ];
        let ways = Ways::of(&lines);
        assert_eq!(ways.barriers_before(3), BTreeSet::from([0, 6]));
        assert_eq!(ways.barriers_after(3), BTreeSet::new());
        assert_eq!(ways.barriers_after(1), BTreeSet::from([6]));
        assert_eq!(ways.barriers_before(8), BTreeSet::new());
    }
}
