"""What the documents show is true: every command and Python block is run, every example is read."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from bapipe.cli import cli
from bapipe.costs.profile import CostTable, Profile, ProfiledLayer, read_profile
from bapipe.hardware.cluster_file import read_cluster
from bapipe.models.layer_table import read_layer_table
from bapipe.models.layers import ModelRef
from bapipe.records.plan import Alternative, LayerPart, Plan, PlanStage, Prediction, read_plan
from bapipe.records.run_record import read_run
from bapipe.schedule.schedule_file import LaneFile, ScheduleFile, read_schedule
from command import bapipe
from shown_commands import PAGES, Block, blocks, prepare, shell_commands, stand_in

pytestmark = pytest.mark.usefixtures("warm")

ROOT = Path(__file__).parents[1]
READERS: dict[str, Callable[[str], object]] = {
    "bapipe.cluster": read_cluster,
    "bapipe.layers": read_layer_table,
    "bapipe.plan": read_plan,
    "bapipe.profile": read_profile,
    "bapipe.run": read_run,
    "bapipe.schedule": read_schedule,
}


def commands() -> Iterator[tuple[str, str, str]]:
    """(page:line, command, output) of every `$ bapipe …` in a console block; others are only for reading."""
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            while command.endswith("\\"):
                more, _, output = output.partition("\n")
                command = command[:-1] + more
            if command.startswith("bapipe ") and "# not run" not in command:
                yield block.where, command, output


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
    """Within this process if that is all there is to it: ranks write past it, and torch keeps its settings."""
    alone = arguments[0] not in ("run", "launch", "profile", "cluster", "slices", "serve")
    if alone or (arguments[0] == "launch" and "--print" in arguments):
        return bapipe(*arguments, folder=folder, **variables)
    return subprocess.run(
        [str(Path(sys.executable).with_name("bapipe")), *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PATH": _path(), **variables},
        timeout=300,
        check=False,
    )


def _path() -> str:
    """Where the commands of this environment are found first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


@pytest.mark.parametrize("block", list(blocks("python")), ids=lambda block: block.where)
def test_python(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a module of its own within this process: most of a block's time would be the import of torch."""
    module = types.ModuleType("shown_in_a_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    exec(compile(block.text, block.where, "exec"), vars(module))


QUICK = {"README.md", "docs/guide/compare.md", "docs/guide/mixed.md"}
"""pages that are run in every test; the options of all are parsed in every test"""
ONLY_PARSED = ("bapipe slices ", "torchrun --nproc-per-node 4 examples/digits_pipedream.py")
"""what wants CUDA MPS, or trains for minutes; tests/gpu and tests/distributed run them"""


def _pages_with_commands() -> Iterator[object]:
    for page in dict.fromkeys(block.page for block in blocks("sh")):
        if page == "README.md" or (page.startswith("docs/") and not page.startswith("docs/benchmarks/")):
            yield pytest.param(page, marks=[] if page in QUICK else [pytest.mark.slow])


@pytest.mark.parametrize("page", list(_pages_with_commands()))
def test_the_shell_blocks_of_a_page_run_one_after_the_other(page: str, tmp_path: Path) -> None:
    prepare(page, tmp_path)
    for block in blocks("sh"):
        for command in shell_commands(block.text) if block.page == page else ():
            if not command.startswith(ONLY_PARSED):
                done = _run_line(stand_in(command), tmp_path)
                assert done.returncode == 0, f"{block.where}: {stand_in(command)}\n{done.stdout}{done.stderr}"


def _run_line(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command, _, target = command.partition(" > ")
    words = shlex.split(command)
    if words[0] == "bapipe":
        done = _run(words[1:], folder, {"NO_COLOR": "1"})
        if target:
            (folder / target).write_text(done.stdout, encoding="utf-8")
        return done
    environment = {**os.environ, "PATH": _path(), "NO_COLOR": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def _every_bapipe_line() -> Iterator[object]:
    """Also those of console blocks and of blocks that are only for reading."""
    for block in blocks("sh", "console", ""):
        for command in shell_commands(block.text):
            command = command.removeprefix(".venv/bin/")
            if command.startswith("bapipe "):
                yield pytest.param(command, id=f"{block.where} {command[:40]}")


@pytest.mark.parametrize("command", list(_every_bapipe_line()))
def test_the_options_of_every_shown_command_exist(command: str) -> None:
    context = click.Context(cli, info_name="bapipe")
    name, words = "bapipe", shlex.split(command)[1:]
    found: click.Command = cli
    while isinstance(found, click.Group):
        name, inner, words = found.resolve_command(context, words)
        assert inner is not None
        found = inner
    found.make_context(name, words, parent=context)


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
        ("plan.md", Alternative),
        ("schedule.md", ScheduleFile),
        ("schedule.md", LaneFile),
    ],
)
def test_the_reference_names_every_key(page: str, schema: type) -> None:
    text = (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8")
    for field in dataclasses.fields(schema):
        assert f"`{field.name}`" in text, f"{page} lacks {schema.__name__}.{field.name}"
