"""What each engine runs of a plan, as tables: the guide's, made from what the checks go by. Imports no torch."""

from __future__ import annotations

from bapipe.torch.runtime.engines import CAPABILITIES, ENGINES, TORCH_VERSIONS

__all__ = ["engine_table", "fill_engine_page"]


def engine_table() -> str:
    """Markdown: a row per capability, a column per engine."""
    rows = [f"| | {' | '.join(f'`{name}`' for name in ENGINES)} |", f"|---|{'---|' * len(ENGINES)}"]
    for item in CAPABILITIES:
        torch = f"from torch {item.torch}" if item.torch in TORCH_VERSIONS else item.torch
        rows.append(f"| {item.name} | yes | {torch} |")
    return "\n".join(rows) + "\n"


def fill_engine_page(text: str) -> str:
    """The guide's page with the table between its marks."""
    start, end = "<!-- engines -->\n", "<!-- end -->"
    before, _, rest = text.partition(start)
    return f"{before}{start}\n{engine_table()}\n{end}{rest.partition(end)[2]}"
