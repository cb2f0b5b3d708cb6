//! Charts of a record, as SVG: one for each operator, with speed over size, and an overview with
//! one dot per measured shape. Each chart has a panel for each machine; labels stand beside the
//! axes, not inside them.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{Line, Subject, baselines, message_bytes};
use crate::errors::usage;

/// Width and height of a chart, in pixels.
pub(crate) const SIZE: (u32, u32) = (960, 540);
/// Colours that colour-blind people can tell apart (Okabe and Ito).
pub(crate) const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
];

/// Font and size of titles, and of other text.
pub(crate) const TITLE: (&str, u32) = ("sans-serif", 24);
pub(crate) const TEXT: (&str, u32) = ("sans-serif", 15);
/// Margin around a chart, in pixels.
pub(crate) const MARGIN: i32 = 18;
/// Font of labels beside the axes, and the height of a label, in pixels.
const LABEL: (&str, u32) = ("sans-serif", 13);
const LABEL_HEIGHT: i32 = 15;
/// Width in pixels of a panel (`PANEL`) and of the labels beside it (`LABELS`).
const PANEL: u32 = 640;
const LABELS: i32 = 190;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn<'a> = Result<(), Box<dyn Error + 'a>>;

/// Line of a chart: its name, and points of size and speed. Speed is the baseline's time divided by
/// ours; above 1, iris is faster.
#[derive(Clone, PartialEq, Debug)]
struct Series {
    name: String,
    of: Of,
    points: Vec<(f64, f64)>,
}

/// Implementation whose speed a line of the chart shows, or the limit of any implementation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Of {
    Us,
    Torch,
    /// Limit that no implementation can exceed: time of the GEMM alone, or of the bytes on the
    /// links.
    Limit,
}

/// Chart of one operator, with a panel for each machine.
#[derive(Debug)]
struct Chart {
    op: String,
    by_bytes: bool,
    /// Name of the baseline libraries, such as NCCL with cuBLASLt.
    beside: String,
    /// Lines of the chart, by machine.
    panels: BTreeMap<String, Vec<Series>>,
}

/// Draws a chart of every operator that has points, and the overview; returns the paths of the
/// files.
pub(super) fn draw_all(lines: &[Line], folder: &Path) -> Result<Vec<PathBuf>> {
    let written = |error: std::io::Error| {
        usage(format!("folder {}", folder.display()), error, "a path that can be written")
    };
    std::fs::create_dir_all(folder).map_err(written)?;
    let mut files = Vec::new();
    let mut write = |name: &str, text: String| {
        let path = folder.join(format!("{name}.svg"));
        std::fs::write(&path, text).map_err(written)?;
        files.push(path);
        anyhow::Ok(())
    };
    for chart in charts(lines) {
        let mut text = String::new();
        chart.draw(&mut text).map_err(|e| anyhow!("chart of {}: {e}", chart.op))?;
        write(&chart.op, text)?;
    }
    let mut text = String::new();
    draw_overview(lines, &mut text).map_err(|e| anyhow!("overview: {e}"))?;
    write("overview", text)?;
    Ok(files)
}

/// Points of size and speed, keyed by machine, name of the line and implementation.
type Points = BTreeMap<(String, String, Of), Vec<(f64, f64)>>;

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
        let name = if by_bytes { String::new() } else { format!("{n} x {k}{columns}{other}") };
        let series = by_op.entry(&line.op).or_default();
        let mut add = |of: Of, us: f64| {
            let points = series.entry((device.clone(), name.clone(), of)).or_default();
            points.push((size as f64, base / us));
        };
        add(Of::Us, line.us);
        line.torch_us.into_iter().for_each(|us| add(Of::Torch, us));
        // A limit above the time of iris is left out: it was measured by a slower transfer and
        // limits nothing.
        line.limit_us.filter(|&us| us <= line.us).into_iter().for_each(|us| add(Of::Limit, us));
    }
    let chart = |(op, points): (&str, Points)| {
        let mut panels: BTreeMap<String, Vec<Series>> = BTreeMap::new();
        for ((device, name, of), mut points) in points {
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            panels.entry(device).or_default().push(Series { name, of, points });
        }
        let (by_bytes, beside) = (!op.contains("matmul"), baselines(lines));
        Chart { op: op.into(), by_bytes, beside, panels }
    };
    by_op.into_iter().map(chart).collect()
}

impl Series {
    /// Label that is drawn at the end of the line.
    fn label(&self) -> String {
        let of = match self.of {
            Of::Us => "iris",
            Of::Torch => "PyTorch",
            Of::Limit => "limit",
        };
        match (&*self.name, self.of) {
            ("", _) => of.into(),
            (name, Of::Us) => name.into(),
            (name, _) => format!("{of}, {name}"),
        }
    }
}

/// Draws the title into `text` and returns an area for each of `count` panels side by side.
fn panels<'a>(
    text: &'a mut String,
    title: &str,
    count: usize,
    height: u32,
) -> Result<Vec<Area<'a>>, Box<dyn Error + 'a>> {
    let root =
        SVGBackend::with_string(text, (PANEL * count.max(1) as u32, height)).into_drawing_area();
    root.fill(&WHITE)?;
    let root = root.margin(10, 0, 0, 0).titled(title, TITLE)?;
    Ok(root.split_evenly((1, count.max(1))))
}

/// Ends a chart by writing its document, which all panels share, so presenting one area suffices.
fn present(areas: &[Area<'_>]) -> Result<()> {
    areas.first().map_or(Ok(()), |area| Ok(area.present()?))
}

/// Draws labels in a column, each at the height of the line that it names, or as near as there is
/// room.
fn draw_labels<'a>(
    area: &Area<'_>,
    left: i32,
    mut labels: Vec<(i32, String, RGBColor)>,
) -> Drawn<'a> {
    labels.sort_by_key(|label| label.0);
    let (top, bottom) = (LABEL_HEIGHT, area.dim_in_pixel().1 as i32 - LABEL_HEIGHT);
    let mut free = top;
    for label in &mut labels {
        label.0 = label.0.max(free);
        free = label.0 + LABEL_HEIGHT;
    }
    let mut free = bottom;
    for label in labels.iter_mut().rev() {
        label.0 = label.0.min(free);
        free = label.0 - LABEL_HEIGHT;
    }
    for (y, text, colour) in labels {
        let style = LABEL.into_font().color(&colour).pos(Pos::new(HPos::Left, VPos::Center));
        area.draw(&Text::new(text, (left, y), style)).map_err(|e| e.to_string())?;
    }
    Ok(())
}

impl Chart {
    /// Draws the chart as SVG into `text`.
    fn draw(&self, text: &mut String) -> Result<()> {
        let title = format!("{}: speed relative to {}", self.op, self.beside);
        let areas = panels(text, &title, self.panels.len(), SIZE.1).map_err(|e| anyhow!("{e}"))?;
        for (area, (machine, series)) in areas.iter().zip(&self.panels) {
            self.draw_panel(area, machine, series).map_err(|e| anyhow!("{machine}: {e}"))?;
        }
        present(&areas)
    }

    fn draw_panel<'a>(&self, area: &'a Area<'_>, machine: &str, series: &[Series]) -> Drawn<'a> {
        // All panels have the same axes, so that machines can be compared.
        let points = || self.panels.values().flatten().flat_map(|series| &series.points);
        let least = points().map(|point| point.0.log2()).fold(f64::INFINITY, f64::min);
        let most = points().map(|point| point.0.log2()).fold(0.0, f64::max).max(least + 1.0);
        let top = points().map(|point| point.1).fold(1.2, f64::max) * 1.08;
        let (begin, end) = (least - 0.3, most + 0.3);
        let mut chart = ChartBuilder::on(area)
            .caption(machine, TEXT)
            .margin(MARGIN)
            .margin_right(LABELS)
            .x_label_area_size(48)
            .y_label_area_size(56)
            .build_cartesian_2d(begin..end, 0.0..top)?;
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
            .x_labels(((most - least) as usize + 3).min(9))
            .x_label_formatter(&size)
            .y_label_formatter(&|speed| format!("{speed:.1}"))
            .x_desc(if self.by_bytes { "bytes of the message" } else { "M, rows of the whole" })
            .y_desc("times as fast")
            .label_style(LABEL)
            .draw()?;
        chart.draw_series([PathElement::new([(begin, 1.0), (end, 1.0)], BLACK.stroke_width(2))])?;
        let mut labels = vec![(chart.backend_coord(&(end, 1.0)).1, self.beside.clone(), BLACK)];
        let all = self.panels.values().flatten();
        let names: BTreeSet<&str> = all.map(|series| &*series.name).collect();
        for series in series {
            // The line of a limit has the same colour as the line of the op that it limits.
            let which = names.iter().position(|name| *name == series.name).unwrap_or_default();
            let colour = COLOURS[which % COLOURS.len()];
            let at = series.points.iter().map(|&(size, speed)| (size.log2(), speed));
            match series.of {
                Of::Us => {
                    chart.draw_series(LineSeries::new(at, colour.stroke_width(3)).point_size(4))?;
                }
                Of::Torch => {
                    chart.draw_series(DashedLineSeries::new(at, 9, 5, colour.stroke_width(2)))?;
                }
                Of::Limit => {
                    chart.draw_series(DashedLineSeries::new(at, 2, 4, colour.stroke_width(1)))?;
                }
            }
            let last =
                series.points.last().map_or((end, 1.0), |&(size, speed)| (size.log2(), speed));
            labels.push((chart.backend_coord(&last).1, series.label(), colour));
        }
        let base = area.get_base_pixel();
        let right = chart.backend_coord(&(end, 0.0)).0 - base.0 + 8;
        for label in &mut labels {
            label.0 -= base.1;
        }
        draw_labels(area, right, labels)
    }
}

/// Draws one dot per measured shape: a row for each operator, a panel for each machine.
fn draw_overview(lines: &[Line], text: &mut String) -> Result<()> {
    let mut machines: BTreeMap<String, BTreeMap<&str, Vec<f64>>> = BTreeMap::new();
    for line in lines {
        if let Some(ratio) = line.ratio() {
            let speeds = machines.entry(line.subject().device).or_default();
            speeds.entry(&line.op).or_default().push(1.0 / ratio);
        }
    }
    let ops: BTreeSet<&str> = machines.values().flat_map(BTreeMap::keys).copied().collect();
    let ops: Vec<&str> = ops.into_iter().rev().collect();
    let speeds = || machines.values().flat_map(BTreeMap::values).flatten();
    let most = speeds().copied().fold(1.5, f64::max) + 0.1;
    let title = format!("Speed relative to {}: one dot per shape", baselines(lines));
    let height = 130 + 34 * ops.len() as u32;
    let areas = panels(text, &title, machines.len(), height).map_err(|e| anyhow!("{e}"))?;
    for (area, (machine, speeds)) in areas.iter().zip(&machines) {
        draw_row(area, (machine, speeds), &ops, most).map_err(|e| anyhow!("{machine}: {e}"))?;
    }
    present(&areas)
}

fn draw_row<'a>(
    area: &'a Area<'_>,
    (machine, speeds): (&str, &BTreeMap<&str, Vec<f64>>),
    ops: &[&str],
    most: f64,
) -> Drawn<'a> {
    let rows = ops.len() as f64;
    let mut chart = ChartBuilder::on(area)
        .caption(machine, TEXT)
        .margin(MARGIN)
        .margin_left(LABELS)
        .x_label_area_size(44)
        .build_cartesian_2d(0.5..most, -0.5..rows - 0.5)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .light_line_style(TRANSPARENT)
        .x_labels(8)
        .y_labels(0)
        .x_label_formatter(&|speed| format!("{speed:.1}"))
        .x_desc("times as fast: right of the line iris is faster")
        .label_style(LABEL)
        .draw()?;
    chart
        .draw_series([PathElement::new([(1.0, -0.5), (1.0, rows - 0.5)], BLACK.stroke_width(2))])?;
    let base = area.get_base_pixel();
    let left = chart.backend_coord(&(0.5, 0.0)).0 - base.0 - 8;
    for (row, op) in ops.iter().enumerate() {
        let at = row as f64;
        let style = LABEL.into_font().color(&BLACK).pos(Pos::new(HPos::Right, VPos::Center));
        let y = chart.backend_coord(&(0.5, at)).1 - base.1;
        area.draw(&Text::new((*op).to_owned(), (left, y), style))?;
        let dot = |&speed: &f64| {
            let colour = if speed < 1.0 { COLOURS[1] } else { COLOURS[0] };
            Circle::new((speed, at), 5, colour.mix(0.55).filled())
        };
        chart.draw_series(speeds.get(op).into_iter().flatten().map(dot))?;
    }
    Ok(())
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
        let name = "4096 x 512".to_string();
        let ours = Series { name: name.clone(), of: Of::Us, points: vec![(1.0, 2.0), (64.0, 0.5)] };
        let limit = Series { name, of: Of::Limit, points: vec![(1.0, 4.0)] };
        assert_eq!(chart.panels, BTreeMap::from([("2 x X".to_string(), vec![ours, limit])]));
        let mut text = String::new();
        chart.draw(&mut text).unwrap();
        for word in ["<svg", "matmul_all_reduce: speed", "2 x X", "limit, 4096 x 512", "</svg>"] {
            assert!(text.contains(word), "{word} in {text}");
        }
    }

    #[test]
    fn messages_are_drawn_by_their_bytes_and_barriers_not() {
        let lines = [line("all_reduce", 32, 10.0, 10.0), line("barrier", 0, 1.0, 2.0)];
        let charts = charts(&lines);
        assert_eq!(charts.len(), 1);
        assert_eq!(charts[0].panels["2 x X"][0].points[0], (262_144.0, 1.0));
    }

    #[test]
    fn the_overview_has_a_row_for_each_operator_and_a_dot_for_each_shape() {
        let other = Line { device: "4 x X".into(), ..line("barrier", 0, 1.0, 2.0) };
        let lines = [line("all_reduce", 32, 10.0, 10.0), Line { ranks: 4, ..other }];
        let mut text = String::new();
        draw_overview(&lines, &mut text).unwrap();
        for word in ["2 x X", "4 x X", "all_reduce", "barrier"] {
            assert!(text.contains(word), "{word} in {text}");
        }
        assert_eq!(text.matches("<circle").count(), 2);
        assert_eq!(text.matches("</svg>").count(), 1);
    }
}
