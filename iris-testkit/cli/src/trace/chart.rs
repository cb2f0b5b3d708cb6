//! Chart of one call's trace: over time, a lane (horizontal strip) for each workgroup of each rank.

use std::cmp::Reverse;
use std::error::Error;

use anyhow::{Result, anyhow, bail};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{KINDS, RankTrace, kind, origin};
use crate::record::chart::{COLOURS, MARGIN, SIZE, TEXT, TITLE};

/// Margins in pixels around the lanes: above, left and below; and the gap between two ranks.
const ABOVE: i32 = 118;
const LEFT: i32 = 150;
const BELOW: i32 = 52;
const GAP: i32 = 12;

/// Chart as SVG, under a title and a line of description.
pub(crate) fn chart(traces: &[RankTrace], title: &str, about: &str) -> Result<String> {
    if traces.iter().all(|trace| trace.lanes().next().is_none()) {
        bail!("{title}: there are no spans to draw; with fewer calls more of them fit the trace");
    }
    let mut text = String::new();
    draw(&mut text, traces, title, about).map_err(|error| anyhow!("chart of {title}: {error}"))?;
    Ok(text)
}

fn draw<'a>(
    text: &'a mut String,
    traces: &[RankTrace],
    title: &str,
    about: &str,
) -> Result<(), Box<dyn Error + 'a>> {
    let spans = || traces.iter().flat_map(|trace| trace.groups.iter().flatten());
    let lanes: usize = traces.iter().map(|trace| trace.lanes().count()).sum();
    // Height of a lane; with many workgroups the lanes are too thin to have names.
    let lane = (640 / lanes.max(1) as i32).clamp(2, 32);
    let height = lanes as i32 * lane + traces.len() as i32 * GAP;
    let begin = origin(traces);
    let micros = |nanos: u64| nanos.saturating_sub(begin) as f64 / 1000.0;
    let end = spans().map(|span| micros(span.3)).fold(0.0, f64::max);

    let whole = (SIZE.0, (ABOVE + height + BELOW) as u32);
    let root = SVGBackend::with_string(text, whole).into_drawing_area();
    root.fill(&WHITE)?;
    root.margin(MARGIN / 2, 0, 0, 0).titled(title, TITLE)?.titled(about, TEXT)?;
    let mut plot = ChartBuilder::on(&root)
        .margin_top(ABOVE)
        .margin_right(MARGIN)
        .set_label_area_size(LabelAreaPosition::Left, LEFT)
        .set_label_area_size(LabelAreaPosition::Bottom, BELOW)
        .build_cartesian_2d(0.0..end, 0..height)?;
    plot.configure_mesh()
        .disable_y_mesh()
        .disable_y_axis()
        .x_label_formatter(&|micros| micros.to_string())
        .light_line_style(TRANSPARENT)
        .x_desc("microseconds since the first span")
        .label_style(TEXT)
        .draw()?;
    let right = plot.plotting_area().get_pixel_range().0.end;
    let x = |nanos: u64| LEFT + (micros(nanos) / end * f64::from(right - LEFT)) as i32;

    let style = |horizontal| TEXT.into_text_style(&root).pos(Pos::new(horizontal, VPos::Center));
    let (from_left, from_right) = (style(HPos::Left), style(HPos::Right));
    let present = KINDS.into_iter().filter(|kind| spans().any(|span| span.0 == kind.span as u32));
    for (which, kind) in present.enumerate() {
        let (x, y) = (LEFT + 120 * which as i32, ABOVE - 24);
        root.draw(&Rectangle::new([(x, y - 7), (x + 14, y + 7)], COLOURS[kind.colour].filled()))?;
        root.draw_text(kind.name, &from_left, (x + 22, y))?;
    }

    let mut top = ABOVE;
    for trace in traces {
        let own = trace.lanes().count() as i32 * lane;
        root.draw_text(
            &format!("rank {}", trace.rank),
            &from_left,
            (MARGIN, top + (GAP + own) / 2),
        )?;
        root.draw(&PathElement::new([(MARGIN, top), (right, top)], BLACK.mix(0.4)))?;
        top += GAP / 2;
        for (group, spans) in trace.lanes() {
            if lane >= 16 {
                let middle = (LEFT - 8, top + lane / 2);
                root.draw_text(&format!("workgroup {group}"), &from_right, middle)?;
            }
            let mut spans = spans.clone();
            // Spans are sorted so that a span inside another one is drawn later, on top of it.
            spans.sort_by_key(|span| (span.2, Reverse(span.3)));
            for (number, _, begin, end) in spans {
                // A span is drawn at least one pixel wide, so that it stays visible.
                let corners =
                    [(x(begin), top + lane / 8), (x(end).max(x(begin) + 1), top + lane - lane / 8)];
                root.draw(&Rectangle::new(corners, COLOURS[kind(number).colour].filled()))?;
            }
            top += lane;
        }
        top += GAP / 2;
    }
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use iris_ops::TraceSpan;
    use iris_sync::Span;

    use super::*;

    /// Left edge, top edge and width of the rectangles of one kind of span in `svg`; the first one
    /// is the legend's.
    fn rectangles(svg: &str, kind: usize) -> Vec<[i32; 3]> {
        let RGBColor(red, green, blue) = COLOURS[KINDS[kind].colour];
        let fill = format!("fill=\"#{red:02X}{green:02X}{blue:02X}\"");
        let value = |line: &str, name: &str| {
            let text = line.split(&format!(" {name}=\"")).nth(1).unwrap();
            text.split('"').next().unwrap().parse().unwrap()
        };
        svg.lines()
            .filter(|line| line.starts_with("<rect") && line.contains(&fill))
            .map(|line| ["x", "y", "width"].map(|name| value(line, name)))
            .collect()
    }

    #[test]
    fn each_span_is_a_rectangle_in_the_lane_of_its_workgroup() {
        let span = |kind: Span, begin, end| TraceSpan { begin, end, kind: kind as u32, what: 3 };
        let first = vec![span(Span::Gemm, 9000, 11000), span(Span::Signal, 11000, 11001)];
        let last = vec![span(Span::Gemm, 5000, 9000), span(Span::Wait, 9000, 13000)];
        let ranks = [vec![first, vec![], vec![span(Span::Gemm, 7000, 8000)]], vec![last]];
        let traces: Vec<_> =
            (0..).zip(&ranks).map(|(rank, it)| RankTrace::new("x", rank, it)).collect();
        let svg = chart(&traces, "x, push", "M 1, N 2, f32").unwrap();
        for word in
            ["x, push", "M 1, N 2, f32", "rank 0", "rank 1", "workgroup 2", "wait", "signal"]
        {
            assert!(svg.contains(word), "{word} in {svg}");
        }
        assert!(!svg.contains("workgroup 1") && !svg.contains("reduce"), "{svg}");
        let [_, late, thin, early] = rectangles(&svg, 1)[..] else { panic!("{svg}") };
        let [_, wait] = rectangles(&svg, 2)[..] else { panic!("{svg}") };
        let [_, signal] = rectangles(&svg, 3)[..] else { panic!("{svg}") };
        // Lanes from the top: two workgroups of rank 0, then one of rank 1.
        assert!(late[1] < thin[1] && thin[1] < early[1], "{svg}");
        assert_eq!((signal[1], wait[1]), (late[1], early[1]));
        // Positions and widths are proportional to time; even the shortest span is one pixel wide.
        assert_eq!((early[0], signal[2]), (LEFT, 1));
        let near = |is: i32, wanted: i32| assert!((is - wanted).abs() <= 1, "{is} for {wanted}");
        near(late[2], early[2] / 2);
        near(late[0], early[0] + early[2]);
        near(wait[2], early[2]);
    }

    #[test]
    fn without_spans_there_is_no_chart() {
        let error = chart(&[RankTrace::new("x", 0, &[vec![]])], "x, push", "").unwrap_err();
        assert!(error.to_string().contains("x, push: there are no spans to draw"), "{error}");
    }
}
