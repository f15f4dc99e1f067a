"""The ladder of what fits, as a table and as a picture that a narrow screen can show."""

from __future__ import annotations

from html import escape

from rich.table import Table

from bapipe.analysis.largest_fit import LargestFit, RungFit
from bapipe.reporting.drawing.labels import printable

__all__ = ["UNITS", "fit_page", "fit_svg", "render_fit"]

UNITS = {"batch": "samples of a micro-batch", "sequence": "tokens", "depth": "blocks"}
_WIDTH = 380
"""pixels: a telephone's"""
_ROW = 62


def render_fit(found: LargestFit, *, title: str) -> Table:
    """A row for every rung, and what its columns are."""
    table = Table(title=printable(title), title_justify="left", caption_justify="left", caption_style="")
    table.add_column("allowed", overflow="fold", max_width=18)
    table.add_column(f"largest\n{found.quantity}", justify="right")
    table.add_column("samples/s\nthere", justify="right")
    table.add_column(f"samples/s\nat {found.asked}", justify="right")
    table.add_column("plan there", overflow="fold")
    table.caption = (
        f"largest {found.quantity}: in {UNITS[found.quantity]}; and …: besides what the rows before it allow"
    )
    for rung in found.rungs:
        table.add_row(rung.name, _largest(rung), _rate(rung.throughput), _rate(rung.asked), printable(rung.plan))
    return table


def _largest(rung: RungFit) -> str:
    if rung.largest is None:
        return "none"
    return f"≥ {rung.largest}" if rung.at_most else str(rung.largest)


def _rate(throughput: float | None) -> str:
    return "–" if throughput is None else f"{throughput:.4g}"


def fit_svg(found: LargestFit, *, title: str) -> str:
    """Bars of the largest sizes, with samples/s there and at the size that was asked for."""
    most = max((rung.largest or 0 for rung in found.rungs), default=0) or 1
    height = 70 + _ROW * len(found.rungs)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" font-family="system-ui,sans-serif" font-size="13" fill="#1b1f24">',
        f"<title>{_safe(title)}: largest {found.quantity} on every rung</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="10" y="22" font-weight="600">{_safe(title, 48)}</text>',
        f'<text x="10" y="42" fill="#525c66">largest {found.quantity}, in {UNITS[found.quantity]}</text>',
    ]
    for place, rung in enumerate(found.rungs):
        top = 58 + place * _ROW
        bar = 250 * (rung.largest or 0) / most
        there = "does not fit" if rung.largest is None else f"{_largest(rung)}: {_rate(rung.throughput)} samples/s"
        asked = "does not fit" if rung.asked is None else f"{_rate(rung.asked)} samples/s"
        parts += [
            f'<text x="10" y="{top + 12}">{_safe(rung.name, 48)}</text>',
            f'<rect x="10" y="{top + 18}" width="{max(bar, 1):.1f}" height="10" fill="#0072b2"/>',
            f'<text x="10" y="{top + 44}" fill="#525c66">{there}; at {found.asked}: {asked}</text>',
        ]
    return "".join(parts) + "</svg>\n"


def fit_page(found: LargestFit, *, title: str) -> str:
    """The picture and the table as one HTML page that works offline."""
    rows = "".join(
        f"<tr><th scope='row'>{_safe(rung.name)}</th><td>{_largest(rung)}</td><td>{_rate(rung.throughput)}</td>"
        f"<td>{_rate(rung.asked)}</td><td class='plan'>{_safe(rung.plan, 300)}</td></tr>"
        for rung in found.rungs
    )
    heads = (
        "allowed",
        f"largest {found.quantity}",
        "samples/s there",
        f"samples/s at {found.asked}",
        "plan there",
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{_safe(title)}</title><style>body{{font:15px system-ui,sans-serif;margin:16px auto;padding:0 5px;"
        "max-width:900px;color:#1b1f24}svg{max-width:100%;height:auto}table{border-collapse:collapse}"
        "th,td{border:1px solid #d4dae0;padding:4px 7px;text-align:right;vertical-align:top}"
        "th[scope=row],td.plan{text-align:left;overflow-wrap:anywhere}.wide{overflow-x:auto}</style></head><body>"
        f"<h1>{_safe(title)}</h1>{fit_svg(found, title=title)}<div class='wide' tabindex='0'><table><thead><tr>"
        + "".join(f"<th>{head}</th>" for head in heads)
        + f"</tr></thead><tbody>{rows}</tbody></table></div>"
        "<p>Each row is what <code>bapipe plan</code> answers with these ways allowed.</p></body></html>\n"
    )


def _safe(text: str, most: int = 120) -> str:
    clean = printable(text[: most + 1])
    return escape(clean if len(clean) <= most else clean[: most - 1] + "…")
