"""Names by which a file reaches into torch's private parts."""

from __future__ import annotations

import ast
from pathlib import Path

__all__ = ["private_names"]

_PUBLIC_UNDERSCORES = {"sys._getframe"}


def private_names(file: Path) -> list[str]:
    """Names that reach into torch through an underscore: imports, and attributes of anything but `self`."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [part for part in parts if part.startswith("_")]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("torch.") and "._" in alias.name]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            text = ast.unparse(node)
            if not text.startswith("self.") and text not in _PUBLIC_UNDERSCORES:
                found.append(text)
    return found
