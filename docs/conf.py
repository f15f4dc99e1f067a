"""How Sphinx builds these pages: `scripts/docs`, into docs/_build. Nothing is fetched, not by a browser either."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import bapipe

# All pages stay in memory to the end: searches for unreachable objects would take a third of the time.
gc.set_threshold(100_000, 50, 100)

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "BaPipe"
author = "the BaPipe authors"
release = version = bapipe.__version__
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "myst_parser",
    "command_reference",
    "docstrings",
    "figures",
    "repository_links",
]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
nitpicky = True
# What lies outside of bapipe (torch, numpy, the standard library) is named, not linked: nothing is fetched here.
# So are the inner parts of three packages, which document what their __all__ has.
nitpick_ignore_regex = [
    ("py:.*", r"(?!bapipe\.).*"),
    ("py:.*", r"bapipe\.(fpga|torch\.\w+)\.\w+\.\w+"),
    ("py:class", r"bapipe\.torch\.watch\.Watch"),
]

# Docstrings say `name` for code, as Markdown does; docstrings.py makes the rest of them reStructuredText.
default_role = "literal"
autosummary_generate = False
autoclass_content = "both"
autodoc_default_options = {"members": True, "undoc-members": True}
autodoc_member_order = "bysource"
autodoc_type_aliases = {name: name for name in ("Amount", "ArrayLike", "Floats", "Ints")}
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"BaPipe {release}"
html_static_path = ["_static"]
html_css_files = ["bapipe.css"]
html_copy_source = False
html_show_sphinx = html_show_copyright = False
smartquotes = False  # -- begins an option
highlight_language = "none"  # of a block that names no language: messages, drawings
html_theme_options = {"top_of_page_buttons": []}
