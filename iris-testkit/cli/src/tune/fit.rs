//! Fit of a machine's parameters to measured calls.
//!
//! Least squares over the logarithms of predicted divided by measured times, by damped Gauss-Newton
//! steps (Levenberg-Marquardt). Beyond [`LARGE`] the loss grows linearly, so that single rows do
//! not dominate. A weak prior keeps parameters that the rows do not determine at their start.

use iris_ops::CostParameters;

use super::measured::Measured;

/// Relative error beyond which the loss of a row grows linearly instead of quadratically.
const LARGE: f64 = 0.05;
/// Weight, in the loss, of a parameter's distance from its start value. The distance is a
/// difference of logarithms.
const PRIOR: f64 = 0.03;
/// Weight, in the loss, of products that run in the tile loop of the fused kernels (tile core). A
/// single rate describes the times of these products badly.
const TILE_CORE: f64 = 0.3;
const STEPS: usize = 40;

/// Returns the machine parameters that predict the times of these rows best; the search starts from
/// `start`.
pub(crate) fn fitted(rows: &[&Measured], start: &CostParameters) -> CostParameters {
    // The fit changes the logarithms of parameters. A parameter of 0 has no logarithm, so it stays
    // 0.
    let values = start.values();
    let free: Vec<usize> = (0..values.len()).filter(|&at| values[at] > 0.0).collect();
    let machine = |logs: &[f64]| {
        let mut values = values.clone();
        for (&at, log) in free.iter().zip(logs) {
            values[at] = log.exp();
        }
        CostParameters::of_values(&values)
    };
    let first: Vec<f64> = free.iter().map(|&at| values[at].ln()).collect();
    let residuals = |logs: &[f64]| -> Vec<f64> {
        let machine = machine(logs);
        let rows = rows.iter().filter_map(|row| {
            let weight = if row.is_tile_core() { TILE_CORE } else { 1.0 };
            row.predicted(&machine).map(|us| weight * (us / row.us).ln())
        });
        rows.chain(logs.iter().zip(&first).map(|(log, first)| PRIOR * (log - first))).collect()
    };
    let loss = |residuals: &[f64]| {
        let large = residuals.iter().map(|it| (1.0 + (it / LARGE).powi(2)).sqrt() - 1.0);
        large.sum::<f64>()
    };
    let (mut logs, mut damping) = (first.clone(), 1e-2);
    let mut now = residuals(&logs);
    for _ in 0..STEPS {
        let slopes: Vec<Vec<f64>> = (0..logs.len())
            .map(|at| {
                const APART: f64 = 1e-4;
                let mut moved = logs.clone();
                moved[at] += APART;
                let moved = residuals(&moved);
                moved.iter().zip(&now).map(|(moved, now)| (moved - now) / APART).collect()
            })
            .collect();
        // Weights that turn a sum of squared errors into the loss, which is linear for large
        // errors.
        let weights: Vec<f64> =
            now.iter().map(|it| (1.0 + (it / LARGE).powi(2)).sqrt().recip()).collect();
        let product = |a: &[f64], b: &[f64]| -> f64 {
            a.iter().zip(b).zip(&weights).map(|((a, b), weight)| a * b * weight).sum()
        };
        let gradient: Vec<f64> = slopes.iter().map(|slope| -product(slope, &now)).collect();
        let mut better = None;
        while better.is_none() && damping < 1e6 {
            let mut matrix: Vec<Vec<f64>> =
                slopes.iter().map(|a| slopes.iter().map(|b| product(a, b)).collect()).collect();
            for (at, row) in matrix.iter_mut().enumerate() {
                row[at] += damping * row[at] + 1e-9;
            }
            let step = solved(matrix, gradient.clone());
            let moved: Vec<f64> = logs.iter().zip(&step).map(|(log, step)| log + step).collect();
            let then = residuals(&moved);
            if loss(&then) < loss(&now) {
                better = Some((moved, then));
                damping /= 3.0;
            } else {
                damping *= 4.0;
            }
        }
        let Some((moved, then)) = better else { break };
        let gained = loss(&now) - loss(&then);
        let enough = gained < 1e-6 * loss(&now);
        (logs, now) = (moved, then);
        if enough {
            break;
        }
    }
    machine(&logs)
}

/// Solves a system of linear equations by elimination with pivots.
fn solved(mut matrix: Vec<Vec<f64>>, mut right: Vec<f64>) -> Vec<f64> {
    let size = right.len();
    for at in 0..size {
        let largest = (at..size)
            .max_by(|&a, &b| matrix[a][at].abs().total_cmp(&matrix[b][at].abs()))
            .unwrap_or(at);
        matrix.swap(at, largest);
        right.swap(at, largest);
        let (pivots, below) = matrix.split_at_mut(at + 1);
        let pivot = &pivots[at];
        for (row, line) in below.iter_mut().enumerate() {
            let times = line[at] / pivot[at];
            for (value, above) in line.iter_mut().zip(pivot).skip(at) {
                *value -= times * above;
            }
            right[at + 1 + row] -= times * right[at];
        }
    }
    for at in (0..size).rev() {
        let known: f64 = (at + 1..size).map(|col| matrix[at][col] * right[col]).sum();
        right[at] = (right[at] - known) / matrix[at][at];
    }
    right
}

#[cfg(test)]
mod tests {
    use super::solved;

    #[test]
    fn equations_are_solved() {
        let matrix = vec![vec![0.0, 2.0, 1.0], vec![1.0, 1.0, 0.0], vec![3.0, 0.0, -1.0]];
        let found = solved(matrix, vec![7.0, 3.0, 0.0]);
        for (found, expected) in found.iter().zip([1.0, 2.0, 3.0]) {
            assert!((found - expected).abs() < 1e-12, "{found} {expected}");
        }
    }
}
