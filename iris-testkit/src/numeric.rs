//! Measure of error: every element's error is compared with a bound for that element, and the
//! errors of the whole matrix by their Frobenius norm.
//!
//! A NaN never passes, whatever the bound. Outputs are filled with NaN before each call, so an
//! element that was not written is found.

use iris_heap::{DType, Element};
use iris_kernels::dtype::{Rounding, row};
use iris_kernels::with_type;

/// Allowed deviation of a result from the expected one.
#[derive(Clone, Copy, Debug)]
pub enum Allowed<'a> {
    /// Equal values; +0 and -0 are equal.
    Exact,
    /// Bounds of rounding errors. The error of each element must be at most its bound. The
    /// Frobenius norm of all errors must be at most the norm of `typical`, which is smaller than
    /// the norm of the bounds, because errors of different sign cancel.
    Within {
        /// Largest possible rounding error of each element.
        bound: &'a [f64],
        /// Expected error of each element if rounding errors are random and partly cancel.
        typical: &'a [f64],
    },
}

/// Measured deviation of an accepted result from the expected result.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Measured {
    /// Frobenius norm of the errors divided by the Frobenius norm of the expected matrix; see
    /// [`relative`].
    pub relative: f64,
    /// Largest ratio of an element's error to its bound; 0 for [`Allowed::Exact`].
    pub worst: f64,
}

/// Reason why a result is refused in a comparison.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refused {
    /// Some elements exceed their bounds; the fields describe the first such element.
    #[error(
        "{what}: element ({row}, {col}) of {rows} x {cols} is {seen}, expected {wanted} within \
         {allowed:e}; {count} elements are wrong"
    )]
    Element {
        /// Name of the matrix that was compared.
        what: String,
        /// Row of the first wrong element.
        row: usize,
        /// Column of the first wrong element.
        col: usize,
        /// Number of rows of the matrix.
        rows: usize,
        /// Number of columns of the matrix.
        cols: usize,
        /// Value of the first wrong element.
        seen: f64,
        /// Expected value of that element.
        wanted: f64,
        /// Allowed absolute error of that element.
        allowed: f64,
        /// Number of wrong elements of the matrix.
        count: usize,
    },
    /// Every element is within its bound, but the Frobenius norm of all errors is too large.
    #[error("{what}: Frobenius norm of the errors is {norm:e}, allowed {allowed:e}")]
    Norm {
        /// Name of the matrix that was compared.
        what: String,
        /// Frobenius norm of the measured errors.
        norm: f64,
        /// Frobenius norm of the typical errors.
        allowed: f64,
    },
    /// The result has the wrong number of elements.
    #[error("{what}: {seen} elements, expected {rows} x {cols}")]
    Length {
        /// Name of the matrix that was compared.
        what: String,
        /// Number of elements of the result.
        seen: usize,
        /// Number of rows that was expected.
        rows: usize,
        /// Number of columns that was expected.
        cols: usize,
    },
}

/// Compares `seen` with `wanted`, both `rows` x `cols`, row-major; returns the measured errors.
///
/// # Errors
/// [`Refused`], with the coordinates of the first wrong element.
pub fn compare(
    what: &str,
    (rows, cols): (usize, usize),
    seen: &[f64],
    wanted: &[f64],
    allowed: Allowed<'_>,
) -> Result<Measured, Refused> {
    if seen.len() != rows * cols || wanted.len() != rows * cols {
        let seen = if seen.len() == rows * cols { wanted.len() } else { seen.len() };
        return Err(Refused::Length { what: what.into(), seen, rows, cols });
    }
    let limit = |at: usize| match allowed {
        Allowed::Exact => 0.0,
        Allowed::Within { bound, .. } => bound[at],
    };
    // Equal values are tested first, because the difference of two equal infinities is NaN.
    let error =
        |at: usize| if seen[at] == wanted[at] { 0.0 } else { (seen[at] - wanted[at]).abs() };
    let right = |at: usize| error(at) <= limit(at);
    if let Some(first) = (0..seen.len()).find(|&at| !right(at)) {
        return Err(Refused::Element {
            what: what.into(),
            row: first / cols,
            col: first % cols,
            rows,
            cols,
            seen: seen[first],
            wanted: wanted[first],
            allowed: limit(first),
            count: (first..seen.len()).filter(|&at| !right(at)).count(),
        });
    }
    let norm = frobenius((0..seen.len()).map(error));
    if let Allowed::Within { typical, .. } = allowed {
        let allowed = frobenius(typical.iter().copied());
        if norm > allowed {
            return Err(Refused::Norm { what: what.into(), norm, allowed });
        }
    }
    let ratio = |at: usize| if error(at) == 0.0 { 0.0 } else { error(at) / limit(at) };
    let relative = relative(norm, frobenius(wanted.iter().copied()));
    Ok(Measured { relative, worst: (0..seen.len()).map(ratio).fold(0.0, f64::max) })
}

/// Relative error: `errors` divided by `wanted`, both Frobenius norms. Returns `errors` itself if
/// `wanted` is 0, because the quotient would be infinite or NaN.
pub fn relative(errors: f64, wanted: f64) -> f64 {
    if wanted == 0.0 { errors } else { errors / wanted }
}

/// Frobenius norm: the root of the sum of squares.
pub fn frobenius(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|value| value * value).sum::<f64>().sqrt()
}

fn rounding(dtype: DType) -> Rounding {
    let rounding = row(dtype).and_then(|row| row.rounding);
    rounding.unwrap_or_else(|| panic!("kernels do not compute with {dtype}"))
}

/// Unit roundoff of the type: the largest relative error of one rounding, half the distance from 1
/// to the next value.
///
/// # Panics
/// If kernels do not compute with `dtype`.
pub fn unit_roundoff(dtype: DType) -> f64 {
    rounding(dtype).unit
}

/// Largest absolute error of one rounding near zero: half the smallest positive value of the type.
///
/// # Panics
/// If kernels do not compute with `dtype`.
pub fn underflow(dtype: DType) -> f64 {
    rounding(dtype).underflow
}

/// Rounds to the nearest value of the type, ties to even.
///
/// # Panics
/// If kernels do not compute with `dtype`.
pub fn rounded(dtype: DType, value: f64) -> f64 {
    with_type!(dtype, T => T::from_f64(value).to_f64(), panic!("no values of {dtype}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: [f64; 2] = [1e-3; 2];

    fn within(seen: &[f64], wanted: &[f64]) -> Result<Measured, Refused> {
        compare("c", (1, 2), seen, wanted, Allowed::Within { bound: &TWO, typical: &TWO })
    }

    #[test]
    fn names_the_first_bad_element() {
        let wanted = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let mut seen = wanted;
        (seen[4], seen[5]) = (5.5, 7.0);
        let e = compare("c", (2, 3), &seen, &wanted, Allowed::Exact).unwrap_err();
        let Refused::Element { row: 1, col: 1, count: 2, .. } = e else { panic!("{e}") };
        assert!(e.to_string().contains("(1, 1) of 2 x 3 is 5.5, expected 5"), "{e}");
    }

    #[test]
    fn not_a_number_never_passes() {
        assert!(within(&[1.0, f64::NAN], &[1.0, 1.0]).is_err());
        assert!(within(&[1.0, f64::NAN], &[1.0, f64::NAN]).is_err());
        assert!(compare("c", (1, 1), &[f64::NAN], &[f64::NAN], Allowed::Exact).is_err());
        let bound = [f64::INFINITY];
        let allowed = Allowed::Within { bound: &bound, typical: &bound };
        assert!(compare("c", (1, 1), &[f64::NAN], &[1.0], allowed).is_err());
    }

    #[test]
    fn what_is_zero_everywhere_has_an_absolute_error() {
        let measured = within(&[0.0, 0.0], &[0.0, -0.0]).unwrap();
        assert_eq!((measured.relative, measured.worst), (0.0, 0.0));
        let measured = within(&[0.0, 3e-4], &[0.0, 0.0]).unwrap();
        assert_eq!(measured.relative, 3e-4);
        assert_eq!(relative(6.0, 2.0), 3.0);
        assert!(relative(f64::NAN, 0.0).is_nan());
    }

    #[test]
    fn each_element_has_its_own_bound() {
        let measured = within(&[1.0005, 1.0], &[1.0, 1.0]).unwrap();
        assert!((measured.worst - 0.5).abs() < 1e-6, "{measured:?}");
        assert!(within(&[1.0, 1.0011], &[1.0, 1.0]).is_err());
        assert!(within(&[1.0], &[1.0, 1.0]).is_err());
    }

    #[test]
    fn errors_that_all_point_one_way_are_refused_by_the_norm() {
        let (bound, typical) = ([1e-2; 4], [1e-3; 4]);
        let allowed = Allowed::Within { bound: &bound, typical: &typical };
        let e = compare("c", (2, 2), &[1.005; 4], &[1.0; 4], allowed).unwrap_err();
        assert!(matches!(e, Refused::Norm { .. }), "{e}");
    }

    #[test]
    fn roundoffs_are_those_of_the_types() {
        for (dtype, bits) in [(DType::F32, 24), (DType::F16, 11), (DType::BF16, 8)] {
            let unit = unit_roundoff(dtype);
            assert_eq!(unit, 0.5f64.powi(bits));
            assert_eq!(rounded(dtype, 1.0 + unit), 1.0, "ties go to even");
            assert_eq!(rounded(dtype, 1.0 + 1.01 * unit), 1.0 + 2.0 * unit);
        }
    }
}
