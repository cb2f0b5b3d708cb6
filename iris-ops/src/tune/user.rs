//! Tuning file of this machine, which `iris tune` writes.
//!
//! **Problem.** Built-in tuning data was measured on machines other than the user's, and for other
//! shapes.
//!
//! **Solution.** `iris tune` writes a [`TuningFile`] into the user's cache folder, named by device,
//! driver and number of ranks. Plans read this file, once per process. Its machine parameters
//! replace the built-in ones, and its rows come before the built-in rows. Ranks compare path and
//! digest of the file when a heap is opened and when an operator is made.
//!
//! **Limits.** A device that was made from a name, not from a driver or a heap, uses built-in data.

use std::collections::HashMap;
use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use iris_heap::{fnv, read_file};
use iris_kernels::VendorBits;
use iris_kernels::cache::Cache;
use serde::{Deserialize, Serialize};

use super::data::{Row, Tuning};
use crate::cost::CostParameters;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::topology::Topology;

/// Version of the format of tuning files, which changes with the parameters of [`CostParameters`];
/// other versions are refused.
const VERSION: u32 = 2;

/// Tuning file: measurements of this machine, with the device, driver and number of ranks for which
/// they hold.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TuningFile {
    version: u32,
    device: String,
    driver: u32,
    world: usize,
    /// Parameters for predicting times; `None` to use the built-in parameters.
    pub machine: Option<CostParameters>,
    #[serde(default)]
    row: Vec<Row>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    vendor_bits: Vec<VendorBits>,
}

/// Advice about a tuning file that cannot be used.
const REMEDY: &str = "`iris tune` replaces it; without IRIS_TUNING each device and number of ranks has a file of its own, \
                      and IRIS_TUNING=off uses none";

/// Version of a tuning file, without the other fields.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

impl TuningFile {
    /// Reads the file for these ranks; returns an empty one if there is no file.
    ///
    /// # Errors
    /// [`Error::Tuning`] if the file cannot be read or was measured on another device or driver, or
    /// with another number of ranks.
    pub fn of(ranks: Topology) -> Result<TuningFile> {
        let path = path(ranks);
        match path.as_deref().map(read).transpose()?.flatten() {
            Some((file, _)) => file.checked(ranks, path.as_deref()),
            None => Ok(Self::empty(ranks)),
        }
    }

    /// Reads the file at `path`, for any device and number of ranks; `None` if there is no such
    /// file.
    ///
    /// # Errors
    /// [`Error::Tuning`] if the file cannot be read.
    pub fn at(path: &Path) -> Result<Option<TuningFile>> {
        Ok(read(path)?.map(|(file, _)| file))
    }

    /// Whether the measurements hold for these ranks: for their device, driver and number.
    pub fn holds_for(&self, ranks: Topology) -> bool {
        self.measured_on() == of_ranks(ranks)
    }

    fn measured_on(&self) -> Measured {
        Measured { world: self.world, device: self.device.clone(), driver: self.driver }
    }

    /// Makes a file for these ranks that contains no measurements.
    pub fn empty(ranks: Topology) -> TuningFile {
        Self {
            version: VERSION,
            device: device(ranks.device),
            driver: ranks.device.driver,
            world: ranks.size,
            machine: None,
            row: Vec::new(),
            vendor_bits: Vec::new(),
        }
    }

    /// Path of the tuning file for these ranks, which may not exist; `None` if no file belongs to
    /// these ranks.
    pub fn path(ranks: Topology) -> Option<PathBuf> {
        path(ranks)
    }

    /// Adds rows in the format that `iris tune --cases` prints. They replace rows for the same
    /// calls. Returns the number of rows added.
    ///
    /// # Errors
    /// [`Error::Tuning`] if the text is not valid.
    pub fn add_rows(&mut self, text: &str) -> Result<usize> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Rows {
            #[serde(default)]
            row: Vec<Row>,
        }
        let wrong =
            |why: toml::de::Error| Error::Tuning { path: "rows".into(), why: why.to_string() };
        let Rows { row } = toml::from_str(text).map_err(wrong)?;
        let count = row.len();
        self.row.retain(|old| row.iter().all(|new| !new.is_for_calls_of(old)));
        self.row.extend(row);
        Ok(count)
    }

    /// Adds what was found of the bits of the vendor's products; it replaces what the file says of
    /// the same products.
    pub fn add_vendor_bits(&mut self, found: VendorBits) {
        let older = std::mem::take(&mut self.vendor_bits).into_iter();
        self.vendor_bits = older.map(|row| row.without(&found)).collect();
        self.vendor_bits.push(found);
        self.vendor_bits.retain(|row| !(row.shapes.is_empty() && row.other.is_empty()));
    }

    /// Writes the file to the path from which plans for these ranks read it, readable by this user
    /// only (mode 0600). Returns the path. Running programs keep the data that they have read.
    ///
    /// # Errors
    /// [`Error::Tuning`] if the file cannot be written, if `IRIS_TUNING` is `off`, or if the ranks'
    /// device was made from a name.
    pub fn save(&self, ranks: Topology) -> Result<PathBuf> {
        let text = toml::to_string(self).map_err(|error| Error::Tuning {
            path: path(ranks).unwrap_or_default(),
            why: format!("cannot be written: {error}"),
        })?;
        write(ranks, &text, |part, path| fs::rename(part, path))
    }

    /// Checks that [`TuningFile::save`] can write the file, without a change to it. Returns its
    /// path.
    ///
    /// # Errors
    /// Errors of [`TuningFile::save`].
    pub fn check_place(ranks: Topology) -> Result<PathBuf> {
        write(ranks, "", |part, _| fs::remove_file(part))
    }

    fn checked(self, ranks: Topology, path: Option<&Path>) -> Result<Self> {
        if self.holds_for(ranks) {
            return Ok(self);
        }
        Err(Error::Tuning {
            path: path.unwrap_or(Path::new("")).into(),
            why: format!("is of {self}: expected {}; {REMEDY}", of_ranks(ranks)),
        })
    }
}

/// Name of a device in tuning files. For a host, it contains the number of cores.
fn device(device: Device) -> String {
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    match device.multiprocessors {
        0 => format!("{} with {} cores", device.name, cores()),
        _ => device.name.into(),
    }
}

/// Ranks, device and driver for which a tuning file holds.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Measured {
    world: usize,
    device: String,
    driver: u32,
}

fn of_ranks(ranks: Topology) -> Measured {
    let device = device(ranks.device);
    Measured { world: ranks.size, device, driver: ranks.device.driver }
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ranks on {}", self.world, self.device)?;
        match self.driver {
            0 => Ok(()),
            driver => write!(f, " with driver {driver}"),
        }
    }
}

impl fmt::Display for TuningFile {
    /// Formats the setup for which the measurements are valid, as in
    /// `4 ranks on NVIDIA H200 with driver 13000`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.measured_on().fmt(f)
    }
}

/// Whether the environment variable `IRIS_TUNING` is set and not empty.
fn is_set() -> bool {
    std::env::var_os("IRIS_TUNING").is_some_and(|value| !value.is_empty())
}

/// Path of the tuning file for these ranks. `None` if these ranks have no file: for a device made
/// from a name, for a single rank, or with `IRIS_TUNING=off`.
fn path(ranks: Topology) -> Option<PathBuf> {
    let is_of_machine = ranks.device.driver > 0 || ranks.device.multiprocessors == 0;
    if !is_of_machine || ranks.size < 2 {
        return None;
    }
    match std::env::var_os("IRIS_TUNING").filter(|value| !value.is_empty()) {
        Some(file) if file == "off" => None,
        Some(file) => Some(PathBuf::from(file)),
        None => {
            let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
            let device: String = device(ranks.device).chars().map(plain).collect();
            // The name contains the version of the file format, so a file of another version of
            // iris is not found and causes no error.
            let driver = ranks.device.driver;
            let name = format!("tuning{VERSION}-{device}-{driver}-{}.toml", ranks.size);
            Some(Cache::user_folder().join(name))
        }
    }
}

/// Writes `text` to a temporary file beside the tuning file for these ranks, and passes the paths of
/// both to `finish`. Returns the path of the tuning file.
fn write(
    ranks: Topology,
    text: &str,
    finish: impl FnOnce(&Path, &Path) -> std::io::Result<()>,
) -> Result<PathBuf> {
    let off = || Error::Tuning {
        path: "off".into(),
        why: "(IRIS_TUNING) is no file: expected the path of one, or no such variable".into(),
    };
    let path = path(ranks).ok_or_else(off)?;
    let wrong = |why: &dyn std::fmt::Display| Error::Tuning {
        path: path.clone(),
        why: format!("cannot be written: {why}"),
    };
    if !is_set() {
        Cache::of_user().map_err(|error| wrong(&error))?;
    }
    let part = path.with_extension(format!("{}.part", std::process::id()));
    let mut options = OpenOptions::new();
    let options = options.write(true).create_new(true).mode(0o600);
    let written = options
        .open(&part)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .and_then(|()| finish(&part, &path));
    if let Err(error) = written {
        let _ = fs::remove_file(&part);
        return Err(wrong(&error));
    }
    Ok(path)
}

/// Whether `error`, from reading `path`, means that there is no file. At a default path this
/// includes errors from a folder that this user may not enter, such as a folder in another user's
/// HOME, and from a name that is too long.
fn has_no_file(path: &Path, error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{InvalidFilename, NotADirectory, NotFound, PermissionDenied};
    match error.kind() {
        NotFound | NotADirectory => true,
        PermissionDenied | InvalidFilename => {
            let is_default = !is_set() && std::env::var_os("IRIS_CACHE").is_none();
            is_default && fs::symlink_metadata(path).is_err()
        }
        _ => false,
    }
}

/// Reads a tuning file; returns its content and a digest of its text, or `None` if there is no
/// file.
fn read(path: &Path) -> Result<Option<(TuningFile, u128)>> {
    let wrong = |why: String| Error::Tuning { path: path.into(), why };
    let text = match read_file(path) {
        Ok(text) => text,
        Err(error) if has_no_file(path, &error) => return Ok(None),
        Err(error) => return Err(wrong(format!("cannot be read: {error}; {REMEDY}"))),
    };
    // The version comes first, because a file of another version has other parameters.
    let other = toml::from_str(&text).ok().filter(|it: &Version| it.version != VERSION);
    if let Some(Version { version }) = other {
        return Err(wrong(format!("has version {version}: expected {VERSION}; {REMEDY}")));
    }
    let wrong_format = "is not in the format of `iris tune`";
    let file: TuningFile = toml::from_str(&text)
        .map_err(|error| wrong(format!("{wrong_format}; {REMEDY}: {error}")))?;
    let checked = file.machine.map_or(Ok(()), |machine| machine.check());
    checked.map_err(|why| wrong(format!("has a wrong value: {why}; {REMEDY}")))?;
    Ok(Some((file, fnv(&[text.as_bytes()]))))
}

/// Returns the ranks with their tuning data: from this machine's file if there is one, otherwise
/// the built-in data.
pub(crate) fn tuned(ranks: Topology) -> Result<Topology> {
    /// Tuning data of each file by the file's path and the ranks, read once per process. The data
    /// is never freed, because plans refer to it.
    static FILES: Mutex<Option<HashMap<Key, Option<&'static Tuning>>>> = Mutex::new(None);
    type Key = (PathBuf, Measured);
    if ranks.tuning.is_some() {
        return Ok(ranks);
    }
    let built_in = Tuning::of(ranks.device);
    let Some(path) = path(ranks) else { return Ok(ranks.with(built_in)) };
    let mut files = FILES.lock().unwrap_or_else(PoisonError::into_inner);
    let files = files.get_or_insert_default();
    let key = (path, of_ranks(ranks));
    let path = &key.0;
    let known = match files.get(&key) {
        Some(known) => *known,
        None => {
            let found = read(path)?;
            if found.is_none() && is_set() {
                let why = "is not there: expected a file of `iris tune`, or IRIS_TUNING=off".into();
                return Err(Error::Tuning { path: path.clone(), why });
            }
            let found = found.map(|(file, digest)| {
                let file = file.checked(ranks, Some(path))?;
                let of = format!("{} ({digest:016x})", path.display());
                let tuning = built_in.with_file(of, file.machine, file.row, file.vendor_bits);
                Ok::<_, Error>(&*Box::leak(Box::new(tuning)))
            });
            let found = found.transpose()?;
            files.insert(key, found);
            found
        }
    };
    Ok(ranks.with(known.unwrap_or(built_in)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_of_a_file_are_checked() {
        let path = std::env::temp_dir().join(format!("iris_parameters_{}", std::process::id()));
        let ranks = Topology::new(0, 2);
        let read_with = |name: &str, value: &str| {
            let machine = Tuning::of(Device::host()).machine;
            let text =
                toml::to_string(&TuningFile { machine: Some(machine), ..TuningFile::empty(ranks) });
            let text = text.unwrap();
            let line = text.lines().find(|line| line.starts_with(&format!("{name} ="))).unwrap();
            fs::write(&path, text.replace(line, &format!("{name} = {value}"))).unwrap();
            TuningFile::at(&path).map(|_| ()).map_err(|error| error.to_string())
        };
        for (name, value, expected) in [
            ("link_bytes_per_us", "0.0", "is 0, expected a number above 0"),
            ("tile_core", "nan", "is NaN, expected a number above 0"),
            ("gemm_us", "-1.0", "is -1, expected a number of at least 0"),
            ("ll_us", "inf", "is inf, expected a number of at least 0"),
        ] {
            let error = read_with(name, value).unwrap_err();
            assert!(error.contains(&format!("machine.{name} {expected}")), "{error}");
        }
        read_with("overlap_us", "0.0").unwrap();
        fs::remove_file(&path).unwrap();
    }

    /// Tests that products that are compared again replace what the file and the built-in data said of
    /// them, and of no others.
    #[test]
    fn products_that_are_compared_again_are_replaced() {
        let of = |dtype, shapes: &[[usize; 2]], other: &[[usize; 2]]| VendorBits {
            library: "cuBLASLt 13.1.0".into(),
            device: "NVIDIA H200 sm_90".into(),
            dtype,
            rows: 8192,
            shapes: shapes.into(),
            other: other.into(),
            provenance: "a test".into(),
        };
        let [bf16, f16] = [iris_heap::DType::BF16, iris_heap::DType::F16];
        let mut file = TuningFile::empty(Topology::new(0, 2));
        file.add_vendor_bits(of(bf16, &[[8, 8], [8, 16]], &[]));
        file.add_vendor_bits(of(f16, &[[8, 8]], &[]));
        file.add_vendor_bits(of(bf16, &[[16, 8]], &[[8, 8]]));
        let expected =
            [of(bf16, &[[8, 16]], &[]), of(f16, &[[8, 8]], &[]), of(bf16, &[[16, 8]], &[[8, 8]])];
        assert_eq!(file.vendor_bits, expected);
        let text = toml::to_string(&file).unwrap();
        assert_eq!(toml::from_str::<TuningFile>(&text).unwrap().vendor_bits, file.vendor_bits);
        // A built-in product that has other bits on this machine.
        let built_in = Tuning::of(Device::named("h200").unwrap());
        let known = |tuning: &Tuning, shape: [usize; 2]| {
            tuning.vendor_bits.iter().any(|row| row.dtype == f16 && row.shapes.contains(&shape))
        };
        let shapes = [[8192, 3584], [7168, 8192]];
        let own = vec![of(f16, &[], &shapes[..1])];
        let merged = built_in.with_file("a file".into(), None, Vec::new(), own);
        assert_eq!(shapes.map(|shape| known(built_in, shape)), [true; 2]);
        assert_eq!(shapes.map(|shape| known(&merged, shape)), [false, true]);
    }

    /// Tests that a tuning file that an earlier commit wrote can be read, and that written files
    /// still have the same keys.
    #[test]
    fn keys_of_files_stay() {
        let old: toml::Table = include_str!("version_2.toml").parse().unwrap();
        let file: TuningFile = old.clone().try_into().unwrap();
        assert!(file.row[0].uniform_shape && file.row[0].columns);
        assert_eq!(toml::Table::try_from(&file).unwrap(), old);
    }
}
