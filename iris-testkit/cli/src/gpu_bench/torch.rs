//! Times of PyTorch on the same machine, read from a file that another program wrote.

use std::path::Path;

use anyhow::Result;
use iris_heap::DType;
use serde::Deserialize;
use serde_json::Value;

use crate::errors::usage;

/// PyTorch's times for all operators and shapes of the file.
#[derive(Debug, Default)]
pub(super) struct Torch(Vec<Entry>);

#[derive(Debug, Deserialize)]
struct Entry {
    world: usize,
    /// Operator: `ag_matmul_M`, `ag_matmul_K`, `matmul_rs`, `matmul_ar`, or a collective's own
    /// name.
    op: String,
    /// Shape, as one of: M, N, K; a number and `KiB` or `MiB`; nothing.
    shape: Vec<Value>,
    /// Implementation. Names `gemm only` and those that begin with `nccl` are not operators of
    /// PyTorch itself.
    who: String,
    /// Time in microseconds; `None` if the measurement failed.
    us: Option<f64>,
}

impl Torch {
    /// Reads the file `path`; returns an empty list if `path` is `None`.
    pub(super) fn read(path: Option<&Path>) -> Result<Torch> {
        let Some(path) = path else { return Ok(Torch::default()) };
        let name = path.display().to_string();
        let text = iris_heap::read_file(path).map_err(|e| usage(&name, e, "a readable file"))?;
        let entries = serde_json::from_str(&text);
        let form = "a list of {\"world\", \"op\", \"shape\", \"who\", \"us\"}";
        Ok(Torch(entries.map_err(|e| usage(&name, e, form))?))
    }

    /// Time in microseconds of the fastest of PyTorch's own operators for the case of `line`;
    /// `None` if it was not timed, as for f16.
    pub(super) fn us(&self, line: &Value, ranks: usize) -> Option<f64> {
        if line["dtype"] == "f16" {
            return None;
        }
        let op = line["op"].as_str()?;
        let op = match (op, line["columns"].as_bool()) {
            ("all_gather_matmul", Some(true)) => "ag_matmul_K",
            ("all_gather_matmul", _) => "ag_matmul_M",
            ("matmul_reduce_scatter", _) => "matmul_rs",
            ("matmul_all_reduce", _) => "matmul_ar",
            (op, _) => op,
        };
        let of = |name: &str| line[name].as_u64();
        let shape = [of("m")?, of("n")?, of("k")?];
        let dtype = line["dtype"].as_str().and_then(|name| name.parse().ok());
        let size = dtype.map_or(4, DType::size) as u64;
        let same = |entry: &&Entry| {
            entry.world == ranks
                && entry.op == op
                && entry.who != "gemm only"
                && !entry.who.starts_with("nccl")
                && entry.is_of(shape, size)
        };
        self.0.iter().filter(same).filter_map(|entry| entry.us).reduce(f64::min)
    }
}

impl Entry {
    fn is_of(&self, shape: [u64; 3], size: u64) -> bool {
        let [m, n, _] = shape;
        match &self.shape[..] {
            [] => shape == [0; 3],
            [count, unit] => {
                let scale = match unit.as_str().and_then(|unit| unit.get(..3)) {
                    Some("KiB") => 1 << 10,
                    Some("MiB") => 1 << 20,
                    _ => return false,
                };
                count.as_u64().is_some_and(|count| count * scale == m * n * size)
            }
            all => all.iter().map(Value::as_u64).eq(shape.map(Some)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn its_own_fastest_way_is_found_by_shape() {
        let entry = |op: &str, shape: Value, who: &str, us: Value| json!({"world": 2, "op": op, "shape": shape, "who": who, "us": us});
        let list = json!([
            entry("matmul_ar", json!([16, 8192, 3584]), "gemm only", 5.0.into()),
            entry("matmul_ar", json!([16, 8192, 3584]), "nccl+cublas", 9.0.into()),
            entry("matmul_ar", json!([16, 8192, 3584]), "cublas+symm one_shot", 12.0.into()),
            entry("matmul_ar", json!([16, 8192, 3584]), "cublas+symm two_shot", 11.0.into()),
            entry("matmul_ar", json!([64, 8192, 3584]), "cublas+symm two_shot", Value::Null),
            entry("all_reduce", json!([256, "KiB"]), "symm one_shot", 7.0.into()),
            entry("all_gather", json!([1, "MiB out"]), "symm", 8.0.into()),
            entry("barrier", json!([]), "symm", 3.0.into()),
        ]);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("torch.json");
        std::fs::write(&path, list.to_string()).unwrap();
        let torch = Torch::read(Some(&path)).unwrap();
        let us = |op: &str, [m, n, k]: [u64; 3]| {
            let line = json!({"op": op, "dtype": "bf16", "m": m, "n": n, "k": k});
            torch.us(&line, 2)
        };
        assert_eq!(us("matmul_all_reduce", [16, 8192, 3584]), Some(11.0));
        assert_eq!(us("matmul_all_reduce", [64, 8192, 3584]), None);
        assert_eq!(us("all_reduce", [32, 4096, 0]), Some(7.0));
        assert_eq!(us("all_reduce", [1, 4096, 0]), None);
        assert_eq!(us("all_gather", [128, 4096, 0]), Some(8.0));
        assert_eq!(us("barrier", [0, 0, 0]), Some(3.0));
        let line = json!({"op": "barrier", "dtype": "bf16", "m": 0, "n": 0, "k": 0});
        assert_eq!(torch.us(&line, 4), None);
        std::fs::write(&path, "{}").unwrap();
        let error = Torch::read(Some(&path)).unwrap_err().to_string();
        assert!(error.contains("a list of"), "{error}");
    }
}
