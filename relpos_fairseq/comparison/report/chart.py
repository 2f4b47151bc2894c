"""Lines as SVG."""

from __future__ import annotations

from html import escape
from math import ceil, floor, log10

Points = list[tuple[float, float]]
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f7f", "#b2182b", "#6a3d9a")
DASHES = ("", "6 3", "2 3")  # each round of colours has its own
WIDTH, HEIGHT = 500, 330
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 12, 52
TICKS = 6


def chart(series: dict[str, Points], colours: dict[str, str], x: str, y: str, title: str) -> str:
    """Return a chart of lines, by name.

    `x` and `y` say what the axes show; the title is for those who cannot see it.
    """
    points = [point for line in series.values() for point in line]
    if not points:
        return f"<p>{escape(title)}: no points.</p>"
    (left, right, xs), (low, high, ys) = axis([p[0] for p in points]), axis([p[1] for p in points])

    def across(value: float) -> float:
        return LEFT + (value - left) / (right - left) * (WIDTH - LEFT - RIGHT)

    def up(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    floor_y = HEIGHT - BOTTOM
    parts = [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(v):.1f}" y2="{up(v):.1f}" '
        f'stroke="#8884"/><text x="{LEFT - 6}" y="{up(v) + 4:.1f}" text-anchor="end" '
        f'fill="currentColor">{v:g}</text>'
        for v in ys
    ]
    parts += [
        f'<text x="{across(v):.1f}" y="{floor_y + 20}" text-anchor="middle" fill="currentColor">{v:g}</text>'
        for v in xs
    ]
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle" '
        f'fill="currentColor">{escape(x)}</text>'
    )
    parts.append(
        f'<text transform="translate(14 {(TOP + floor_y) / 2}) rotate(-90)" '
        f'text-anchor="middle" fill="currentColor">{escape(y)}</text>'
    )
    for number, (name, line) in enumerate(series.items()):
        path = " ".join(f"{across(a):.1f},{up(b):.1f}" for a, b in line)
        dash = DASHES[number // len(COLOURS) % len(DASHES)]
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colours[name]}" '
            f'stroke-width="2" stroke-dasharray="{dash}"><title>{escape(name)}</title>'
            "</polyline>"
        )
        parts += [f'<circle cx="{across(a):.1f}" cy="{up(b):.1f}" r="2.5" fill="{colours[name]}"/>' for a, b in line]
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">' + "".join(parts) + "</svg>"


def axis(values: list[float]) -> tuple[float, float, list[float]]:
    """Return an axis's ends and its ticks, at round numbers."""
    low, high = min(values), max(values)
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    step = 10 ** floor(log10((high - low) / TICKS))
    step *= next(times for times in (1, 2, 5, 10) if (high - low) / (step * times) <= TICKS)
    first, last = floor(low / step), ceil(high / step)
    return first * step, last * step, [round(n * step, 10) for n in range(first, last + 1)]
