//! Charts of a record, as SVG: how fast each operator is beside the vendor's libraries, over its sizes.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use super::{Line, Subject, baselines, message_bytes};
use crate::errors::usage;

/// Width and height, in pixels.
pub(crate) const SIZE: (u32, u32) = (960, 540);
/// Colours that people who see few of them can tell apart (Okabe and Ito).
pub(crate) const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
];

/// Fonts of titles and of all else.
pub(crate) const TITLE: (&str, u32) = ("sans-serif", 24);
pub(crate) const TEXT: (&str, u32) = ("sans-serif", 15);
/// Around a chart, in pixels.
pub(crate) const MARGIN: i32 = 18;

/// A line of a chart: its name, and points of size and speed. Speed is the libraries' time by ours:
/// above 1 we are faster.
#[derive(Clone, PartialEq, Debug)]
struct Series {
    name: String,
    of: Of,
    points: Vec<(f64, f64)>,
}

/// Whose speed it is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Of {
    Us,
    Torch,
    /// What cannot be passed.
    Limit,
}

/// The chart of an operator.
#[derive(Debug)]
struct Chart {
    op: String,
    by_bytes: bool,
    /// The libraries.
    beside: String,
    series: Vec<Series>,
}

/// Draws every operator that has points; returns the files.
pub(super) fn draw_all(lines: &[Line], folder: &Path) -> Result<Vec<PathBuf>> {
    let written = |error: std::io::Error| {
        usage(format!("folder {}", folder.display()), error, "one that can be written")
    };
    std::fs::create_dir_all(folder).map_err(written)?;
    let mut files = Vec::new();
    for chart in charts(lines) {
        let path = folder.join(format!("{}.svg", chart.op));
        let mut text = String::new();
        chart.draw(&mut text).map_err(|e| anyhow!("chart of {}: {e}", chart.op))?;
        std::fs::write(&path, text).map_err(written)?;
        files.push(path);
    }
    Ok(files)
}

/// Points of size and speed, by what the line is called and whose it is.
type Points = BTreeMap<(String, Of), Vec<(f64, f64)>>;

fn charts(lines: &[Line]) -> Vec<Chart> {
    let mut by_op: BTreeMap<&str, Points> = BTreeMap::new();
    for line in lines {
        let Some(base) = line.baseline_us else { continue };
        let subject = line.subject();
        let by_bytes = line.k == 0;
        let size = if by_bytes { message_bytes(&subject) } else { line.m };
        if size == 0 {
            continue;
        }
        let other = subject.other_type();
        let Subject { device, n, k, columns, .. } = subject;
        let columns = if columns { ", A by columns" } else { "" };
        let name = match by_bytes {
            true => device,
            false => format!("{device}, N {n}, K {k}{columns}{other}"),
        };
        let series = by_op.entry(&line.op).or_default();
        let mut add = |of: Of, us: f64| {
            let points = series.entry((name.clone(), of)).or_default();
            points.push((size as f64, base / us));
        };
        add(Of::Us, line.us);
        line.torch_us.into_iter().for_each(|us| add(Of::Torch, us));
        line.limit_us.into_iter().for_each(|us| add(Of::Limit, us));
    }
    let chart = |(op, series): (&str, Points)| {
        let series = series.into_iter().map(|((name, of), mut points)| {
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            Series { name, of, points }
        });
        let (by_bytes, beside) = (!op.contains("matmul"), baselines(lines));
        Chart { op: op.into(), by_bytes, beside, series: series.collect() }
    };
    by_op.into_iter().map(chart).collect()
}

impl Chart {
    /// Draws it into `text`.
    fn draw(&self, text: &mut String) -> Result<(), Box<dyn Error + '_>> {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let log = |size: f64| size.log2();
        let least = points().map(|point| log(point.0)).fold(f64::INFINITY, f64::min);
        let most = points().map(|point| log(point.0)).fold(0.0, f64::max);
        let top = points().map(|point| point.1).fold(1.2, f64::max) * 1.08;
        let root = SVGBackend::with_string(text, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let title = format!("{}: speed beside {}", self.op, self.beside);
        let mut chart = ChartBuilder::on(&root)
            .caption(title, TITLE)
            .margin(MARGIN)
            .x_label_area_size(48)
            .y_label_area_size(60)
            .build_cartesian_2d(least - 0.3..most.max(least + 1.0) + 0.3, 0.0..top)?;
        let size = |at: &f64| {
            let whole = (at - at.round()).abs() < 1e-6;
            let size = 2f64.powf(*at) as usize;
            match (whole, self.by_bytes) {
                (false, _) => String::new(),
                (true, true) => super::bytes(size),
                (true, false) => size.to_string(),
            }
        };
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .x_labels((most - least) as usize + 3)
            .x_label_formatter(&size)
            .y_label_formatter(&|speed| format!("{speed:.1}"))
            .x_desc(if self.by_bytes { "size of the message" } else { "M, rows of the whole" })
            .y_desc("times as fast")
            .label_style(TEXT)
            .draw()?;
        let (begin, end) = (least - 0.3, most.max(least + 1.0) + 0.3);
        chart
            .draw_series([PathElement::new([(begin, 1.0), (end, 1.0)], BLACK.stroke_width(2))])?
            .label(&*self.beside)
            .legend(|(x, y)| PathElement::new([(x, y), (x + 24, y)], BLACK.stroke_width(2)));
        let names: Vec<&str> = self.series.iter().map(|series| &*series.name).collect();
        for series in &self.series {
            // A limit has the colour of what it limits.
            let first = names.iter().position(|name| *name == series.name).unwrap_or_default();
            let which = names[..first].iter().collect::<std::collections::BTreeSet<_>>().len();
            let colour = COLOURS[which % COLOURS.len()];
            let at = series.points.iter().map(|&(size, speed)| (log(size), speed));
            let dashes = match series.of {
                Of::Us => None,
                Of::Torch => Some((2, "PyTorch")),
                Of::Limit => Some((8, "the limit")),
            };
            if let Some((dash, whose)) = dashes {
                chart
                    .draw_series(DashedLineSeries::new(at, dash, 5, colour.stroke_width(2)))?
                    .label(format!("{whose}: {}", series.name))
                    .legend(move |(x, y)| {
                        PathElement::new([(x, y), (x + dash, y)], colour.stroke_width(2))
                    });
            } else {
                chart
                    .draw_series(LineSeries::new(at, colour.stroke_width(3)).point_size(4))?
                    .label(series.name.clone())
                    .legend(move |(x, y)| {
                        PathElement::new([(x, y), (x + 24, y)], colour.stroke_width(3))
                    });
            }
        }
        chart
            .configure_series_labels()
            .background_style(WHITE.mix(0.85))
            .border_style(BLACK.mix(0.25))
            .label_font(TEXT)
            .position(SeriesLabelPosition::LowerRight)
            .draw()?;
        root.present()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::line;
    use super::*;

    #[test]
    fn a_chart_has_a_line_for_each_n_and_k_and_the_limit_of_it() {
        let product =
            |m, us, limit| Line { limit_us: limit, ..line("matmul_all_reduce", m, us, 20.0) };
        let lines = [product(64, 40.0, None), product(1, 10.0, Some(5.0))];
        let charts = charts(&lines);
        let [chart] = &charts[..] else { panic!("{charts:?}") };
        let name = "2 x X, N 4096, K 512".to_string();
        let ours = Series { name: name.clone(), of: Of::Us, points: vec![(1.0, 2.0), (64.0, 0.5)] };
        assert_eq!(chart.series, [ours, Series { name, of: Of::Limit, points: vec![(1.0, 4.0)] }]);
        let mut text = String::new();
        chart.draw(&mut text).unwrap();
        for word in
            ["<svg", "matmul_all_reduce: speed", "N 4096, K 512", "the limit: 2 x X", "</svg>"]
        {
            assert!(text.contains(word), "{word} in {text}");
        }
    }

    #[test]
    fn messages_are_drawn_by_their_bytes_and_barriers_not() {
        let lines = [line("all_reduce", 32, 10.0, 10.0), line("barrier", 0, 1.0, 2.0)];
        let charts = charts(&lines);
        assert_eq!((charts.len(), charts[0].series[0].points[0]), (1, (262_144.0, 1.0)));
    }
}
