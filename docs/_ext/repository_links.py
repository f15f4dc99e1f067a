"""Links from a page to another part of the repository.

Pages are read in the repository as well as here, so their links are those of the repository. docs/benchmarks is a
link to benchmarks, hence a page that names ../../benchmarks/fpga/README.md means one of ours, and what
benchmarks/… calls ../../profiles lies above docs, not in it. Files become downloads; folders stay text.
"""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

__all__ = ["RepositoryLinks", "setup"]


class RepositoryLinks(SphinxTransform):
    """Point links that leave docs/ at what they mean."""

    default_priority = 5

    def apply(self) -> None:
        for link in list(self.document.findall(addnodes.pending_xref)):
            if link.get("reftype") == "myst":
                self._point(link)

    def _point(self, link: addnodes.pending_xref) -> None:
        docs = Path(self.env.srcdir)
        target = str(link["reftarget"])
        if link.get("refdomain") == "doc":
            if Path(target).is_absolute() and Path(target).is_relative_to(docs.parent):
                link["reftarget"] = Path(target).relative_to(docs.parent).as_posix()
            return
        page = Path(self.env.doc2path(self.env.docname)).resolve()
        if (page.parent / target.partition("#")[0]).is_dir():
            link.replace_self(nodes.inline("", "", *link.children))


def _entitle(app: Sphinx, docname: str, source: list[str]) -> None:  # noqa: ARG001
    """Give a benchmark's table that comes without a title one, as every page needs it."""
    if docname.startswith("benchmarks/") and not source[0].lstrip().startswith("# "):
        folder, name = docname.split("/")[-2:]
        source[0] = f"# {folder}: {name}\n\n{source[0]}"


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _entitle)
    app.add_transform(RepositoryLinks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
