"""An answer as a page with plots: one HTML file that requires nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from pdserve.planning.answer import Candidate, PlannedNodes
from pdserve.planning.shown import as_text

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 280, 56, 40, 16
MOST_POINTS = 200
"""Most points of a line, about one for three pixels."""
COLOURS = ("#1f6feb", "#d1571f")
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem;"
    "color:#1c2128;background:#fff}pre{white-space:pre-wrap;background:#f4f5f7;padding:1rem;"
    "overflow-x:auto}svg{width:100%;height:auto}h2{font-size:1.05rem;margin-top:2rem}"
)
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Lines over one axis; `mark` is a value with a line of its own, on `x` or on `y`."""

    title: str
    x: str
    y: str
    lines: Sequence[tuple[str, Points]]
    mark_x: float | None = None
    mark_y: float | None = None


def page_of(answer: PlannedNodes) -> str:
    """Return the page."""
    plots = "".join(f"<h2>{escape(plot.title)}</h2>{svg_of(plot)}" for plot in _plots(answer))
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'>"
        f"<title>pdserve plan: {escape(str(answer.best.shape))}</title><style>{_STYLE}</style>"
        f"</head><body><h1>pdserve plan</h1><pre>{escape(as_text(answer))}</pre>{plots}"
        "</body></html>\n"
    )


def _plots(answer: PlannedNodes) -> list[Plot]:
    targets = answer.wanted.targets
    shown = [one for one in (answer.split, answer.mixed) if one is not None]
    return [
        Plot(
            title="Requests within both targets, by load",
            x="load (1: that of the workload)", y="% of requests",
            lines=[(str(shape), [(at, 100 * share) for at, share in points])
                   for shape, points in answer.curve.items() if points],
            mark_y=100 * answer.wanted.attain,
        ),
        Plot(
            title="Time to the first token", x="ms", y="% of requests",
            lines=[(str(one.shape), _shares([1e3 * s for s in _ttfts(one)])) for one in shown],
            mark_x=targets.ttft_s * 1e3,
        ),
        Plot(
            title="Time per token after the first", x="ms", y="% of requests",
            lines=[(str(one.shape), _shares([1e3 * s for s in _tpots(one)])) for one in shown],
            mark_x=targets.tpot_s * 1e3,
        ),
    ]  # fmt: skip


def _ttfts(one: Candidate) -> Sequence[float]:
    return one.trials[0].ttfts_s


def _tpots(one: Candidate) -> Sequence[float]:
    return one.trials[0].tpots_s


def _shares(values: Sequence[float]) -> Points:
    """Return the cumulative distribution in percent, up to 99, in at most `MOST_POINTS` points."""
    ordered = sorted(values)
    count = len(ordered)
    kept = range(0, max(1, round(count * 0.99)), max(1, count // MOST_POINTS)) if count else ()
    return [(ordered[index], 100 * (index + 1) / count) for index in kept]


def svg_of(plot: Plot) -> str:
    """Return a plot with its axes; from 0 on both."""
    points = [point for _, line in plot.lines for point in line]
    most_x = _round_up(max([x for x, _ in points] + [plot.mark_x or 0.0]) or 1.0)
    most_y = _round_up(max([y for _, y in points] + [plot.mark_y or 0.0]) or 1.0)

    def at(x: float, y: float) -> str:
        right, up = (WIDTH - LEFT - 16) * x / most_x, (HEIGHT - BOTTOM - TOP) * y / most_y
        return f"{LEFT + right:.1f},{HEIGHT - BOTTOM - up:.1f}"

    parts = [f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{escape(plot.title)}'>"]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, _, y = at(0, most_y * share).partition(",")
        parts.append(
            f"<line x1='{x}' y1='{y}' x2='{WIDTH - 16}' y2='{y}' stroke='#d8dce1'/>"
            f"<text x='{LEFT - 6}' y='{float(y) + 4:.1f}' font-size='11' text-anchor='end'>"
            f"{most_y * share:g}</text>"
        )
        x, _, y = at(most_x * share, 0).partition(",")
        parts.append(
            f"<text x='{x}' y='{HEIGHT - BOTTOM + 15}' font-size='11' text-anchor='middle'>"
            f"{most_x * share:g}</text>"
        )
    for colour, (name, line), row in zip(COLOURS, plot.lines, range(2), strict=False):
        path = " ".join(at(x, y) for x, y in line)
        parts.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'/>")
        parts.append(
            f"<text x='{WIDTH - 20}' y='{HEIGHT - BOTTOM - 24 + 15 * row}' font-size='12' "
            f"text-anchor='end' fill='{colour}'>{escape(name)}</text>"
        )
    ends = [
        (at(plot.mark_x, 0), at(plot.mark_x, most_y)) if plot.mark_x else None,
        (at(0, plot.mark_y), at(most_x, plot.mark_y)) if plot.mark_y else None,
    ]
    for end in filter(None, ends):
        parts.append(
            f"<polyline points='{' '.join(end)}' stroke='#57606a' stroke-dasharray='4 4'/>"
        )
    parts.append(
        f"<text x='{WIDTH / 2}' y='{HEIGHT - 6}' font-size='12' text-anchor='middle'>"
        f"{escape(plot.x)}</text><text x='4' y='12' font-size='12'>{escape(plot.y)}</text></svg>"
    )
    return "".join(parts)


def _round_up(value: float) -> float:
    """Return the next value with a first digit of 1, 2, 4 or 8 and no other."""
    power = 10.0 ** (len(str(int(value))) - 1) if value >= 1 else 0.1
    return next((power * n for n in (1, 2, 4, 8) if power * n >= value), power * 10)
