//! Even split of rows or columns over ranks.

use std::ops::Range;

/// Range of part number `part` when `total` items are split into `parts` contiguous parts, as
/// evenly as possible. The first `total % parts` parts have one item more. If there are fewer items
/// than parts, the last parts are empty.
///
/// # Panics
/// If `parts` is 0.
pub fn split(total: usize, parts: usize, part: usize) -> Range<usize> {
    let (each, more) = (total / parts, total % parts);
    let start = part * each + part.min(more);
    start..start + each + usize::from(part < more)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_those_of_the_kernels() {
        for (total, parts) in [(107, 4), (4, 2), (3, 8), (0, 3), (1, 1), (1000, 7), (u32::MAX, 64)]
        {
            for part in 0..parts {
                let Range { start, end } = iris_kernels::schedule::split(total, parts, part);
                let [total, parts, part] = [total, parts, part].map(|it| it as usize);
                assert_eq!(split(total, parts, part), start as usize..end as usize);
            }
        }
    }
}
