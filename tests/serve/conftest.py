"""One server for all tests of this folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from paths import REPOSITORY
from served import Served, serving

EXAMPLES = REPOSITORY / "examples"


@pytest.fixture(scope="session")
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to serve, with a secret beside it and links that lead there."""
    outside = tmp_path_factory.mktemp("around")
    folder = outside / "served"
    folder.mkdir()
    for name in (
        "tiny-profile.json",
        "cluster-4-v100.toml",
        "cluster-two-cpus.toml",
        "layers-small-cnn.toml",
        "plan.json",
    ):
        shutil.copy(EXAMPLES / name, folder / name)
    shutil.copy(EXAMPLES / "cluster-4-v100.toml", outside / "secret.toml")
    shutil.copy(EXAMPLES / "tiny-profile.json", outside / "secret.json")
    (folder / "link.toml").symlink_to(outside / "secret.toml")
    (folder / "link.json").symlink_to("../secret.json")
    (folder / "loop.toml").symlink_to("loop.toml")
    (folder / "near.toml").symlink_to("cluster-4-v100.toml")
    (folder / "deeper").mkdir()
    shutil.copy(EXAMPLES / "cluster-4-v100.toml", folder / "deeper" / "inner.toml")
    (folder / "-dash.toml").write_text('schema = "bapipe.cluster/1"\n', encoding="utf-8")
    (folder / "broken.toml").write_text('schema = "bapipe.cluster/1"\nname = [[[\n', encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def served(own_folder: Path) -> Iterator[Served]:
    with serving("--folder", str(own_folder)) as running:
        yield running
