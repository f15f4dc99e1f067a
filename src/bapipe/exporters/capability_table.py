"""What each engine holds of a plan, as a table: the guide's, made from what the exports go by."""

from __future__ import annotations

from bapipe.exporters.plan_features import Feature
from bapipe.exporters.targets import TARGETS, Target

__all__ = ["capability_table", "fill_page", "version_table"]


def capability_table() -> str:
    """Markdown: a row per feature, a column per engine."""
    names = list(TARGETS)
    rows = [f"| a plan's | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for feature in Feature:
        cells = [_cell(target, feature) for target in TARGETS.values()]
        rows.append(f"| {feature.value} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _cell(target: Target, feature: Feature) -> str:
    if feature in target.holds:
        return "yes"
    return "refused" if feature in target.refuses else "lost"


def version_table() -> str:
    """Markdown: what is written for each engine, and for which versions."""
    rows = ["| `--to` | engine | writes | `--target-version` |", "|---|---|---|---|"]
    for target in TARGETS.values():
        versions = ", ".join(
            f"**{version}**" if version == target.versions[-1] else version for version in sorted(target.versions)
        )
        rows.append(f"| `{target.name}` | {target.title} | {target.writes} | {versions} |")
    return "\n".join(rows) + "\n"


def fill_page(text: str) -> str:
    """A page with both tables between their marks."""
    for mark, made in (("versions", version_table()), ("table", capability_table())):
        start, end = f"<!-- {mark} -->\n", "<!-- end -->"
        before, _, rest = text.partition(start)
        text = f"{before}{start}\n{made}\n{end}{rest.partition(end)[2]}"
    return text
