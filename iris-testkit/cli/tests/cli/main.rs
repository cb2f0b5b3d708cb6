//! Tests of the program `iris` from a user's view: output, refusals, exit codes.
//!
//! This file is long because it has a test for each command of the program.

mod first_hour;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use iris_ops::Variant;
use iris_testkit::suite::{Case, Op, Options};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;

const WEIGHTS: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/src/layer/minilm-l6-layer0-ffn.safetensors");

/// Command line of `iris` with these arguments.
fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_iris"));
    command.args(arguments).env("IRIS_TUNING", tuning(arguments));
    command
}

/// Exit code, stdout and stderr of a program that has ended.
fn ended(command: &mut Command) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.code(), text(&stdout), text(&stderr))
}

fn iris(arguments: &[&str]) -> (Option<i32>, String, String) {
    ended(&mut command(arguments))
}

/// Value of `IRIS_TUNING` for a command line: a file for `tune`, which writes it; `off` for all
/// others.
fn tuning(arguments: &[&str]) -> &'static str {
    let tunes = arguments.first() == Some(&"tune");
    if tunes { concat!(env!("CARGO_TARGET_TMPDIR"), "/tuning.toml") } else { "off" }
}

/// Runs `iris` with these arguments, which must succeed, and returns its stdout.
#[track_caller]
fn good(arguments: &[&str]) -> String {
    let (code, out, error) = iris(arguments);
    assert_eq!(code, Some(0), "{arguments:?}:\n{out}\n{error}");
    out
}

/// Stderr of a run that must be refused as the caller's error, before any rank is started.
#[track_caller]
fn refused(arguments: &[&str]) -> String {
    let (code, out, error) = iris(arguments);
    assert_eq!(code, Some(2), "{arguments:?}: {error}");
    assert!(!error.contains("[rank") && out.is_empty(), "{arguments:?}: {error}");
    error
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs `iris`, and parses the last line of its stdout as a JSON object.
#[track_caller]
fn object(arguments: &[&str]) -> Value {
    let out = good(&[arguments, &["--json"]].concat());
    serde_json::from_str(out.lines().last().unwrap()).unwrap()
}

#[test]
fn the_main_job_runs_four_processes_both_ways() {
    let out = good(&["run"]);
    assert!(out.contains("4 ranks as processes"), "{out}");
    for op in ["matmul_all_reduce", "all_gather_matmul", "matmul_reduce_scatter"] {
        let rows = out.lines().filter(|line| line.contains(op) && line.ends_with("ok "));
        assert_eq!(rows.count(), 2, "{op} in f32 and f16:\n{out}");
    }
    let ranks = object(&["run", "--ranks", "3", "--threads-as-ranks", "--iters", "2"]);
    for row in ranks["rows"].as_array().unwrap() {
        let error = row["rel_error"].as_f64().unwrap();
        assert!(error > 0.0 && error < row["bound"].as_f64().unwrap(), "{row}");
    }
}

/// Tests that `iris run` is the launcher of its ranks where it is itself a rank: of `mpirun -n 1`, of
/// `srun -n2`, of torchrun.
#[test]
fn a_job_within_a_rank_of_another_launcher_is_a_job_of_its_own() {
    let mpirun = "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 PMIX_RANK=0 PMIX_NAMESPACE=7";
    let mpiexec = "PMI_RANK=0 PMI_SIZE=1 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1";
    let srun = "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_ID=0 SLURM_JOB_ID=7 SLURM_NODEID=1 \
                SLURM_STEP_NUM_NODES=2 SLURM_RESTART_COUNT=1";
    let torchrun = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 MASTER_ADDR=elsewhere \
                    MASTER_PORT=29500 TORCHELASTIC_RUN_ID=7 IRIS_NODE=1";
    for outer in [mpirun, mpiexec, srun, torchrun] {
        let vars = outer.split_whitespace().filter_map(|pair| pair.split_once('='));
        let barrier = ["run", "barrier", "--ranks", "2", "--iters", "1"];
        let (code, _, error) = ended(command(&barrier).envs(vars));
        assert_eq!(code, Some(0), "{outer}: {error}");
    }
}

#[test]
fn every_op_and_variant_runs_and_says_what_it_did() {
    for op in Op::ALL {
        let variants = op.variants().into_iter().map(Variant::name);
        for (turn, variant) in ["auto"].into_iter().chain(variants).enumerate() {
            let name = op.name().replace('_', "-");
            let dtype = ["f32", "f16", "bf16"][turn % 3];
            let (message, product) = (op != Op::Barrier, op.multiplies());
            let mut arguments = vec!["run", &name, "--ranks", "3"];
            arguments.extend(["--m", "37", "--n", "29"].iter().filter(|_| message));
            arguments.extend(["--k", "31"].iter().filter(|_| product));
            arguments.extend(["--variant", variant, "--dtype", dtype, "--iters", "2"]);
            if turn > 0 {
                arguments.push("--threads-as-ranks");
            }
            let it = object(&arguments);
            assert_eq!(it["op"], op.name(), "{it}");
            let [m, n] = if message { [37, 29] } else { [0; 2] };
            let k = if product { 31 } else { 0 };
            assert_eq!((&it["m"], &it["n"], &it["k"]), (&m.into(), &n.into(), &k.into()));
            assert_eq!(
                (&it["ranks"], &it["dtype"], &it["ok"]),
                (&3.into(), &dtype.into(), &true.into())
            );
            assert!(variant == "auto" || it["variant"] == variant, "{it}");
            assert!(it["median_us"].as_f64().unwrap() > 0.0, "{it}");
            let error = it["rel_error"].as_f64().unwrap();
            assert!(error < if dtype == "f32" { 1e-6 } else { 1e-2 }, "{it}");
            if !matches!(variant, "spinlock" | "atomic") {
                assert_eq!(it["max_rank_difference"], 0.0, "{it}");
            }
        }
    }
}

#[test]
fn columns_are_a_shard_and_a_seed_changes_the_input() {
    let run = |seed: &str| {
        let mut arguments = vec!["run", "all-gather-matmul", "--shard", "columns", "--ranks", "2"];
        arguments.extend(["--m", "4", "--n", "9", "--k", "5", "--iters", "1", "--seed", seed]);
        object(&arguments)["rel_error"].as_f64().unwrap()
    };
    assert_eq!(run("7"), run("7"));
    assert_ne!(run("7"), run("8"));
}

#[test]
fn what_is_wrong_is_named_before_a_rank_starts() {
    let cases: &[(&[&str], &[&str])] = &[
        (&["run", "ring"], &["ring", "matmul-all-reduce"]),
        (&["run", "all-reduce", "--ranks", "0"], &["--ranks", "0", "1 to 64"]),
        (&["run", "all-reduce", "--ranks", "65"], &["65", "1 to 64"]),
        (&["run", "all-reduce", "--m", "-3"], &["-3", "--m"]),
        (&["run", "all-reduce", "--m", "2000000000"], &["2000000000", "1073741823"]),
        (&["run", "all-reduce", "--m", "100000", "--n", "1000000"], &["memory", "MiB"]),
        (&["run", "all-reduce", "--dtype", "i32"], &["i32", "bf16"]),
        (&["run", "all-reduce", "--backend", "tpu"], &["tpu", "cpu"]),
        (&["run", "all-reduce", "--threads", "0"], &["--threads", "0", "1 to 4096"]),
        (&["run", "all-reduce", "--threads", "4097"], &["--threads", "4097", "1 to 4096"]),
        (&["run", "all-reduce", "--iters", "0"], &["--iters", "at least 1"]),
        (&["run", "all-reduce", "--iters", "1000000000000000000"], &["--iters", "at most 1000000"]),
        (&["run", "broadcast", "--m", "1", "--n", "1073741823"], &["memory", "MiB"]),
        (&["run", "matmul", "--m", "1", "--n", "1073741823", "--k", "99"], &["memory", "MiB"]),
        (&["run", "barrier", "--trace", "no/such/file"], &["trace no/such/file", "be written"]),
        (&["run", "--trace", "no/such/file", "--json"], &["trace no/such/file", "be written"]),
        (&["run", "--trace", "layer.svg"], &["trace layer.svg is a chart", "one operator"]),
        (&["bench", "--json", "/proc/no/file"], &["/proc/no/file", "be written"]),
        (&["tune", "--iters", "0"], &["--iters is 0", "at least 1"]),
        (&["tune", "--ranks", "2,1"], &["--ranks is 1", "from 2 to 64"]),
        (&["run", "all-reduce", "--shard", "columns"], &["--shard", "rows"]),
        (&["run", "matmul-all-reduce", "--variant", "ring"], &["ring", "two_shot"]),
        (&["run", "broadcast", "--variant", "one_shot"], &["one_shot", "push"]),
        (&["run", "--m", "4"], &["<OP>"]),
        (&["run", "all-reduce", "--weights", "x"], &["--weights"]),
        (&["run", "--weights", "no/such/file"], &["no/such/file", "readable"]),
        (&["bench", "--only", "nothing"], &["nothing"]),
        (&["plan", "--cases", "x.toml", "--dtype", "f16"], &["--dtype"]),
    ];
    for (arguments, words) in cases {
        let error = refused(arguments);
        assert!(words.iter().all(|word| error.contains(word)), "{arguments:?}: {error}");
    }
}

#[test]
fn messages_of_experts_are_timed_on_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let [cases, lines] = ["cases.toml", "lines.json"].map(|name| folder.path().join(name));
    let ratio = |kind: &str, ranks: usize, more: &str| {
        format!(
            "[[ratio]]\nname = \"{kind}\"\nkind = \"{kind}\"\nm = 5\nn = 12\nk = 3\nranks = {ranks}\n\
             threads = 1\nrepetitions = 2\nat_most = 1e9\n{more}\n"
        )
    };
    std::fs::write(&cases, ratio("list", 2, "") + &ratio("combine", 3, "")).unwrap();
    let [cases_, lines_] = [&cases, &lines].map(|path| path.to_str().unwrap());
    let out = good(&["bench", "--cases", cases_, "--json", lines_]);
    for line in std::fs::read_to_string(&lines).unwrap().lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let times = ["time_us", "base_us", "value"].map(|name| line[name].as_f64().unwrap());
        assert!(times.iter().all(|&time| time > 0.0) && line["ok"] == true, "{line}");
    }
    assert_eq!(out.lines().filter(|line| line.ends_with("ok ")).count(), 2, "{out}");
    std::fs::write(&cases, ratio("list", 2, "variant = \"two_shot\"")).unwrap();
    let error = refused(&["bench", "--cases", cases_]);
    assert!(error.contains("variant of \"list\" is two_shot"), "{error}");
}

/// Tests that a command refuses, by name, each option that it does not read.
#[test]
fn an_option_that_a_command_does_not_read_is_refused() {
    let gather = ["run", "all-gather-matmul", "--ranks", "2", "--threads", "4"];
    let staged = [&gather[..], &["--variant", "staged"]].concat();
    let baseline = [&gather[..], &["--variant", "baseline"]].concat();
    let cases: &[(&[&str], &[&str])] = &[
        (&["bench"], &["--windows"]),
        (&["bench", "--json", "/dev/null"], &["--resume"]),
        (&["bench"], &["--ranks", "2"]),
        (&["bench"], &["--compare", "old.jsonl"]),
        (&["bench"], &["--torch", "times.json"]),
        (&["bench"], &["--limit", "60"]),
        (&["tune"], &["--limit", "60"]),
        (&["tune"], &["--bits", "bench/cuda.toml"]),
        (&["tune"], &["--only", "matmul"]),
        (&["tune", "--backend", "hip"], &["--iters", "3"]),
        (&gather, &["--fetchers", "1"]),
        (&baseline, &["--fetchers", "1"]),
        (&baseline, &["--columns-per-flag", "128"]),
        (&baseline, &["--staging", "m_contiguous"]),
        (&["run", "all-reduce"], &["--fetchers", "1"]),
        (&["run", "all-reduce"], &["--k", "5"]),
        (&["run", "barrier"], &["--m", "4"]),
        (&["run", "barrier"], &["--n", "4"]),
        (&["run", "matmul"], &["--library", "ours"]),
        (&["plan", "all-reduce"], &["--k", "999"]),
        (&["plan", "barrier"], &["--m", "9"]),
        (&["plan", "all-reduce", "--rows", "1..4"], &["--m", "9"]),
        (&["plan", "matmul-all-reduce"], &["--columns"]),
        // With this many fetchers all four workgroups would fetch, so the option is refused.
        (&staged, &["--fetchers", "10000"]),
        (&staged, &["--fetchers", "4"]),
    ];
    for (command, option) in cases {
        let error = refused(&[command, *option].concat());
        let value = option.get(1).unwrap_or(&"given");
        assert!(error.contains(&format!("iris: {} is {value}", option[0])), "{command:?}: {error}");
    }
    let error = refused(&[&staged[..], &["--columns-per-flag", "0"]].concat());
    assert!(error.contains("columns_per_flag is 0"), "{error}");
    good(
        &[&staged[..], &["--fetchers", "3", "--columns-per-flag", "128", "--iters", "1"]].concat(),
    );
}

/// Tests that a result contains all options of its run, so that the run can be repeated.
#[test]
fn a_result_has_the_options_of_its_run() {
    let line = "run all-gather-matmul --ranks 2 --threads-as-ranks --threads 3 --iters 4 --seed 9 \
                --variant staged --fetchers 2 --staging m_contiguous";
    let options = &object(&line.split_whitespace().collect::<Vec<_>>())["options"];
    let asked = &options["problem"];
    let of_problem: [(&str, Value); 4] = [
        ("variant", "staged".into()),
        ("seed", 9.into()),
        ("fetchers", 2.into()),
        ("m_contiguous", true.into()),
    ];
    for (name, value) in of_problem {
        assert_eq!(asked[name], value, "{name} of {options}");
    }
    let run = ["iterations", "threads_as_ranks"].map(|name| &options[name]);
    assert_eq!(run.map(Value::clone), [Value::from(4), true.into()], "{options}");
    assert_eq!(options["device"]["threads"], 3, "{options}");
    let layer = object(&["run", "--ranks", "2", "--iters", "3"]);
    assert_eq!(layer["options"]["iterations"], 3, "{layer}");
}

/// Tests that `iris record` finds the kept record: tests run in a folder of the workspace that is
/// not its root.
#[test]
fn the_kept_record_is_found_from_any_folder_of_the_workspace() {
    let table = good(&["record"]);
    assert!(table.contains("| `matmul` | 2 x NVIDIA H200"), "{table}");
    let (code, _, error) = ended(command(&["record"]).current_dir("/"));
    assert!(code == Some(2) && error.contains("bench/record/h200.jsonl"), "{error}");
}

/// Tests jobs over two simulated nodes: a run of the barrier, which is checked by the ranks' times,
/// the main job with its transformer layer, and the suite.
#[test]
fn nodes_are_simulated_by_runs_and_the_suite() {
    let out = good(&["run", "--ranks", "4", "--nodes", "2", "--iters", "2"]);
    assert!(out.contains("4 ranks as processes on 2 nodes"), "{out}");
    let rows = out.lines().filter(|line| line.ends_with("ok ")).count();
    assert!(rows > 0 && out.contains("matmul_all_reduce"), "{out}");
    for ranks in [&["--threads-as-ranks"][..], &[]] {
        good(
            &[&["run", "barrier", "--nodes", "2", "--ranks", "4", "--iters", "2"], ranks].concat(),
        );
    }
    // Without --ranks each node has the same number of them.
    let out = good(&["run", "--nodes", "3", "--iters", "2"]);
    assert!(out.contains("6 ranks as processes on 3 nodes"), "{out}");
    let error = refused(&["run", "--nodes", "65"]);
    assert!(error.contains("--nodes is 65") && error.contains("divisor"), "{error}");
    // The second world of the suite has two ranks on each node.
    let error = refused(&["test", "--quick", "--nodes", "33"]);
    assert!(error.contains("--nodes is 33: expected 1 to 32"), "{error}");
    let suite = ["test", "--quick", "--nodes", "2", "--op", "all-reduce"];
    let out = good(&suite);
    assert!(
        out.contains("4 ranks as processes on 2 nodes") && !out.contains("\n0 passed"),
        "{out}"
    );
    let error = refused(&[&suite[..], &["--ranks", "3"]].concat());
    assert!(error.contains("--nodes is 2") && error.contains("divisor of the 3 ranks"), "{error}");
}

#[test]
fn a_secret_is_written_once_and_for_its_user_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("secret");
    let arguments = ["secret", path.to_str().unwrap()];
    let out = good(&arguments);
    assert!(out.contains("IRIS_SECRET_FILE"), "{out}");
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let secret = std::fs::read_to_string(&path).unwrap();
    assert!(!out.contains(&secret[..8]), "the secret is printed: {out}");
    let (code, _, error) = iris(&arguments);
    assert!(code != Some(0) && error.contains("exists"), "{code:?}: {error}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), secret, "a second secret locks ranks out");
}

/// Tests a run whose data between nodes travel over MPI. With MPI a rank fails if MPI does not
/// carry them.
#[test]
fn a_run_over_mpi_is_started_by_mpirun() {
    let run = ["run", "matmul-all-reduce", "--ranks", "4", "--mpi", "--iters", "2"];
    let two_nodes = [&run[..], &["--nodes", "2"]].concat();
    if cfg!(feature = "mpi") {
        let out = good(&two_nodes);
        assert!(out.contains("matmul_all_reduce") && out.contains("ok"), "{out}");
        for (added, expected) in [
            (&[][..], ["--nodes is 1", "at least 2 for --mpi"]),
            (&["--nodes", "2", "--backend", "cuda"], ["--backend is cuda", "cpu for --mpi"]),
        ] {
            let error = refused(&[&run[..], added].concat());
            assert!(expected.iter().all(|it| error.contains(it)), "{error}");
        }
    } else {
        let error = refused(&two_nodes);
        assert!(error.contains("feature mpi") && error.contains("cargo xtask run"), "{error}");
    }
}

#[test]
fn a_variant_that_is_none_is_refused_by_the_ops_own_name() {
    for op in Op::ALL {
        let error = refused(&["run", &op.name().replace('_', "-"), "--variant", "zz"]);
        let says = format!("iris: --variant of {op} is zz: expected auto, ");
        let all = op.variants().into_iter().all(|variant| error.contains(variant.name()));
        assert!(error.contains(&says) && all, "{error}");
    }
}

/// Runs `iris` with the given stdout and stderr, as a user's shell would start it.
fn iris_to(arguments: &[&str], out: impl Into<Stdio>, err: impl Into<Stdio>) -> Output {
    // Settings of the test's own environment are overridden, because they would change the output.
    command(arguments).env("IRIS_LOG", "error").stdout(out).stderr(err).output().unwrap()
}

/// Command lines of tasks that print their output in different ways.
const PRINTING: [&[&str]; 5] = [
    &["run", "barrier", "--ranks", "2", "--iters", "1"],
    &["run", "barrier", "--ranks", "2", "--iters", "1", "--threads-as-ranks", "--json"],
    &["run", "--ranks", "2", "--iters", "1"],
    &["test", "--quick", "--backend", "hip"],
    &["tune", "--ranks", "2", "--iters", "1"],
];

#[test]
fn who_stops_reading_ends_it_quietly() {
    for arguments in PRINTING {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = iris_to(arguments, writer, Stdio::piped());
        assert_eq!(output.status.code(), Some(141), "{arguments:?}: {}", text(&output.stderr));
        assert_eq!(text(&output.stderr), "", "{arguments:?}");
    }
}

#[test]
fn a_full_disk_is_an_error() {
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    for arguments in PRINTING {
        let output = iris_to(arguments, full(), Stdio::piped());
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {error}");
        assert!(error.contains("iris: stdout cannot be written: No space left"), "{error}");
        // Stdout and stderr are full, so nothing can be printed and only the exit code shows the
        // error.
        assert_eq!(iris_to(arguments, full(), full()).status.code(), Some(1), "{arguments:?}");
    }
    let mut warned = command(&["run", "barrier", "--ranks", "2"]);
    assert_eq!(ended(warned.env("IRIS_NO_SUCH", "1").stderr(full())).0, Some(0));
}

#[test]
fn a_thread_that_does_not_start_is_an_error() {
    for kind in [&["--threads-as-ranks"][..], &[]] {
        let mut command = command(&[&["run", "barrier", "--ranks", "2"], kind].concat());
        // Each thread asks for a stack of 64 TiB, for which no host has memory, so that no thread
        // can be started.
        let stack = (1_u64 << 46).to_string();
        let (code, _, error) = ended(command.env("RUST_MIN_STACK", stack));
        assert_eq!(code, Some(1), "{error}");
        assert!(error.contains("iris: ") && !error.contains("panicked"), "{error}");
    }
}

#[test]
fn a_trace_that_cannot_be_kept_costs_no_result() {
    let barrier = &["run", "barrier", "--ranks", "2", "--iters", "1"][..];
    for arguments in [barrier, &["run", "--ranks", "2", "--iters", "1"]] {
        let traced = [arguments, &["--json", "--trace", "/dev/full"]].concat();
        let (code, out, error) = iris(&traced);
        assert_eq!(code, Some(2), "{error}");
        assert!(error.contains("trace /dev/full is No space left"), "{error}");
        let it: Value = serde_json::from_str(&out).unwrap();
        assert_eq!(it["ok"], true, "{it}");
    }
}

#[test]
fn the_log_is_plain_text_where_no_terminal_reads_it() {
    let mut command = command(&["run", "barrier", "--ranks", "2"]);
    let (_, _, error) = ended(command.env("IRIS_NO_SUCH", "1").env("IRIS_COMMIT", "known"));
    assert!(error.contains("IRIS_NO_SUCH is no variable of iris"), "{error}");
    assert!(!error.contains('\u{1b}') && !error.contains("IRIS_COMMIT"), "{error}");
}

#[test]
fn a_wrong_environment_is_named() {
    for (name, value) in [("IRIS_DEADLINE", "soon"), ("IRIS_THREADS", "0"), ("IRIS_LOG", "loud")] {
        let (code, _, error) = ended(command(&["run", "barrier"]).env(name, value));
        assert_eq!(code, Some(2), "{error}");
        assert!(error.contains(name) && error.contains(value), "{error}");
    }
}

/// Embedded weights file with one tensor replaced.
fn changed(name: &str, dtype: Dtype, shape: &[usize], bytes: &[u8]) -> Vec<u8> {
    let file = std::fs::read(WEIGHTS).unwrap();
    let whole = safetensors::SafeTensors::deserialize(&file).unwrap();
    let mut tensors = whole.tensors();
    let tensor = TensorView::new(dtype, shape.to_vec(), bytes).unwrap();
    tensors.iter_mut().find(|(known, _)| known == name).unwrap().1 = tensor;
    safetensors::serialize(tensors, None).unwrap()
}

#[test]
fn weights_that_are_no_file_are_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let huge = folder.path().join("huge");
    std::fs::File::create(&huge).unwrap().set_len(1 << 40).unwrap();
    let cases = [
        (folder.path(), "is a folder: expected a readable file"),
        (&pipe, "is a pipe: expected a readable file"),
        (Path::new("/dev/zero"), "is a device or a socket: expected a readable file"),
        (&huge, "is 1048576 MiB: expected a readable file of at most 1024 MiB"),
    ];
    for (path, says) in cases {
        let mut command = Command::new("timeout");
        command.args(["600", env!("CARGO_BIN_EXE_iris"), "run", "--weights"]).arg(path);
        let (code, _, error) = ended(&mut command);
        assert_eq!(code, Some(2), "{path:?}: {error}");
        assert!(error.contains(says), "{path:?}: {error}");
    }
}

/// Tests that the error is absolute if only zeros are expected.
#[test]
fn zeros_are_right_results() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("zeros.safetensors");
    let file = std::fs::read(WEIGHTS).unwrap();
    let whole = safetensors::SafeTensors::deserialize(&file).unwrap();
    let zeros = vec![0; file.len()];
    let zero = |(name, tensor): (String, TensorView<'_>)| {
        let data = &zeros[..tensor.data().len()];
        (name, TensorView::new(tensor.dtype(), tensor.shape().to_vec(), data).unwrap())
    };
    let tensors: Vec<_> = whole.tensors().into_iter().map(zero).collect();
    std::fs::write(&path, safetensors::serialize(tensors, None).unwrap()).unwrap();
    let weights = path.to_str().unwrap();
    let it = object(&["run", "--iters", "1", "--ranks", "2", "--weights", weights]);
    for row in it["rows"].as_array().unwrap() {
        assert_eq!((&row["rel_error"], &row["wrong"]), (&0.0.into(), &Value::Null), "{row}");
    }
}

/// Tests that the check of the transformer layer can fail: the file's bias is changed, so that it
/// no longer matches the output that the file expects.
#[test]
fn wrong_numbers_fail_the_main_job() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.safetensors");
    let file = std::fs::read(WEIGHTS).unwrap();
    let whole = safetensors::SafeTensors::deserialize(&file).unwrap();
    let mut bias = whole.tensor("ffn.down.bias").unwrap().data().to_vec();
    let last = bias.len() - 4;
    let value = f32::from_le_bytes(bias[last..].try_into().unwrap());
    bias[last..].copy_from_slice(&(value + 0.01).to_le_bytes());
    std::fs::write(&path, changed("ffn.down.bias", Dtype::F32, &[384], &bias)).unwrap();
    let (code, out, error) = iris(&["run", "--iters", "1", "--weights", path.to_str().unwrap()]);
    assert_eq!(code, Some(1), "{out}");
    assert!(error.contains("relative error"), "{error}");
}

#[test]
fn a_trace_has_all_ranks_and_workgroups_on_one_clock() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let file = path.to_str().unwrap();
    good(&["run", "--iters", "1", "--ranks", "2", "--threads", "2", "--trace", file]);
    let trace: Value = serde_json::from_slice(&std::fs::read(Path::new(file)).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let spans: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
    for (rank, group) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let own = |event: &&&Value| event["pid"] == rank && event["tid"] == group;
        assert!(spans.iter().any(|event| own(&event)), "workgroup {group} of rank {rank}");
    }
    for op in ["matmul", "matmul_all_reduce", "all_gather_matmul", "matmul_reduce_scatter"] {
        assert!(spans.iter().any(|event| event["cat"] == op), "{op}");
    }
    // All spans are on one clock, which starts at 0.
    let times = spans.iter().map(|event| event["ts"].as_f64().unwrap());
    assert_eq!(times.clone().fold(f64::INFINITY, f64::min), 0.0);
    assert!(times.fold(0.0, f64::max) < 60e6);
}

#[test]
fn a_trace_into_an_svg_is_a_chart_of_one_call() {
    let folder = tempfile::tempdir().unwrap();
    let trace = |name: &str| {
        let path = folder.path().join(name);
        let run = ["run", "matmul-reduce-scatter", "--variant", "push", "--ranks", "2"];
        good(&[&run[..], &["--iters", "3", "--trace", path.to_str().unwrap()]].concat());
        std::fs::read_to_string(path).unwrap()
    };
    let svg = trace("x.SVG");
    assert!(svg.starts_with("<svg") && svg.contains("2 ranks as processes, cpu"), "{svg}");
    // The chart has one rectangle per product, that is per tile, and one in the legend. It shows
    // one call; the JSON trace has five.
    let drawn = svg.lines().filter(|line| line.contains("fill=\"#0072B2\"")).count() - 1;
    let all = trace("x.json").matches(r#""name":"gemm""#).count();
    assert!(drawn > 1 && all == 5 * drawn, "{drawn} of {all}");
}

#[test]
fn the_suite_counts_what_it_skips() {
    let no_gpu = iris_testkit::harness::no_gpu();
    let reasons = [("hip", Some("hip".to_owned())), ("cuda", no_gpu)];
    for (backend, reason) in reasons {
        let Some(reason) = reason else { continue };
        let out = good(&["test", "--quick", "--backend", backend]);
        let last = out.lines().last().unwrap();
        assert!(last.starts_with("0 passed, 0 failed, ") && !last.contains(" 0 skipped"), "{out}");
        // Only the start of the reason is compared, because the loader's path differs between the
        // processes.
        let reason = reason.split(';').next().unwrap();
        assert!(out.starts_with("skipped: ") && out.contains(reason), "{out}");
    }
}

/// Runs `iris` with a cache folder of its own; returns exit code, stdout and stderr.
fn iris_in(folder: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    ended(command(arguments).env("IRIS_CACHE", folder).env_remove("IRIS_TUNING"))
}

/// Tests that `iris plan` prints the choices, and their reasons, for a device that this machine
/// does not have.
#[test]
fn a_plan_says_what_is_chosen_and_why() {
    let shape = ["plan", "matmul-all-reduce", "--n", "8192", "--k", "3584", "--device", "h200"];
    let out = good(&[&shape[..], &["--ranks", "2", "--rows", "64..2048"]].concat());
    let row = |m: &str| {
        let has = |line: &&str| line.split('┆').nth(1).is_some_and(|cell| cell.trim() == m);
        out.lines().find(has).unwrap_or_else(|| panic!("no row of {m}: {out}"))
    };
    assert!(row("64").contains("unfused_ll") && row("64").contains("predicted"), "{out}");
    assert!(row("512").contains("epilogue") && row("512").contains("measured"), "{out}");
    assert!(row("2048").contains("epilogue") && out.contains("which stores to peers"), "{out}");
    // A variant that was never run with eight ranks is not chosen, but it is listed.
    let eight = good(&[&shape[..], &["--ranks", "8", "--rows", "2048..2048"]].concat());
    assert!(eight.contains("epilogue (not run)"), "{eight}");
    assert!(good(&["plan", "barrier", "--device", "mi300x"]).contains("flat"));
    let error = refused(&["plan", "all-reduce", "--device", "h300"]);
    assert!(error.contains("h300") && error.contains("mi300x"), "{error}");
}

/// Tests predictions over several nodes, and that an operator or device without predictions is
/// refused.
#[test]
fn a_plan_over_nodes_predicts_with_the_network() {
    let plan =
        ["plan", "matmul-all-reduce", "--nodes", "16", "--device", "h200", "--rows", "64..64"];
    let row = |arguments: &[&str]| {
        let out = good(&[&plan[..], arguments].concat());
        assert!(out.contains("16 nodes of 8 ranks") && out.contains("predicted"), "{out}");
        let row = out.lines().find(|line| line.contains("matmul_all_reduce")).expect("a row");
        let cells: Vec<_> = row.split('┆').map(str::trim).collect();
        let us = |at: usize| cells[at].trim_end_matches(" us").parse::<f64>().expect("a time");
        (us(5), us(6), us(7))
    };
    let (node, network, fused) = row(&[]);
    assert!(
        fused <= node + network + 0.2 && fused >= node.max(network),
        "{node} {network} {fused}"
    );
    // With a slower network the steps between nodes must take longer, and the work within a node as
    // long as before.
    let slow = row(&["--gbit", "100"]);
    assert!(slow.1 > network && slow.0 == node, "{slow:?}");
    for (arguments, words) in [
        (&["--ranks", "12"][..], ["--nodes", "divisor of the 12 ranks"]),
        (&["--device", "cpu"], ["--device", "NVIDIA GPU"]),
        (&["--device", "mi300x"], ["--device", "NVIDIA GPU"]),
        (&["--gbit", "0"], ["--gbit", "positive"]),
        (&["--variant", "two_shot"], ["variant over several nodes", "two_shot"]),
        (&["--nodes", "0"], ["--nodes", "divisor"]),
        (&["--nodes", "1", "--gbit", "9"], ["--gbit", "one node"]),
    ] {
        let mut all: Vec<&str> = plan.to_vec();
        if let Some(at) = all.iter().position(|it| *it == arguments[0]) {
            all.drain(at..at + 2);
        }
        let error = refused(&[&all[..], arguments].concat());
        assert!(words.iter().all(|word| error.contains(word)), "{arguments:?}: {error}");
    }
    let all = good(&["plan", "--nodes", "16", "--device", "h200"]);
    for op in ["all_gather_matmul", "matmul_reduce_scatter", "barrier"] {
        assert!(all.contains(op), "no {op} in {all}");
    }
    let error = refused(&["plan", "--nodes", "1", "--device", "h200"]);
    assert!(error.contains("operator is missing"), "{error}");
    let error = refused(&["plan", "matmul", "--nodes", "2", "--device", "h200"]);
    assert!(error.contains("matmul") && error.contains("no"), "{error}");
}

/// Tests that after `iris tune` other programs use its measurements unless told otherwise. If ranks
/// have different measurements, they get an error.
#[test]
fn a_machine_that_was_tuned_is_planned_for() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    let plan = ["plan", "all-reduce", "--ranks", "2", "--device", "cpu", "--m", "8"];
    let planned = |what: &str| {
        let (code, out, error) = iris_in(folder.path(), &plan);
        assert!(code == Some(0) && out.contains(what), "{out}{error}");
        out
    };
    let built_in = planned("times predicted from built-in tuning data");
    let (code, out, error) = iris_in(folder.path(), &["tune", "--ranks", "2", "--iters", "2"]);
    assert_eq!(code, Some(0), "{out}{error}");
    let file = Path::new(out.lines().last().unwrap());
    assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    assert_ne!(planned(file.to_str().unwrap()), built_in);
    // A file that IRIS_TUNING names is for its number of ranks only.
    let three = ["plan", "all-reduce", "--ranks", "3", "--device", "cpu"];
    let (code, _, error) = ended(command(&three).env("IRIS_TUNING", file));
    assert!(code == Some(2) && error.contains("expected 3 ranks on "), "{error}");
    let text = std::fs::read_to_string(file).unwrap();
    let other = folder.path().join("other.toml");
    std::fs::write(&other, text.replace("world = 2", "world = 3")).unwrap();
    for (file, told) in [(file, "measured for 2 ranks"), (&*other, "a file for 3 ranks on ")] {
        let (_, out, _) = ended(command(&["doctor", "--no-links"]).env("IRIS_TUNING", file));
        assert!(out.contains(told) && !out.contains("ERROR tuning"), "{out}");
    }
    // The file has rows for the user's own shapes, which take precedence over the built-in rows.
    let cases = folder.path().join("cases.toml");
    let shapes = "[[row]]\nop = \"all_reduce\"\ndtype = \"f32\"\nshapes = [[107, 384, 0]]\n";
    std::fs::write(&cases, shapes).unwrap();
    let tune = ["tune", "--ranks", "2", "--iters", "2", "--cases", cases.to_str().unwrap()];
    for _ in 0..2 {
        let (code, out, error) = iris_in(folder.path(), &tune);
        assert!(code == Some(0) && out.contains("# 1 rows added to "), "{out}{error}");
    }
    assert_eq!(std::fs::read_to_string(file).unwrap().matches("[[row]]").count(), 1);
    let own = ["plan", "all-reduce", "--ranks", "2", "--device", "cpu", "--dtype", "f32"];
    let own = [&own[..], &["--n", "384", "--rows", "107..107"]].concat();
    let (_, out, _) = iris_in(folder.path(), &own);
    assert!(out.contains("measured here"), "{out}");
    // If one rank has another tuning file, the first collective step must fail and name both files.
    let run = ["run", "all-reduce", "--ranks", "2", "--iters", "1"];
    let (code, out, error) = iris_in(folder.path(), &run);
    assert_eq!(code, Some(0), "{out}{error}");
    // The error for an unreadable file has its name and line.
    let text = std::fs::read_to_string(file).unwrap();
    std::fs::write(file, text.replace("push_us", "pull_us")).unwrap();
    let (code, _, error) = iris_in(folder.path(), &plan);
    assert!(code == Some(2) && error.contains(file.to_str().unwrap()), "{error}");
    assert!(error.contains("at line ") && error.contains("pull_us"), "{error}");
    // A file of another version may have other parameters, so its version is named, not a parameter.
    let [first, rest] = text.split_once('\n').map(<[&str; 2]>::from).unwrap();
    assert!(first.starts_with("version = "), "{first}");
    std::fs::write(file, format!("version = 1\n{}", rest.replace("push_us", "pull_us"))).unwrap();
    let (code, _, error) = iris_in(folder.path(), &plan);
    assert!(code == Some(2) && error.contains("has version 1: expected "), "{error}");
    assert_eq!(good(&plan), built_in, "off");
    // Tuning replaces a file that is of no use.
    let (code, out, error) = iris_in(folder.path(), &tune);
    assert!(code == Some(0) && error.contains("is replaced: "), "{out}{error}");
    planned(file.to_str().unwrap());
    // A file that cannot be written is refused before anything is measured.
    let nowhere = folder.path().join("nowhere/tuning.toml");
    let (code, out, error) = ended(command(&["tune", "--ranks", "2"]).env("IRIS_TUNING", nowhere));
    assert!(code == Some(2) && error.contains("cannot be written"), "{error}");
    assert!(out.is_empty(), "{out}");
}

#[test]
fn tuning_of_gpus_measures_or_says_why_not() {
    let cases = tempfile::NamedTempFile::new().unwrap();
    let shapes = "[[row]]\nop = \"all_to_all\"\nshapes = [[8, 1024, 0]]\n";
    std::fs::write(&cases, shapes).unwrap();
    for backend in ["cuda", "hip"] {
        let cases = cases.path().to_str().unwrap();
        let out = good(&["tune", "--backend", backend, "--cases", cases]);
        assert_ne!(
            out.starts_with("skipped: "),
            out.contains("rows added to "),
            "{backend}: {out}"
        );
    }
}

#[test]
fn a_benchmark_of_gpus_measures_or_says_why_not() {
    for backend in ["cuda", "hip"] {
        let out = good(&["bench", "--backend", backend, "--only", "barrier"]);
        let measured =
            out.lines().any(|line| line.starts_with("barrier ") && line.contains("flat"));
        assert_ne!(out.starts_with("skipped: "), measured, "{backend}: {out}");
        let no_gpu = iris_testkit::harness::no_gpu().is_some();
        assert!(backend != "cuda" || measured != no_gpu, "{out}");
    }
    let error = refused(&["bench", "--backend", "cuda", "--only", "nothing"]);
    assert!(error.contains("--only is nothing"), "{error}");
}

/// Tests a rank whose peers do not come: it soon prints which ranks it waits for, and at the end
/// that it gave up.
#[test]
fn a_rank_that_waits_alone_names_the_others() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    let device = r#"{"backend": "cpu", "threads": 1, "devices": null}"#;
    let job = format!(
        r#"{{"weights": null, "device": {device}, "iterations": 1, "trace": false, "nodes": 1}}"#
    );
    for (rank, others) in [("0", "1 and 2"), ("1", "0")] {
        let mut command = command(&["rank", "layer", &job]);
        command.env("IRIS_RENDEZVOUS", folder.path()).env("IRIS_DEADLINE", "0.003");
        command.env("IRIS_LOG", "warn").env("WORLD_SIZE", "3");
        let (code, _, error) = ended(command.env("RANK", rank).env("LOCAL_RANK", rank));
        assert_ne!(code, Some(0), "{error}");
        let said = format!("rank {rank} of 3 waits for rank {others} ");
        let warned = error.lines().find(|line| line.contains(&said));
        assert!(warned.is_some_and(|line| line.contains("WARN")), "rank {rank}: {error}");
    }
}

/// Tests that the smoke level has every operator and variant, ranks of three worlds, and the time
/// of each case.
#[test]
fn a_smoke_test_has_all_ops_and_variants_in_few_cases() {
    let out = good(&["test", "--level", "smoke"]);
    let cases: Vec<_> = out.lines().filter(|line| line.starts_with("case ")).collect();
    for op in Op::ALL {
        for variant in op.variants() {
            let is = |line: &&&str| line.contains(&format!(", {op} {}", variant.name()));
            let seen: Vec<_> = cases.iter().filter(is).collect();
            assert!(!seen.is_empty(), "{op} {variant}:\n{out}");
            assert!(seen.iter().all(|line| line.ends_with(" s")), "{seen:?}");
        }
    }
    for world in ["2 ranks as threads", "3 ranks as threads", "4 ranks as processes"] {
        assert!(out.contains(world), "{world}:\n{out}");
    }
    let counted = format!("{} passed, 0 failed, 0 skipped", cases.len());
    assert_eq!(out.lines().last(), Some(counted.as_str()), "{out}");
    let ways = Case::each(&Options::new(1, 1, 1)).len();
    assert!((50..=3 * ways).contains(&cases.len()), "{out}");
    assert!(out.lines().any(|line| line.starts_with("in ")), "{out}");
}

#[test]
fn a_smoke_test_can_be_of_one_op_and_of_threads_alone() {
    let out = good(&["test", "--level", "smoke", "--op", "all-to-all", "--threads-as-ranks"]);
    assert!(out.ends_with("5 passed, 0 failed, 0 skipped\n"), "{out}");
    assert!(!out.contains("processes"), "{out}");
    let error = refused(&["test", "--level", "smoke", "--deadline", "0"]);
    assert!(error.contains("--deadline is 0") && error.contains("minutes"), "{error}");
    let error = refused(&["test", "--level", "smokey"]);
    assert!(error.contains("smokey") && error.contains("smoke, quick, normal, full"), "{error}");
}

#[test]
fn a_report_is_one_file_with_every_step() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.txt");
    let (code, out, error) = iris(&["report", "--backend", "cpu", "--out", file.to_str().unwrap()]);
    let report = std::fs::read_to_string(&file).unwrap();
    // A ratio may exceed its limit on a busy machine, which is not an error of the report.
    assert!(matches!(code, Some(0 | 1)), "{out}{error}");
    assert!(out.contains("is the file to send"), "{out}");
    let steps = ["iris doctor", "iris test --level smoke", "iris bench --only crate, 1 thread"];
    let mut rest = report.as_str();
    for step in steps {
        let (_, found) =
            rest.split_once(&format!("=== {step}")).unwrap_or_else(|| panic!("{step}: {report}"));
        rest = found;
    }
    for expected in ["cores", "all_reduce", "gemm crate, 1 thread"] {
        assert!(report.contains(expected), "{expected}: {report}");
    }
    let (_, smoke) = report.split_once("=== iris test").unwrap();
    assert!(smoke.split("\n=== ").nth(1).unwrap().starts_with("exit status: 0"), "{report}");
    let refused = refused(&["report", "--backend", "cpu", "--out", "/nowhere/report.txt"]);
    assert!(refused.contains("/nowhere/report.txt"), "{refused}");
}

#[test]
fn a_report_that_is_ended_ends_its_step() {
    use rustix::process::{Pid, Signal, kill_process};
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.txt");
    let mut report = Command::new(env!("CARGO_BIN_EXE_iris"))
        .args(["report", "--backend", "cpu", "--out", file.to_str().unwrap()])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let pause = || std::thread::sleep(std::time::Duration::from_millis(5));
    let written = || std::fs::read_to_string(&file).unwrap_or_default();
    while !written().contains("=== iris test") {
        assert_eq!(report.try_wait().unwrap(), None, "it has ended by itself: {}", written());
        pause();
    }
    let own = report.id();
    let step = loop {
        let children = std::fs::read_to_string(format!("/proc/{own}/task/{own}/children")).unwrap();
        match children.split_whitespace().next() {
            Some(step) => break step.to_owned(),
            None => pause(),
        }
    };
    kill_process(Pid::from_child(&report), Signal::TERM).unwrap();
    assert_eq!(report.wait().unwrap().code(), None);
    // A step that has ended stays as a zombie if nobody waits for it, as in a container.
    let stat = || std::fs::read_to_string(format!("/proc/{step}/stat")).unwrap_or_default();
    while !stat().is_empty() && !stat().contains(") Z ") {
        pause();
    }
    assert!(!written().contains("0 failed"), "the step has ended by itself: {}", written());
}

#[test]
fn kernels_of_an_unknown_architecture_are_refused_before_a_compiler_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("kernels");
    for arch in ["foo", "sm_", "gfx", "sm_90a,h200"] {
        let error = refused(&["kernels", "--arch", arch, "--out", out.to_str().unwrap()]);
        let other = arch.split(',').next_back().unwrap();
        assert!(error.contains(&format!("--arch is {other}: expected names such as")), "{error}");
        assert!(!out.exists(), "{error}");
    }
}
