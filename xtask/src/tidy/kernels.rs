//! Rules of device source: constructs that may be used only in the headers that are made for them.

use super::Finding;
use super::tree::Tree;

/// Folder of the device source.
const KERNELS: &str = "iris-kernels/kernels/";

/// Rule for some identifiers, which may be used only in the files for which the function `may`
/// returns true.
struct Confined {
    what: &'static str,
    /// Identifiers that the rule confines; a `*` at the end matches any suffix, a `(` at the end
    /// matches calls only.
    words: &'static [&'static str],
    may: fn(&str) -> bool,
    place: &'static str,
}

const RULES: &[Confined] = &[
    Confined {
        what: "a vendor's macro or function",
        words: &[
            "__CUDA_ARCH*",
            "__CUDACC*",
            "__HIP*",
            "__AMDGCN*",
            "__gfx*",
            "__hip_*",
            "__nv_*",
            "__nvvm_*",
            "__builtin_amdgcn_*",
        ],
        may: |path| is_port(path) || is_gemm(path),
        place: "iris/port*.h and the instructions in iris/gemm/",
    },
    Confined {
        // A word's type fixes the scope of its accesses; these constructs would bypass the type.
        what: "a raw atomic, fence or assembly",
        words: &[
            "asm",
            "__asm",
            "__asm__",
            "volatile",
            "__volatile__",
            "__atomic*",
            "__sync_*",
            "__scoped_atomic*",
            "__c11_atomic*",
            "__threadfence*",
            "__ldg",
            "__ldcg",
            "__ldcv",
            "__stcg",
            "__stwt",
            "__nontemporal*",
            "atomic",
            "atomic_ref",
            "atomic_thread_fence",
            "atomicAdd*",
            "atomicAnd*",
            "atomicCAS*",
            "atomicDec*",
            "atomicExch*",
            "atomicInc*",
            "atomicMax*",
            "atomicMin*",
            "atomicOr*",
            "atomicSub*",
            "atomicXor*",
        ],
        may: |path| is_port(path) || is_gemm(path),
        place: "iris/port*.h and the instructions in iris/gemm/",
    },
    Confined {
        // The types of words and the access table fix orders and scopes; naming these elsewhere
        // would bypass both.
        what: "an order or a scope",
        words: &["Order", "Scope", "ScopedWord"],
        may: |path| {
            let may = ["sym.h", "memory.h", "wait.h", "trace.h", "body/accumulate.h"];
            is_port(path) || may.contains(&header(path))
        },
        place: "iris/port*.h, sym.h, memory.h, wait.h, trace.h and body/accumulate.h",
    },
    Confined {
        // Kernels call protocol functions (enter, credit, push_signal, wait_tile, finish), which
        // models have checked. Direct accesses to words are not checked by models.
        what: "a word",
        words: &["SymWord", "DevWord", "SymPair", "device_word", "word("],
        may: |path| WORDS.contains(&header(path)),
        place: "iris/sym.h and the headers of the protocols",
    },
];

/// Headers that operate on synchronisation words.
const WORDS: [&str; 10] = [
    "sym.h",
    "memory.h",
    "channel.h",
    "wait.h",
    "barrier.h",
    "entry.h",
    "epoch.h",
    "ll.h",
    "lock.h",
    "workgroup.h",
];

fn is_port(path: &str) -> bool {
    path.starts_with("iris/port") && path.ends_with(".h")
}

/// Name of a device header below `iris/`; empty for any other file.
fn header(path: &str) -> &str {
    path.strip_prefix("iris/").unwrap_or_default()
}

/// Whether a file may contain the instructions of GEMMs. Other GEMM files include such a file and
/// may not contain instructions themselves.
fn is_gemm(path: &str) -> bool {
    const CORES: [&str; 4] = ["dtype.h", "gemm/cdna3.h", "gemm/sm80.h", "gemm/sm90.h"];
    CORES.contains(&header(path))
        || path.starts_with("iris/gemm/")
            && (path.ends_with("_ptx.h") || path.ends_with("_wgmma.h"))
}

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.files().iter().filter(|file| file.is_device()) {
        let Some(path) = file.path.strip_prefix(KERNELS) else { continue };
        let rules: Vec<_> = RULES.iter().filter(|rule| !(rule.may)(path)).collect();
        for (line, word) in file.identifiers() {
            let called = || file.text.lines().nth(line - 1).is_some_and(|it| calls(it, &word));
            let listed = |it: &str| match it.strip_suffix('(') {
                Some(name) => name == word && called(),
                None => is(it, &word),
            };
            let broken = rules.iter().filter(|rule| rule.words.iter().any(|it| listed(it)));
            findings.extend(broken.map(|rule| {
                let message = format!("{word}: {} is allowed only in {}", rule.what, rule.place);
                Finding::new(&file.path, line, message)
            }));
        }
    }
    findings
}

/// Rust file that embeds the device headers, in the order of their layers.
const SOURCE: &str = "iris-kernels/src/source.rs";

/// Rule: a header includes only headers that precede it in the list of embedded headers, so there
/// are no cycles and the list is a reading order.
pub(super) fn check_layers(tree: &Tree) -> Vec<Finding> {
    let Some(source) = tree.file(SOURCE) else { return Vec::new() };
    let listed = source.text.lines().filter_map(|line| {
        line.trim().strip_prefix('"')?.strip_suffix("\",").filter(|name| name.ends_with(".h"))
    });
    let order: Vec<&str> = listed.collect();
    let place = |name: &str| order.iter().position(|&it| it == name);
    let mut findings = Vec::new();
    for file in tree.files() {
        let Some(own) = file.path.strip_prefix(KERNELS).and_then(place) else { continue };
        for (number, line) in file.text.lines().enumerate() {
            let included = line.strip_prefix("#include \"").and_then(|it| it.strip_suffix('"'));
            let Some(name) = included.filter(|name| place(name).is_none_or(|it| it >= own)) else {
                continue;
            };
            let message = format!("{SOURCE} must list {name} before this header");
            findings.push(Finding::new(&file.path, number + 1, message));
        }
    }
    findings
}

/// Prefixes of instructions that access memory, including shared memory, or wait.
const TOUCHES: [&str; 9] =
    ["ld.", "st.", "atom.", "red.", "fence", "nanosleep", "cp.async", "ldmatrix", "wgmma"];

/// Rule: inline assembly that accesses memory must be volatile and clobber memory, so that the
/// compiler does not move the assembly.
pub(super) fn check_assembly(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.files().iter().filter(|file| file.path.starts_with(KERNELS)) {
        let mut line = 1;
        // Each piece of the text from one `asm` to the next contains at most one assembly
        // statement.
        for (number, statement) in file.text.split("asm").enumerate() {
            let first = line;
            line += statement.matches('\n').count();
            let touches = TOUCHES.iter().any(|it| statement.contains(&format!("(\"{it}")));
            if number == 0 || !touches {
                continue;
            }
            if !statement.starts_with(" volatile(") || !statement.contains("\"memory\"") {
                let message = "asm that touches memory is volatile and clobbers \"memory\"";
                findings.push(Finding::new(&file.path, first, message));
            }
        }
    }
    findings
}

/// Whether the line contains a call of the function named `word`.
fn calls(line: &str, word: &str) -> bool {
    let before = |at: usize| line[..at].chars().next_back();
    line.match_indices(&format!("{word}("))
        .any(|(at, _)| !before(at).is_some_and(|c| c.is_alphanumeric() || c == '_'))
}

fn is(listed: &str, word: &str) -> bool {
    match listed.strip_suffix('*') {
        Some(beginning) => word.starts_with(beginning),
        None => listed == word,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::found;

    /// Line numbers of the violations in a device source with this path and text.
    fn lines(path: &str, text: &str) -> Vec<String> {
        let path = format!("{KERNELS}{path}");
        let found = found(check, &[(&path, text)]);
        found.iter().map(|it| it.replace(&format!("{path}:"), "")).collect()
    }

    const VENDOR: &str =
        "#ifdef __CUDA_ARCH__\n#elif defined(__HIPCC_RTC__)\n__nv_bfloat16 x;\n#endif";
    const RAW: &str =
        "// volatile\nasm(\"\");\natomicAdd_system(p, 1);\n__threadfence();\n__hip_atomic_load(p);";

    #[test]
    fn vendors_stay_in_the_port() {
        assert_eq!(lines("all_reduce.cu", VENDOR), ["1", "2", "3"]);
        assert_eq!(lines("iris/schedule.h", VENDOR), ["1", "2", "3"]);
        assert!(lines("iris/port.h", VENDOR).is_empty());
        assert!(lines("iris/port_cuda.h", VENDOR).is_empty());
        assert!(!lines("port_cuda.h", VENDOR).is_empty());
        assert!(lines("iris/gemm/sm90.h", VENDOR).is_empty());
        assert_eq!(lines("iris/gemm/product.h", VENDOR), ["1", "2", "3"]);
    }

    #[test]
    fn raw_atomics_stay_in_the_port() {
        // The last line of the text also contains a vendor's function, which only some files may
        // call.
        assert_eq!(lines("iris/memory.h", RAW), ["2", "3", "4", "5"]);
        assert_eq!(lines("gemm/sm90.h", RAW), ["2", "3", "4", "5"]);
        assert!(lines("iris/port.h", RAW).is_empty());
        // A header with the instructions of a GEMM core may contain instructions, but files that
        // use this header may not.
        assert!(lines("iris/gemm/sm90_ptx.h", RAW).is_empty());
        assert_eq!(lines("iris/gemm/core.h", RAW), ["2", "3", "4", "5"]);
        assert_eq!(lines("gemm_sm90.cu", RAW), ["2", "3", "4", "5"]);
    }

    #[test]
    fn orders_scopes_and_words_stay_in_the_protocols() {
        let scope = "void f() {\n  port::store<Order::Release, Scope::Device>(a, 1, -1);\n}";
        assert_eq!(lines("all_reduce.cu", scope), ["2", "2"]);
        assert_eq!(lines("iris/body/reduce.h", scope), ["2", "2"]);
        assert_eq!(lines("memory.h", scope), ["2", "2"]);
        assert!(lines("iris/memory.h", scope).is_empty());
        let word = "void f() {\n  heap.word(1, 2).store(1);\n}";
        assert_eq!(lines("all_reduce.cu", word), ["2"]);
        assert_eq!(lines("helper.h", "SymWord w;\nDevWord d;"), ["1", "2"]);
        assert_eq!(lines("iris/flow/reduce.h", "SymWord w;\nDevWord d;"), ["1", "2"]);
        assert!(lines("iris/workgroup.h", word).is_empty());
        assert!(lines("iris/view.h", "v.word[1] = sword(2);").is_empty());
    }

    #[test]
    fn headers_include_lower_layers_only() {
        let path = |name: &str| format!("{KERNELS}{name}");
        let (low, high) = (path("iris/low.h"), path("iris/high.h"));
        let list = "HEADERS: embed![\n    \"iris/low.h\",\n    \"iris/high.h\",\n];";
        let with = |in_low: &str, in_high: &str| {
            found(check_layers, &[(SOURCE, list), (&low, in_low), (&high, in_high)])
        };
        assert!(with("", "#include \"iris/low.h\"").is_empty());
        assert_eq!(with("\n#include \"iris/high.h\"", ""), [format!("{low}:2")]);
        assert_eq!(with("", "#include \"iris/none.h\""), [format!("{high}:1")]);
        assert_eq!(with("#include \"iris/low.h\"", ""), [format!("{low}:1")]);
    }

    #[test]
    fn assembly_that_touches_memory_is_kept_in_place() {
        let found =
            |text: &str| found(check_assembly, &[(&format!("{KERNELS}iris/port_cuda.h"), text)]);
        let good = "int a;\nasm volatile(\"st.x [%0], %1;\" ::\"l\"(a)\n : \"memory\");\nasm(\"cvt.x %0;\");";
        assert!(found(good).is_empty());
        for good in [good, &good.replace("st.x", "wgmma.fence"), &good.replace("st.x", "ldmatrix")]
        {
            for bad in [good.replace(" volatile", ""), good.replace("\"memory\"", "")] {
                assert_eq!(found(&bad), [format!("{KERNELS}iris/port_cuda.h:2")]);
            }
        }
    }

    #[test]
    fn names_that_only_look_alike_pass() {
        let text = "int asmx; int atomics; int sym_loader; my_volatile(); \"asm\"; // __nv_x";
        assert!(lines("all_reduce.cu", text).is_empty());
    }
}
