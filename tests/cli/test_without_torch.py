"""Without torch a command that needs it says so in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paths import REPOSITORY


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which torch cannot be found, as after `pip install bapipe`."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'torch':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(REPOSITORY / "src")))}


@pytest.mark.parametrize("arguments", [("profile", "vgg16"), ("profile", "--links"), ("cluster", "detect")])
def test_one_line_says_what_to_install(environment: dict[str, str], arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bapipe", *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "bapipe: this needs torch, which is not installed; pip install 'bapipe[torch]'\n"
    assert done.stdout == ""
