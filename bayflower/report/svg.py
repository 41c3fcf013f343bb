"""Charts as SVG text: axes, lines with bands, bars, points. Colours are classes, so that a page
decides them for light, dark and paper.

Series differ by colour, by marker and by dashes, because not everybody sees colours. Every mark has
a title, which browsers show on hover.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 380.0, 270.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 12.0, 14.0, 44.0
SERIES = 8  # colours, markers and dashes there are
DASHES = ("", "6 3", "2 3", "9 3 2 3", "", "6 3", "2 3", "9 3 2 3")
MARKERS = (  # around (0, 0), about 7 units wide
    "M-3.5,0a3.5,3.5 0 1,0 7,0a3.5,3.5 0 1,0 -7,0Z",
    "M-3,-3H3V3H-3Z",
    "M0,-4L3.8,3H-3.8Z",
    "M0,-4.4L4.4,0L0,4.4L-4.4,0Z",
    "M-3.8,-3H3.8L0,4Z",
    "M-1.2,-4H1.2V-1.2H4V1.2H1.2V4H-1.2V1.2H-4V-1.2H-1.2Z",
    "M-4,-2.5L-2.5,-4L0,-1.5L2.5,-4L4,-2.5L1.5,0L4,2.5L2.5,4L0,1.5L-2.5,4L-4,2.5L-1.5,0Z",
    "M0,-4.4L1.1,-1.3L4.4,-1.3L1.8,0.7L2.7,3.8L0,2L-2.7,3.8L-1.8,0.7L-4.4,-1.3L-1.1,-1.3Z",
)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers from low to high."""
    if not high > low:
        return [low]
    step = 10 ** math.floor(math.log10((high - low) / about))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if (high - low) / (step * factor) <= about)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def label(value: float) -> str:
    """Return a number, short."""
    if value == 0:
        return "0"
    if abs(value) >= 1e4 or abs(value) < 1e-3:
        return f"{value:.1e}".replace("e+0", "e").replace("e-0", "e−").replace("e-", "e−")
    return f"{value:.4g}".replace("-", "−")


class Chart:
    """A chart with two axes; coordinates are given in the units of the axes."""

    def __init__(
        self,
        name: str,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        x_title: str = "",
        y_title: str = "",
        width: float = WIDTH,
        height: float = HEIGHT,
        left: float = LEFT,
        bottom: float = BOTTOM,
    ) -> None:
        self.name, self.width, self.height = name, width, height
        self.x_range, self.y_range = wide(x), wide(y)
        self.x_title, self.y_title = x_title, y_title
        self.left, self.right, self.top, self.bottom = left, width - RIGHT, TOP, height - bottom
        self.parts: list[str] = []
        self.marks = 0

    def x(self, value: float) -> float:
        """Return where a value lies across."""
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Return where a value lies down."""
        low, high = self.y_range
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def axes(
        self,
        x_names: Sequence[str] | None = None,
        y_names: Sequence[str] | None = None,
        grid: bool = True,
    ) -> Chart:
        """Draw both axes; names stand for the values 0, 1, 2, …"""
        for value, text in named(y_names, self.y_range):
            at = self.y(value)
            if grid:
                self.parts.append(
                    f'<line class="grid" x1="{self.left:.1f}" x2="{self.right:.1f}" y1="{at:.1f}" '
                    f'y2="{at:.1f}"/>'
                )
            self.parts.append(
                f'<text class="tick" x="{self.left - 6:.1f}" y="{at + 4:.1f}" '
                f'text-anchor="end">{escape(text)}</text>'
            )
        each = every(x_names, self.right - self.left)
        for value, text in named(x_names, self.x_range, whole=self.x_title == "round")[::each]:
            half = 3.6 * len(text)  # about; no label may stick out at the side
            at = min(max(self.x(value), half + 1), self.width - half - 1)
            self.parts.append(
                f'<text class="tick" x="{at:.1f}" y="{self.bottom + 16:.1f}" '
                f'text-anchor="middle">{escape(text)}</text>'
            )
        self.parts.append(
            '<path class="axis" '
            f'd="M{self.left:.1f},{self.top:.1f}V{self.bottom:.1f}H{self.right:.1f}"/>'
        )
        middle = (self.left + self.right) / 2
        self.parts.append(
            f'<text class="title" x="{middle:.1f}" y="{self.height - 8:.1f}" '
            f'text-anchor="middle">{escape(self.x_title)}</text>'
        )
        down = (self.top + self.bottom) / 2
        self.parts.append(
            f'<text class="title" transform="translate(14,{down:.1f}) rotate(-90)" '
            f'text-anchor="middle">{escape(self.y_title)}</text>'
        )
        return self

    def uprights(self) -> None:
        """Draw the grid lines that stand."""
        for value in ticks(*self.x_range):
            self.parts.append(
                f'<line class="grid" x1="{self.x(value):.1f}" x2="{self.x(value):.1f}" '
                f'y1="{self.top:.1f}" y2="{self.bottom:.1f}"/>'
            )

    def line(
        self, points: Sequence[tuple[float, float]], series: int, title: str, markers: bool = True
    ) -> None:
        """Draw a line with a marker at some of its points."""
        some = [(self.x(x), self.y(y)) for x, y in points]
        if len(some) > 1:
            path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in some)
            dash = (
                f' stroke-dasharray="{DASHES[series % SERIES]}"' if DASHES[series % SERIES] else ""
            )
            self.parts.append(
                f'<path class="line s{series % SERIES}" '
                f'd="{path}"{dash}><title>{escape(title)}</title></path>'
            )
        self.marks += 1
        if markers:
            each = max(1, -(-len(some) // 12))
            for (x, y), (place, value) in list(zip(some, points, strict=True))[::-1][::each]:
                self.mark(x, y, series, f"{title}: {label(value)} at {label(place)}")

    def mark(self, x: float, y: float, series: int, title: str) -> None:
        """Draw a marker at a place of the picture."""
        self.marks += 1
        self.parts.append(
            f'<path class="mark s{series % SERIES}" transform="translate({x:.1f},{y:.1f})" '
            f'd="{MARKERS[series % SERIES]}">'
            f"<title>{escape(title)}</title></path>"
        )

    def point(self, x: float, y: float, series: int, title: str) -> None:
        """Draw a marker at a point."""
        self.mark(self.x(x), self.y(y), series, title)

    def band(self, points: Sequence[tuple[float, float, float]], series: int) -> None:
        """Fill what lies between (x, low, high)."""
        if len(points) < 2 or all(low == high for _, low, high in points):
            return
        there = "L".join(f"{self.x(x):.1f},{self.y(high):.1f}" for x, _, high in points)
        back = "L".join(f"{self.x(x):.1f},{self.y(low):.1f}" for x, low, _ in reversed(points))
        self.parts.append(f'<path class="band s{series % SERIES}" d="M{there}L{back}Z"/>')

    def bar(
        self, x0: float, x1: float, y0: float, y1: float, series: int, title: str, kind: str = "bar"
    ) -> None:
        """Draw a bar from corner to corner."""
        self.marks += 1
        left, right = sorted((self.x(x0), self.x(x1)))
        top, bottom = sorted((self.y(y0), self.y(y1)))
        self.parts.append(
            f'<rect class="{kind} s{series % SERIES}" x="{left:.1f}" y="{top:.1f}" '
            f'width="{max(right - left, 0.5):.1f}" '
            f'height="{max(bottom - top, 0.5):.1f}"><title>{escape(title)}</title></rect>'
        )

    def circle(self, x: float, y: float, radius: float, series: int, title: str) -> None:
        """Draw a circle, its radius in units of the picture."""
        self.marks += 1
        self.parts.append(
            f'<circle class="bubble s{series % SERIES}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" '
            f'r="{radius:.1f}">'
            f"<title>{escape(title)}</title></circle>"
        )

    def rule(self, x0: float, y0: float, x1: float, y1: float) -> None:
        """Draw a thin straight line, to compare with."""
        self.parts.append(
            f'<line class="rule" x1="{self.x(x0):.1f}" y1="{self.y(y0):.1f}" '
            f'x2="{self.x(x1):.1f}" y2="{self.y(y1):.1f}"/>'
        )

    def text(
        self, x: float, y: float, words: str, series: int | None = None, anchor: str = "middle"
    ) -> None:
        """Write words at a point."""
        kind = "note" if series is None else f"glyph s{series % SERIES}"
        self.marks += series is not None
        self.parts.append(
            f'<text class="{kind}" x="{self.x(x):.1f}" y="{self.y(y) + 3.5:.1f}" '
            f'text-anchor="{anchor}">{escape(words)}</text>'
        )

    def svg(self) -> str:
        """Return the chart."""
        return (
            f'<svg viewBox="0 0 {self.width:.0f} {self.height:.0f}" role="img" '
            f'aria-label="{escape(self.name, quote=True)}" '
            f'data-marks="{self.marks}" '
            f'xmlns="http://www.w3.org/2000/svg">{"".join(self.parts)}</svg>'
        )


class Rows(Chart):
    """A chart of named rows, one below the other. Short names stand at the left; where one is long,
    all stand above their rows, in as many lines as they need, so that none is cut.
    """

    SHORT, WIDE = 18, 52  # letters of a name at the left; of a line above a row

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        x: tuple[float, float],
        x_title: str,
        thick: int = 20,
        x_names: Sequence[str] | None = None,
    ) -> None:
        longest = max(map(len, names), default=0)
        beside = longest <= self.SHORT
        lines = [[text] if beside else textwrap.wrap(text, self.WIDE) or [""] for text in names]
        above = 0 if beside else 15 * max(map(len, lines), default=1)
        each = above + thick + 4
        super().__init__(
            name,
            x,
            (-float(len(names)), 0.0),
            x_title=x_title,
            left=16.0 + 7.0 * longest if beside else 16.0,
            height=TOP + each * len(names) + BOTTOM,
        )
        self.drop, self.half = (above + thick / 2 + 2) / each, thick / 2 / each
        if x_names is None:
            self.uprights()
        self.axes(x_names, y_names=[])
        for row, texts in enumerate(lines):
            top = self.top + each * row
            for line, text in enumerate(texts):
                x_at, y_at, anchor = self.left + 4, top + 15 * line + 13, "start"
                if beside:
                    x_at, y_at, anchor = self.left - 6, top + each / 2 + 4, "end"
                self.parts.append(
                    f'<text class="name" x="{x_at:.1f}" y="{y_at:.1f}" '
                    f'text-anchor="{anchor}">{escape(text)}</text>'
                )

    def at(self, row: float, share: float = 0.0) -> float:
        """Return where a row is drawn; `share` from −1 (its lower edge) to 1."""
        return -row - self.drop + share * self.half


def legend(titles: Sequence[str], lines: bool = True) -> str:
    """Return the key to a chart's series."""
    items = []
    for series, title in enumerate(titles):
        dash = f' stroke-dasharray="{DASHES[series % SERIES]}"' if DASHES[series % SERIES] else ""
        stroke = f'<path class="line s{series % SERIES}" d="M2,8H30"{dash}/>' if lines else ""
        marker = (
            f'<path class="mark s{series % SERIES}" transform="translate(16,8)" '
            f'd="{MARKERS[series % SERIES]}"/>'
        )
        items.append(
            '<li><svg viewBox="0 0 32 16" '
            f'aria-hidden="true">{stroke}{marker}</svg>{escape(title)}</li>'
        )
    return f'<ul class="legend">{"".join(items)}</ul>'


def named(
    names: Sequence[str] | None, span: tuple[float, float], whole: bool = False
) -> list[tuple[float, str]]:
    """Return (value, text) of the marks of an axis, perhaps whole numbers alone."""
    if names is not None:
        return [(float(i), text) for i, text in enumerate(names)]
    return [(value, label(value)) for value in ticks(*span) if not whole or value == round(value)]


def every(names: Sequence[str] | None, room: float) -> int:
    """Return that every n-th name has room."""
    if not names:
        return 1
    return max(1, math.ceil(len(names) * (max(map(len, names)) * 7 + 6) / room))


def wide(span: tuple[float, float]) -> tuple[float, float]:
    """Return a span whose marks can be told apart: not empty, nor as narrow as rounding."""
    low, high = span
    size = max(abs(low), abs(high))
    if high - low <= 1e-9 * size:
        return low - 0.5, high + 0.5
    more = max(0.0, 5e-3 * size - (high - low)) / 2  # label() shows four digits
    return low - more, high + more


def around(
    values: Sequence[float],
    share: float = 0.06,
    least: float | None = None,
    most: float | None = None,
) -> tuple[float, float]:
    """Return a span with some room around the values, within limits."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    room = share * ((high - low) or abs(high) or 1.0)
    low, high = low - room, high + room
    return (low if least is None else max(low, least)), (high if most is None else min(high, most))
