"""What the documents show is true: every `$ bapipe …` is run, every Python block too, every example is read."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bapipe.costs.profile import CostTable, Profile, ProfiledLayer, read_profile
from bapipe.hardware.cluster_file import read_cluster
from bapipe.models.layer_table import read_layer_table
from bapipe.models.layers import ModelRef
from bapipe.records.plan import LayerPart, Plan, PlanStage, Prediction, Rival, read_plan
from bapipe.records.run_record import read_run
from bapipe.schedule.schedule_file import LaneFile, ScheduleFile, read_schedule
from command import bapipe

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "examples/**/*.md")
    for page in ROOT.glob(pattern)
)
READERS: dict[str, Callable[[str], object]] = {
    "bapipe.cluster": read_cluster,
    "bapipe.layers": read_layer_table,
    "bapipe.plan": read_plan,
    "bapipe.profile": read_profile,
    "bapipe.run": read_run,
    "bapipe.schedule": read_schedule,
}


def blocks(kind: str) -> Iterator[tuple[str, str]]:
    """(page:line, text) of every block of this kind."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{page.relative_to(ROOT)}:{line}", match[1]


def commands() -> Iterator[tuple[str, str, str]]:
    """(page:line, command, output) of every `$ bapipe …` in a console block; others are only for reading."""
    for where, text in blocks("console"):
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            while command.endswith("\\"):
                more, _, output = output.partition("\n")
                command = command[:-1] + more
            if command.startswith("bapipe ") and "# not run" not in command:
                yield where, command, output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which the documents' relative paths lead to the examples and written files go to waste."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@pytest.mark.parametrize(
    ("where", "command", "output"), [pytest.param(*found, id=found[0]) for found in commands()]
)
def test_command(where: str, command: str, output: str, folder: Path) -> None:
    _, *arguments = shlex.split(command)
    result = _run(arguments, folder, {"COLUMNS": "96", "NO_COLOR": "1"})
    shown = [line.rstrip() for line in (result.stdout + result.stderr).rstrip().splitlines()]
    assert result.returncode in (0, 2), f"{where}: {result.stderr}"
    if output.strip():
        expected = [line.rstrip() for line in output.rstrip().splitlines()]
        assert shown == expected, where


def _run(arguments: list[str], folder: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Within this process if that is all there is to it: ranks write past it, and torch keeps what it was told."""
    if arguments[0] not in ("run", "launch", "profile", "cluster", "slices", "serve"):
        return bapipe(*arguments, folder=folder, **variables)
    return subprocess.run(
        [str(Path(sys.executable).with_name("bapipe")), *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **variables},
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(("where", "text"), [pytest.param(*found, id=found[0]) for found in blocks("python")])
def test_python(where: str, text: str, folder: Path) -> None:
    ast.parse(text)
    result = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, cwd=folder, timeout=300, check=False
    )
    assert result.returncode == 0, f"{where}: {result.stderr}"


def test_the_readmes_shell_blocks_run_one_after_the_other(folder: Path) -> None:
    found = [text for where, text in blocks("sh") if where.startswith("README.md")]
    assert found
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for text in found:
        script = ["bash", "-euo", "pipefail", "-c", text]
        environment = {**os.environ, "PATH": path, "NO_COLOR": "1"}
        done = subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{text}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def example_schema(path: Path) -> str | None:
    """bapipe.profile of an example that says that it is one; None for code and torch's CSV."""
    if path.suffix == ".json":
        schema = json.loads(path.read_text(encoding="utf-8")).get("schema")
    elif path.suffix == ".toml":
        schema = tomllib.loads(path.read_text(encoding="utf-8")).get("schema")
    else:
        return None
    return str(schema).partition("/")[0]


EXAMPLES = sorted(
    path for path in (ROOT / "examples").rglob("*") if path.is_file() and "__pycache__" not in path.parts
)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_can_be_read(path: Path) -> None:
    schema = example_schema(path)
    if path.suffix == ".csv":
        read_schedule(path)
    elif path.suffix == ".py":
        compile(path.read_text(encoding="utf-8"), str(path), "exec")
    elif path.suffix in (".json", ".toml"):
        assert schema in READERS, f"{path.name} has schema {schema}"
        READERS[schema](str(path))


def test_the_readme_names_only_commands_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for script in ("scripts/demo", "scripts/test"):
        assert script in text
        assert os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize(
    ("page", "schema"),
    [
        ("profile.md", Profile),
        ("profile.md", ProfiledLayer),
        ("profile.md", CostTable),
        ("profile.md", ModelRef),
        ("plan.md", Plan),
        ("plan.md", PlanStage),
        ("plan.md", LayerPart),
        ("plan.md", Prediction),
        ("plan.md", Rival),
        ("schedule.md", ScheduleFile),
        ("schedule.md", LaneFile),
    ],
)
def test_the_reference_names_every_key(page: str, schema: type) -> None:
    text = (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8")
    for field in dataclasses.fields(schema):
        assert f"`{field.name}`" in text, f"{page} lacks {schema.__name__}.{field.name}"
