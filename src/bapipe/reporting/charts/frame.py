"""What all charts share: the drawing as a value, its style, axes, and text that is safe to show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from bapipe.reporting.drawing.action_styles import LOOKS
from bapipe.reporting.drawing.labels import printable, ticks
from bapipe.reporting.drawing.patterns import patterns

__all__ = [
    "CHARACTER",
    "DARK",
    "LIGHT",
    "WIDTH",
    "Chart",
    "Scale",
    "chart_style",
    "label",
    "legend",
    "log_ticks",
    "rect",
    "safe",
    "short",
    "x_axis",
    "y_axis",
]

WIDTH = 760.0
"""pixels of every chart"""
CHARACTER = 6.3
"""pixels of a letter, about"""
LIGHT = {
    "page": "#ffffff",
    "panel": "#f3f5f7",
    "lane": "#e4e8ec",
    "ink": "#1b1f24",
    "soft": "#525c66",
    "grid": "#d4dae0",
    "accent": "#0b5cad",
    "bad": "#b3261e",
}
DARK = {
    "page": "#14181d",
    "panel": "#1c2229",
    "lane": "#2a323b",
    "ink": "#eceff2",
    "soft": "#a9b4c0",
    "grid": "#39434e",
    "accent": "#7db8f5",
    "bad": "#ff9d94",
}
"""the page's colours by name, for light and dark"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A drawing of a fixed size in pixels."""

    name: str
    """of its file, without suffix"""
    title: str
    """what it shows, read out where it cannot be seen"""
    height: float
    body: str
    """SVG elements, styled by class"""

    def inline(self) -> str:
        """For a page that has `chart_style` and the patterns."""
        return (
            f'<svg class="bapipe-chart" role="img" viewBox="0 0 {WIDTH:g} {self.height:g}" '
            f'aria-label="{safe(self.title, 300)}">{self.body}</svg>'
        )

    def standalone(self) -> str:
        """The text of an SVG file that needs nothing else."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="bapipe-chart" role="img" width="{WIDTH:g}" '
            f'height="{self.height:g}" viewBox="0 0 {WIDTH:g} {self.height:g}">'
            f"<title>{safe(self.title, 300)}</title><style>{chart_style(LIGHT)}</style>"
            f'{"".join(patterns(LOOKS))}<rect width="{WIDTH:g}" height="{self.height:g}" fill="{LIGHT["page"]}"/>'
            f"{self.body}</svg>\n"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Values to pixels, linear or logarithmic."""

    low: float
    high: float
    start: float
    """pixel of low"""
    end: float
    """pixel of high"""
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, self.low))
        share = (value - low) / (high - low) if high > low else 0.0
        return self.start + share * (self.end - self.start)


def chart_style(colours: dict[str, str]) -> str:
    """CSS of the charts in these colours, which may be `var(--ink)` and the like."""
    kinds = "".join(f".bapipe-chart .{kind.name}{{fill:url(#bapipe-{kind.name})}}" for kind in LOOKS)
    inks = "".join(f".bapipe-chart .on-{kind.name}{{fill:{look.ink}}}" for kind, look in LOOKS.items())
    rules = {
        "": f"font:11px system-ui,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif;fill:{colours['ink']}",
        " .soft": f"fill:{colours['soft']}",
        " .bad": f"fill:{colours['bad']}",
        " .strong": "font-weight:600",
        " .end": "text-anchor:end",
        " .middle": "text-anchor:middle",
        " .grid": f"stroke:{colours['grid']};fill:none",
        " .line": f"stroke:{colours['ink']};fill:none",
        " .limit": f"stroke:{colours['bad']};stroke-width:1.5;stroke-dasharray:6 3;fill:none",
        " .front": f"stroke:{colours['accent']};stroke-width:1.5;fill:none",
        " .cut": f"stroke:{colours['ink']};stroke-width:1.5;stroke-dasharray:4 3;fill:none",
        " .band": f"fill:{colours['panel']}",
        " .lane": f"fill:{colours['lane']}",
        " .edge": f"stroke:{colours['page']};stroke-width:.7",
        " .chosen": f"fill:{colours['accent']};stroke:{colours['page']};stroke-width:1",
        " .alternative": f"fill:{colours['soft']};stroke:{colours['page']};stroke-width:1",
        " .misfit": f"fill:none;stroke:{colours['bad']};stroke-width:1.5",
        " .outline": f"fill:none;stroke:{colours['ink']};stroke-width:1.2",
        " .bytes": f"fill:{colours['soft']}",
        " .weights": "fill:#0072b2",
        " .gradients": "fill:#e69f00",
        " .optimizer": "fill:#cc79a7",
        " .buffers": "fill:#8a949e",
        " .features": "fill:#56b4e9",
    }
    plates = "".join(f".bapipe-chart .plate-{kind.name}{{fill:{look.color}}}" for kind, look in LOOKS.items())
    every = "".join(f".bapipe-chart{selector}{{{rule}}}" for selector, rule in rules.items())
    return every + kinds + inks + plates


def short(text: str, most: int = 60) -> str:
    """The text on one line without control characters, cut to `most` characters."""
    # Cut first: a name of a megabyte need not be looked at whole.
    clean = printable(text[: most + 1])
    return clean if len(clean) <= most else clean[: most - 1] + "…"


def safe(text: str, most: int = 60) -> str:
    """`short`, escaped for HTML and SVG text and attributes."""
    return escape(short(text, most), quote=True)


def label(x: float, y: float, text: str, *classes: str) -> str:
    """A text; it is escaped here."""
    kind = f' class="{" ".join(classes)}"' if classes else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}">{safe(text, 200)}</text>'


def rect(x: float, y: float, width: float, height: float, classes: str, title: str = "") -> str:
    """A rectangle that says `title` when pointed at."""
    said = f"<title>{safe(title, 200)}</title>" if title else ""
    size = f'width="{max(0.0, width):.2f}" height="{max(0.0, height):.2f}"'
    return f'<rect class="{classes}" x="{x:.2f}" y="{y:.2f}" {size}>{said}</rect>'


def legend(entries: Iterable[tuple[str, str]], *, y: float, x: float = 0.0) -> str:
    """Samples (their class) and words in one line."""
    parts = []
    for classes, words in entries:
        parts.append(rect(x, y - 9, 16, 10, classes))
        parts.append(label(x + 21, y, words, "soft"))
        x += 21 + len(words) * CHARACTER + 14
    return "".join(parts)


def log_ticks(low: float, high: float, most: int = 8) -> list[float]:
    """1, 2 and 5 times powers of ten between two values, or the powers alone where those are too many."""
    for mantissas in ((1, 2, 5), (1, 3), (1,)):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [mantissa * 10.0**power for power in powers for mantissa in mantissas]
        inside = [value for value in found if low <= value <= high]
        if len(inside) <= most:
            return inside
    return inside[:: math.ceil(len(inside) / most)]


def _values(scale: Scale, most: int) -> Sequence[float]:
    if scale.logarithmic:
        return log_ticks(scale.low, scale.high, most)
    return [value for value in ticks(scale.high, most) if value >= scale.low]


def x_axis(scale: Scale, *, top: float, bottom: float, words: Callable[[float], str], most: int = 7) -> str:
    """Lines from top to bottom with a value under each."""
    parts = []
    for value in _values(scale, most):
        x = scale(value)
        parts.append(f'<path class="grid" d="M{x:.1f},{top:.1f}V{bottom:.1f}"/>')
        parts.append(label(x, bottom + 14, "0" if value == 0 else words(value), "soft", "middle"))
    return "".join(parts)


def y_axis(scale: Scale, *, left: float, right: float, words: Callable[[float], str], most: int = 5) -> str:
    """Lines from left to right with a value before each."""
    parts = []
    for value in _values(scale, most):
        y = scale(value)
        parts.append(f'<path class="grid" d="M{left:.1f},{y:.1f}H{right:.1f}"/>')
        parts.append(label(left - 6, y + 4, "0" if value == 0 else words(value), "soft", "end"))
    return "".join(parts)
