//! Feed-forward block of a transformer layer, read from a safetensors file.

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use iris_heap::DType;
use iris_kernels::dtype::{Role, has_role};
use iris_testkit::matrix;
use iris_testkit::oracle::Dense;
use rustix::fs::OFlags;
use safetensors::SafeTensors;

use crate::errors::usage;

/// Embedded file: layer 0 of all-MiniLM-L6-v2, with the hidden states of a text of 107 tokens.
const EMBEDDED: &[u8] = include_bytes!("minilm-l6-layer0-ffn.safetensors");

/// Maximum size of a weights file, in bytes.
const MOST: u64 = 1 << 30;

/// Prefix of the tensors' names in the embedded file: `ffn.input` and so on.
const PREFIX: &str = "ffn";

/// Feed-forward block: output = gelu(input up^T + up_bias) down^T + down_bias. Weights are stored
/// as (out, in).
#[derive(Debug)]
pub(crate) struct Block {
    /// Input of the block, tokens x hidden.
    pub(crate) input: Dense,
    /// Weights of the up product, inner x hidden.
    pub(crate) up: Dense,
    /// Bias of the up product, 1 x inner.
    pub(crate) up_bias: Dense,
    /// Weights of the down product, hidden x inner.
    pub(crate) down: Dense,
    /// Bias of the down product, 1 x hidden.
    pub(crate) down_bias: Dense,
    /// Expected output of the block, tokens x hidden.
    pub(crate) output: Dense,
    /// Element type of the weights.
    pub(crate) dtype: DType,
}

impl Block {
    /// Reads the embedded file, or another file in the same format.
    ///
    /// # Errors
    /// An unreadable file, or a missing or wrong tensor; the error names the file and the tensor.
    pub(crate) fn read(path: Option<&PathBuf>) -> Result<Block> {
        let Some(path) = path else {
            return Block::parse(EMBEDDED).context("the embedded weights");
        };
        Block::parse(&contents(path)?).with_context(|| named(path))
    }

    fn parse(bytes: &[u8]) -> Result<Block> {
        let file = SafeTensors::deserialize(bytes).map_err(|error| {
            let found = format!("{} bytes that are no safetensors file ({error})", bytes.len());
            usage("the content", found, "a complete safetensors file")
        })?;
        let tensor = |name: &str| Tensor::find(&file, &format!("{PREFIX}.{name}"));
        let (input, up) = (tensor("input")?, tensor("up.weight")?);
        let (tokens, hidden) = input.matrix("tokens x hidden")?;
        let (inner, _) = up.matrix("inner x hidden")?;
        ensure!(
            tokens.min(hidden).min(inner) > 0,
            usage("the block", format!("{tokens} x {hidden}, inner {inner}"), "at least 1 each")
        );
        let dtype = up.dtype()?;
        Ok(Block {
            input: input.values((tokens, hidden))?,
            up: up.values((inner, hidden))?,
            up_bias: tensor("up.bias")?.row(inner)?,
            down: tensor("down.weight")?.values((hidden, inner))?,
            down_bias: tensor("down.bias")?.row(hidden)?,
            output: tensor("output")?.values((tokens, hidden))?,
            dtype,
        })
    }
}

/// Reads the file at `path`. Pipes, devices and other special files are refused, because reading
/// them may never end.
fn contents(path: &Path) -> Result<Vec<u8>> {
    let expected = format!("a readable file of at most {} MiB", MOST >> 20);
    let refused = |found: &dyn Display| usage(named(path), found, &expected);
    let nonblocking = OFlags::NONBLOCK.bits() as i32;
    // Opens without blocking, because opening a pipe would otherwise wait for a writer.
    let file = OpenOptions::new().read(true).custom_flags(nonblocking).open(path);
    let file = file.map_err(|error| refused(&error))?;
    let metadata = file.metadata().map_err(|error| refused(&error))?;
    let kind = metadata.file_type();
    let special = [
        (kind.is_dir(), "a folder"),
        (kind.is_fifo(), "a pipe"),
        (!kind.is_file(), "a device or a socket"),
    ];
    if let Some((_, what)) = special.into_iter().find(|(is, _)| *is) {
        return Err(refused(&what));
    }
    let mut bytes = Vec::new();
    file.take(MOST + 1).read_to_end(&mut bytes).map_err(|error| refused(&error))?;
    if bytes.len() as u64 > MOST {
        return Err(refused(&format!("{} MiB", metadata.len() >> 20)));
    }
    Ok(bytes)
}

fn named(path: &Path) -> String {
    format!("weights {}", path.display())
}

struct Tensor<'a> {
    name: String,
    view: safetensors::tensor::TensorView<'a>,
}

impl<'a> Tensor<'a> {
    fn find(file: &SafeTensors<'a>, name: &str) -> Result<Tensor<'a>> {
        let view = file.tensor(name).map_err(|_| {
            let mut names = file.names();
            names.sort_unstable();
            usage(format!("tensor {name}"), "missing", format!("one of {}", names.join(", ")))
        })?;
        Ok(Tensor { name: name.into(), view })
    }

    fn dtype(&self) -> Result<DType> {
        let name = format!("{:?}", self.view.dtype()).to_lowercase();
        let known = name.parse().ok().filter(|&it| has_role(it, Role::Factor));
        known.ok_or_else(|| {
            usage(format!("element type of {}", self.name), name, Role::Factor.names())
        })
    }

    fn wrong_shape(&self, expected: impl std::fmt::Display) -> anyhow::Error {
        let shape = format!("{:?}", self.view.shape());
        usage(format!("shape of {}", self.name), shape, expected)
    }

    /// Rows and columns of the tensor, which must have two dimensions; `meaning` tells in the error
    /// what the two dimensions are.
    fn matrix(&self, meaning: &str) -> Result<(usize, usize)> {
        match *self.view.shape() {
            [rows, cols] => Ok((rows, cols)),
            _ => Err(self.wrong_shape(format!("two dimensions, {meaning}"))),
        }
    }

    fn values(&self, (rows, cols): (usize, usize)) -> Result<Dense> {
        if self.view.shape() != [rows, cols] {
            return Err(self.wrong_shape(format!("[{rows}, {cols}]")));
        }
        self.dense(rows, cols)
    }

    fn row(&self, cols: usize) -> Result<Dense> {
        if self.view.shape() != [cols] {
            return Err(self.wrong_shape(format!("[{cols}]")));
        }
        self.dense(1, cols)
    }

    fn dense(&self, rows: usize, cols: usize) -> Result<Dense> {
        let data = matrix::values(self.dtype()?, self.view.data())?;
        Ok(Dense { rows, cols, data })
    }
}

#[cfg(test)]
mod tests {
    use safetensors::Dtype;

    use super::*;

    #[test]
    fn the_embedded_block_is_what_it_says() {
        let block = Block::read(None).unwrap();
        assert_eq!((block.input.rows, block.input.cols), (107, 384));
        assert_eq!((block.up.rows, block.up.cols, block.dtype), (1536, 384, DType::F16));
        assert_eq!((block.down.rows, block.down_bias.cols), (384, 384));
    }

    #[test]
    fn faults_of_a_file_are_named() {
        let says = |bytes: &[u8]| {
            let error = Block::parse(bytes).unwrap_err();
            assert_eq!(crate::errors::code(&error), 2);
            format!("{error:#}")
        };
        for cut in [0, 4, 100, EMBEDDED.len() / 2, EMBEDDED.len() - 1] {
            let e = says(&EMBEDDED[..cut]);
            assert!(
                e.contains("no safetensors file") && e.contains(&format!("{cut} bytes")),
                "{e}"
            );
        }
        let whole = SafeTensors::deserialize(EMBEDDED).unwrap();
        let others = whole.tensors().into_iter().filter(|(name, _)| name != "ffn.input");
        let e = says(&safetensors::serialize(others, None).unwrap());
        assert!(e.contains("ffn.input is missing") && e.contains("ffn.output"), "{e}");
        let with = |name: &str, dtype: Dtype, shape: Vec<usize>| {
            let whole = SafeTensors::deserialize(EMBEDDED).unwrap();
            let bytes = vec![0; shape.iter().product::<usize>() * dtype.bitsize() / 8];
            let mut tensors = whole.tensors();
            let odd = safetensors::tensor::TensorView::new(dtype, shape, &bytes).unwrap();
            tensors.iter_mut().find(|(known, _)| known == name).unwrap().1 = odd;
            safetensors::serialize(tensors, None).unwrap()
        };
        let e = says(&with("ffn.down.weight", Dtype::I64, vec![384, 1536]));
        assert!(e.contains("ffn.down.weight is i64: expected f32, f16 or bf16"), "{e}");
        let e = says(&with("ffn.down.weight", Dtype::F16, vec![1536, 384]));
        assert!(e.contains("[1536, 384]: expected [384, 1536]"), "{e}");
        let e = says(&with("ffn.up.bias", Dtype::F32, vec![1535]));
        assert!(e.contains("ffn.up.bias is [1535]: expected [1536]"), "{e}");
        let e = says(&with("ffn.input", Dtype::F32, vec![41088]));
        assert!(e.contains("two dimensions"), "{e}");
    }
}
