"""Figures of benchmarks, in the pages: made from result files by key, and each labelled.

A page has a block

    <!-- figures: measured benchmarks/planner_scale/result.json rows
    case | {case}
    CPU s | {cpu_seconds:.1f}
    -->
    …
    <!-- end of figures -->

and what stands between is made: a table with a row for each entry at that key of that file, a column for each line
(its head, and how a row fills it), and a last line that says what the figures are and where they come from. A
block may name a function that returns Markdown instead, `benchmarks/overlap/page_tables.py:transfers`, and after
it the files that the function reads. In a sentence, a figure is

    <!-- figure: benchmarks/fpga/result.json planning.0.wall_seconds .1f -->1.1<!-- end -->

`python docs/_ext/figures.py` (or `scripts/figures`) fills all pages, `--check` says which are out of date and
fails. Sphinx fills them as it reads them. A table of figures that is not in a block is refused by
tests/docs/test_figures.py; what is a definition rather than a result stands under `<!-- given: WHY -->`.
"""

from __future__ import annotations

import importlib.util
import json
import re
import string
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from os.path import relpath
from pathlib import Path
from typing import Any

__all__ = ["LABELS", "figure_tables", "filled", "main", "pages", "setup", "written_by_programs"]

ROOT = Path(__file__).resolve().parents[2]
LABELS = {
    "measured": "Measured",
    "predicted": "Predicted",
    "calibrated": "Calibrated, in part fitted to what it is compared with",
    "counted": "Counted",
}
"""what a figure is: of a run on hardware; of the planner, simulator or cost model; fitted; cases of a campaign"""
_BLOCK = re.compile(r"<!-- figures: (.*?)-->\n.*?<!-- end of figures -->", re.DOTALL)
_INLINE = re.compile(r"<!-- figure: (\S+\.json) (.+?) (\S+) -->.*?<!-- end -->")
_SCALES = {"ms": 1e3, "us": 1e6, "kB": 1e-3, "MB": 1e-6, "GB": 1e-9, "G": 1e-9}
"""`{seconds:ms.1f}`: seconds or bytes in another unit"""
_FIGURE = re.compile(r"[−+-]?\d[\d,.]*(?:x|k|M|G)?(?![\w-]|\.\d)")
"""how the cell of a figure begins"""
_WHOLE_PAGES = {
    "docs/reproduction.md": "src/bapipe/reproduce/render_tables.py",
    "benchmarks/profile/h200.md": "benchmarks/profile/tables.py",
}
"""pages that a program writes from end to end, beside every result.md"""


class _Formatter(string.Formatter):
    """str.format, with `{key with spaces}`, units in the format and – for what is not there."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:  # noqa: ARG002
        found: Any = args[0]
        for part in field_name.split("/"):
            found = _entry(found, part)
        return found, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return "–"
        unit = next((unit for unit in _SCALES if format_spec.startswith(unit)), "")
        if unit:
            value, format_spec = value * _SCALES[unit], format_spec.removeprefix(unit)
        return format(value, format_spec).replace("%", " %") if format_spec else str(value)


def _entry(found: Any, part: str) -> Any:
    if isinstance(found, Mapping):
        return found.get(part)
    if isinstance(found, Sequence) and not isinstance(found, str):
        return found[int(part)] if int(part) < len(found) else None
    return None


@cache
def _result(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def _at(path: str, key: str) -> Any:
    """The entry of a result file at `a.0.b`; an empty key or `.` is all of it."""
    found = _result(path)
    for part in key.split(".") if key not in ("", ".") else ():
        found = _entry(found, part)
    if found is None:
        raise KeyError(f"{path} has nothing at '{key}'")
    return found


def _rows(entry: Any) -> Iterator[dict[str, Any]]:
    """The entries of a list, or of a mapping with their names as `key`; one figure each is its `value`."""
    named = entry.items() if isinstance(entry, Mapping) else enumerate(entry)
    for name, value in named:
        yield {"key": name, **(value if isinstance(value, Mapping) else {"value": value, "values": value})}


def _table(path: str, key: str, columns: list[str]) -> str:
    heads, templates = zip(*((part.strip() for part in line.split(" | ", 1)) for line in columns), strict=True)
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in _rows(_at(path, key)):
        lines.append("| " + " | ".join(_Formatter().vformat(text, [row], {}) for text in templates) + " |")
    return "\n".join(lines)


@cache
def _function(path: str, name: str) -> Callable[[], str]:
    file = ROOT / path
    for other in (
        "tables",
        "cases",
        "machine",
        "topologies",
        "contenders",
        "models",
    ):  # a benchmark's modules import each other by these names
        sys.modules.pop(other, None)
    sys.path.insert(0, str(file.parent))
    try:
        spec = importlib.util.spec_from_file_location(f"figures_{file.parent.name}_{file.stem}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    found: Callable[[], str] = getattr(module, name)
    return found


def _source(page: Path, files: list[str], label: str) -> str:
    names = []
    for file in files:
        folder = (ROOT / file).parent
        about = folder / "README.md"
        if page.resolve().parent == folder or not about.exists():
            names.append(f"`{Path(file).name if page.resolve().parent == folder else file}`")
        else:
            names.append(f"[`{file}`]({relpath(about, page.resolve().parent)})")
    return f"*{LABELS[label]}: {', '.join(names)}.*"


def _block(page: Path, spec: str) -> str:
    first, *columns = [line.strip() for line in spec.strip().splitlines()]
    label, what, *rest = first.split(maxsplit=2)
    if label not in LABELS:
        raise ValueError(f"{page}: figures are {', '.join(LABELS)}; got '{label}'")
    if what.endswith(".json"):
        body, files = _table(what, " ".join(rest), columns), [what]
    else:
        path, _, name = what.partition(":")
        body, files = _function(path, name)().strip(), " ".join(rest).split() or [path]
    return f"{body}\n\n{_source(page, files, label)}"


def filled(text: str, page: Path) -> str:
    """The page with every block and figure as the result files have them now."""

    def block(found: re.Match[str]) -> str:
        head = found[0][: found[0].index("-->") + 3]
        return f"{head}\n\n{_block(page, found[1])}\n\n<!-- end of figures -->"

    def inline(found: re.Match[str]) -> str:
        value = _Formatter().format_field(_at(found[1], found[2]), found[3])
        return f"<!-- figure: {found[1]} {found[2]} {found[3]} -->{value}<!-- end -->"

    return _INLINE.sub(inline, _BLOCK.sub(block, text))


def pages() -> list[Path]:
    """What people read: the README, the documentation and the benchmarks' own pages."""
    patterns = ("README.md", "docs/*.md", "docs/*/*.md", "docs/reference/api/*.md", "benchmarks/*/*.md")
    found = {page for pattern in patterns for page in ROOT.glob(pattern)}
    return sorted(page for page in found if "_build" not in page.parts)


def written_by_programs(page: Path) -> bool:
    """Whether a program writes the whole page."""
    return page.name == "result.md" or page.relative_to(ROOT).as_posix() in _WHOLE_PAGES


def figure_tables(text: str) -> Iterator[tuple[int, str, bool]]:
    """(line, head, made) of every table that has figures; made: from a result file, or said to be given."""
    inside = given = False
    table: list[str] = []
    begin = 0
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if line.startswith("|"):
            begin = begin if table else number
            table.append(line)
            continue
        if table:
            if _has_figures(table):
                yield begin, table[0], inside or given
            table, given = [], False
        if line.startswith("<!-- figures:"):
            inside = True
        elif line.startswith("<!-- end of figures"):
            inside = False
        elif line.startswith("<!-- given:"):
            given = True


def _has_figures(table: list[str]) -> bool:
    """Whether a third of the cells beside the first column are numbers."""
    cells = [cell.strip() for line in table[2:] for cell in line.strip("|").split("|")[1:]]
    numbers = sum(bool(_FIGURE.match(cell.replace("*", ""))) for cell in cells)
    return len(cells) > 1 and numbers * 3 >= len(cells)


def _fill(app: Any, docname: str, source: list[str]) -> None:
    source[0] = filled(source[0], Path(app.env.doc2path(docname)))


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", _fill, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def main(arguments: Sequence[str]) -> int:
    old = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = filled(text, page)
        if new != text:
            old.append(page.relative_to(ROOT).as_posix())
            if "--check" not in arguments:
                page.write_text(new, encoding="utf-8")
    done = "is not what the result files say; run scripts/figures" if "--check" in arguments else "filled"
    for name in old:
        print(f"{name}: {done}")
    return 1 if old and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
