//! Checks of early launches. A launch may begin before its predecessor on the stream is over. So
//! every kernel must wait for its predecessor, on all of its paths, before it accesses memory that
//! other kernels see and before it ends. A wait for one kernel is then a wait for all kernels
//! before it.
//!
//! A GEMM that follows the launch that opens a call starts only once everything before the opening
//! launch is over. So while the opening launch still waits for peers, threads of the GEMM may copy
//! earlier data to shared memory, read the call number, and end. Until they have waited for the
//! opening launch, they must not write, wait for peers, or load through the cache of a
//! multiprocessor.

use std::collections::{HashMap, HashSet};

/// Kernels that are launched only after the launch that opens a call.
const AFTER_OPEN: [&str; 2] = ["gemm_gather", "gemm_scatter"];

/// Kernels of a PTX text that access memory or end before they have waited. None for architectures
/// below sm_90, where no launch begins early.
pub(super) fn out_of_turn(name: &str, ptx: &str) -> impl Iterator<Item = String> {
    let target = ptx.split(".target sm_").nth(1).unwrap_or_default();
    let arch: String = target.chars().take_while(char::is_ascii_digit).collect();
    let early = arch.parse().is_ok_and(|arch: u32| arch >= 90);
    let entries = ptx.split(".entry iris_").skip(1).filter(move |_| early);
    entries.filter_map(move |part| {
        let entry = part.split('(').next().unwrap_or_default();
        let (_, body) = part.split_once('{')?;
        let after_open = AFTER_OPEN.contains(&entry);
        let first = match before_turn(body, after_open) {
            None if after_open && !body.contains("griddepcontrol.wait") => "nobody does",
            first => first?,
        };
        Some(format!("{name}: iris_{entry} does not wait for its turn first: {first}"))
    })
}

/// First statement on some path of `body` that must not be executed before the wait for the
/// previous launch; `None` if there is none.
fn before_turn(body: &str, after_open: bool) -> Option<&str> {
    let (mut statements, mut labels) = (Vec::new(), HashMap::<&str, Vec<usize>>::new());
    for line in body.lines() {
        let mut line = line.split("//").next().unwrap_or_default().trim();
        if let Some((label, rest)) = line.split_once(':').filter(|(label, _)| is_name(label)) {
            // A label of inline assembly is local to a block, so a jump to it may mean any of the
            // labels with that name.
            labels.entry(label).or_default().push(statements.len());
            line = rest.trim();
        }
        // Inline assembly has blocks, which may begin on the line of an instruction.
        let bare = line.split(';').map(|it| it.trim_matches([' ', '\t', '{', '}']));
        statements.extend(bare.filter(|it| !it.is_empty()));
    }
    let (mut left, mut seen) = (vec![0], HashSet::new());
    while let Some(at) = left.pop() {
        if !seen.insert(at) {
            continue;
        }
        let Some(&statement) = statements.get(at) else { return Some("the end") };
        let mut words = statement.split_whitespace().peekable();
        let sometimes = words.next_if(|word| word.starts_with('@')).is_some();
        let word = words.next().unwrap_or_default();
        if word.starts_with("griddepcontrol.wait") && !sometimes {
            continue;
        }
        let jumps = word == "bra" || word.starts_with("bra.");
        let ends = ["ret", "exit", "trap"].contains(&word.split('.').next().unwrap_or_default());
        let early = match after_open {
            true => writes_or_waits(word),
            false => touches(word) || ends,
        };
        if early {
            return Some(statement);
        }
        if ends && !sometimes {
            continue;
        }
        if jumps {
            let to = labels.get(words.last().unwrap_or_default());
            left.extend(to.into_iter().flatten());
        }
        if !jumps || sometimes {
            left.push(at + 1);
        }
    }
    None
}

/// Whether an instruction accesses memory outside the workgroup and its parameters, or jumps to
/// code that might.
fn touches(word: &str) -> bool {
    let kinds = ["ld.", "st.", "atom.", "red.", "cp.", "call", "brx", "multimem", "ldu."];
    let own = ["param", "shared"];
    kinds.iter().any(|kind| word.starts_with(kind))
        && (word.starts_with("cp.") || !word.split('.').any(|part| own.contains(&part)))
}

/// Whether an instruction writes memory outside the workgroup, reads it through a cache, waits for
/// others, or lets the next launch begin.
fn writes_or_waits(word: &str) -> bool {
    let reads = word.starts_with("ld.relaxed.gpu");
    let loads =
        word.starts_with("cp.async.bulk.tensor.") && word.contains(".shared::cluster.global");
    let within = ["mbarrier_init", "shared::cta"].iter().any(|it| word.contains(it));
    let orders = (word.starts_with("fence.") || word.starts_with("membar")) && !within;
    (touches(word) && !reads && !loads) || orders || word.starts_with("griddepcontrol")
}

fn is_name(label: &str) -> bool {
    !label.is_empty() && label.chars().all(|it| it.is_ascii_alphanumeric() || "_$%".contains(it))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(body: &str) -> Vec<String> {
        found_in("it", body)
    }

    fn found_in(entry: &str, body: &str) -> Vec<String> {
        let begin = format!(".target sm_90a\n.visible .entry iris_{entry}(\n.param .b8 a\n)");
        out_of_turn("it.cu", &format!("{begin}\n{{\n{body}\n}}\n")).collect()
    }

    const WAITS: &str = "ld.param.u64 %rd1, [a];
        mbarrier.init.shared.b64 [%r1], 1;
        @%p1 bra $L_2;
        st.shared.u32 [%r1], %r2;
        $L_2:
        griddepcontrol.wait;
        ld.global.u32 %r3, [%rd1];
        @%p2 bra $L_2;
        ret;";

    #[test]
    fn what_is_its_own_may_be_touched_before() {
        assert_eq!(found(WAITS), [""; 0]);
        // On architectures without early launches a kernel without the wait is accepted.
        let without = WAITS.replace("griddepcontrol.wait;", "");
        assert_eq!(found(&without).len(), 1);
        let older = format!(".target sm_80\n.entry iris_it(\n)\n{{\n{without}\n}}");
        assert_eq!(out_of_turn("it.cu", &older).count(), 0);
    }

    #[test]
    fn behind_the_launch_that_opens_a_call_only_reads_come_before() {
        let found_in = |body: &str| found_in("gemm_scatter", body);
        let reads = "ld.relaxed.gpu.global.s32 %r1, [%rd1];
            cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1];
            fence.proxy.async.shared::cta;
            @%p1 ret;
            @%p2 trap;
            ";
        let right = format!("{reads}griddepcontrol.wait;\nst.global.u32 [%rd1], %r1;\nret;");
        assert_eq!(found_in(&right), [""; 0]);
        // Kernels that are not in `AFTER_OPEN` must not read before the wait.
        assert_eq!(found(&right).len(), 1);
        let never = format!("{reads}ret;");
        assert!(found_in(&never)[0].contains("nobody does"), "{:?}", found_in(&never));
        for early in [
            "st.global.u32 [%rd1], %r1",
            "red.release.sys.global.add.s32 [%rd1], 1",
            "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1]",
            "ld.acquire.sys.global.s32 %r1, [%rd1]",
            "ld.relaxed.sys.global.s32 %r1, [%rd1]",
            "ld.global.u16 %r1, [%rd1]",
            "fence.acq_rel.sys",
            "fence.proxy.async",
            "call f",
            "griddepcontrol.launch_dependents",
        ] {
            let planted = format!("{early};\n{right}");
            assert!(found_in(&planted)[0].contains(early), "{early}: {:?}", found_in(&planted));
        }
    }

    #[test]
    fn a_way_around_the_wait_is_found() {
        let around =
            WAITS.replace("$L_2:\n", "bra $L_3;\n$L_2:\n").replace("ld.global", "$L_3: ld.global");
        assert!(found(&around)[0].contains("ld.global.u32"), "{:?}", found(&around));
        let sometimes = WAITS.replace("griddep", "@%p3 griddep");
        assert_eq!(found(&sometimes).len(), 1);
        let ends = WAITS.replace("@%p1 bra $L_2;", "@%p1 ret;");
        assert!(found(&ends)[0].contains("ret"), "{:?}", found(&ends));
        for touch in [
            "ld.u32 %r1, [%rd1]",
            "cp.async.bulk.tensor.2d.shared::cluster.global [%r1]",
            "call f",
            "@%p4 ret.uni",
        ] {
            for line in [format!("{touch};"), format!("{{ {touch}; }}")] {
                let touched = WAITS.replace("@%p1 bra", &format!("{line}\n@%p1 bra"));
                assert!(found(&touched)[0].contains(touch), "{line}: {:?}", found(&touched));
            }
        }
    }
}
