"""PipeDream's published profiles, restated in tests/data, as the graph.txt that PipeDream writes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from bapipe.costs.pipedream_graph import read_pipedream_graph
from bapipe.costs.profile import Profile
from paths import REPOSITORY

__all__ = ["PUBLISHED", "published_profile"]

_DATA = json.loads((REPOSITORY / "tests" / "data" / "pipedream_profiles.json").read_text(encoding="utf-8"))
PUBLISHED = tuple(name for name in _DATA if name != "source")


def published_profile(name: str, *, batch: int) -> Profile:
    """The profile as BaPipe reads it, taken to be measured at that batch."""
    lines = [
        f"node{number} -- {layer} -- forward_compute_time={forward}, backward_compute_time={backward}, "
        f"activation_size={str(size).replace(',', ';')}, parameter_size={weights}"
        for number, layer, forward, backward, size, weights in _DATA[name]["nodes"]
    ]
    lines += [f"\tnode{before} -- node{after}" for before, after in _DATA[name]["edges"]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.graph.txt"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return read_pipedream_graph(path, batch=batch)
