"""Docstrings as they are written here, as the reStructuredText that autodoc reads.

They are plain text in Markdown's manner: `code`, lists that follow their sentence at once, and indented lines for
examples and drawings. Only the last two need help.
"""

from __future__ import annotations

from sphinx.application import Sphinx

__all__ = ["restructured", "setup"]


def restructured(lines: list[str]) -> list[str]:
    """The same lines with indented blocks as literal blocks and an empty line before every list."""
    found: list[str] = []
    inside = item = False
    """in an indented block; in a list, whose own lines are indented too"""
    for line in lines:
        indent = len(line) - len(line.lstrip())
        before = found[-1] if found else ""
        if not line.strip():
            found.append("")
            continue
        starts_item = line.lstrip().startswith(("- ", "* ")) and not inside
        if starts_item and not item and before:
            found.append("")
        if starts_item:
            item = True
        elif indent == 0:
            item = inside = False
        elif not item and not inside and not before:
            found += ["::", ""]
            inside = True
        found.append(line)
    return found


def _restructure(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:  # noqa: ARG001
    lines[:] = restructured(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _restructure)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
