"""The reference pages have what the package has: every command, every public name, every file format."""

from __future__ import annotations

import importlib
import inspect
import re
from types import ModuleType

import click
import pytest

import bapipe
import bapipe.fpga
import bapipe.torch
from bapipe.cli import COMMANDS
from bapipe.hardware.catalog import load_catalog
from bapipe.models.builtin import BUILTIN_NAMES
from loaded_files import load_file
from paths import REPOSITORY

pytest.importorskip("sphinx", reason="the documentation needs Sphinx: pip install -e '.[dev]'")

ROOT = REPOSITORY
API = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference" / "api").glob("*.md")}
INTERNAL = {"bapipe.calibrated", "bapipe.links", "bapipe.slices", "bapipe.trials"}
"""what BaPipe's own processes leave for one another"""


def extension(name: str) -> ModuleType:
    """One of docs/_ext."""
    return load_file(ROOT / "docs" / "_ext" / f"{name}.py", f"docs_{name}")


def leaves(command: click.Command, path: str) -> dict[str, click.Command]:
    if not isinstance(command, click.Group):
        return {path: command}
    found: dict[str, click.Command] = {}
    for name, inner in command.commands.items():
        found |= leaves(inner, f"{path} {name}")
    return found


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_and_option_is_in_the_reference(name: str) -> None:
    module, attribute = COMMANDS[name]
    text = extension("command_reference").reference()
    for path, command in leaves(getattr(importlib.import_module(module), attribute), f"bapipe {name}").items():
        section = text.partition(f"## {path}\n")[2].partition("\n## ")[0]
        assert section, path
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                options = [line for line in section.splitlines() if line.startswith("````{option}")]
                assert any(set(parameter.opts) <= set(re.split(r"[ ,]+", line)) for line in options), (
                    parameter.opts
                )
            elif isinstance(parameter, click.Argument):
                assert parameter.make_metavar(click.Context(command)).strip("[].") in section


def test_help_is_escaped_and_examples_stay_as_they_are() -> None:
    @click.command("x", help="Write *all* of <it>.\n\n\b\nExample:\n  bapipe x a_b * --c")
    def command() -> None: ...

    section = extension("command_reference")._section("bapipe x", command, click.Context(command))
    assert r"Write \*all\* of \<it\>." in section
    assert "```text\nbapipe x a_b * --c\n```" in section


@pytest.mark.parametrize("name", sorted(set(bapipe.__all__) - {"__version__"}))
def test_a_public_name_is_documented_where_it_lives(name: str) -> None:
    home = bapipe._MODULE_OF.get(name)
    if home is None:
        assert f".. autofunction:: bapipe.{name}\n" in API["index"]
        return
    assert f"~{home}.{name}\n" in API["index"], f"{name} is not in the table of docs/reference/api/index.md"
    block = next(
        (part for text in API.values() for part in automodules(text) if part.startswith(f"{home}\n")), None
    )
    assert block is not None, f"no page has .. automodule:: {home}"
    only = re.search(r":members: (.+)", block)
    assert only is None or name in only[1].split(", ")


def automodules(text: str) -> list[str]:
    """Each automodule with its options."""
    return re.findall(r"^\.\. automodule:: (\S+\n(?:   .*\n)*)", text, re.MULTILINE)


def test_every_name_of_bapipe_torch_is_documented() -> None:
    for name in bapipe.torch.__all__:
        kind = "autofunction" if inspect.isfunction(getattr(bapipe.torch, name)) else "autoclass"
        assert f".. {kind}:: bapipe.torch.{name}\n" in API["torch"]


def test_bapipe_fpga_is_documented_whole() -> None:
    assert "bapipe.fpga\n   :imported-members:\n" in automodules(API["fpga"])


def test_the_guide_names_every_built_in_model_and_the_catalogue_every_type() -> None:
    guide = (ROOT / "docs" / "guide" / "start.md").read_text(encoding="utf-8")
    assert not [name for name in BUILTIN_NAMES if f"`{name}`" not in guide]
    clusters = (ROOT / "docs" / "reference" / "cluster.md").read_text(encoding="utf-8")
    assert not [name for name in load_catalog() if f"`{name}`" not in clusters]


def test_every_file_format_is_in_the_table() -> None:
    text = (ROOT / "docs" / "reference" / "formats.md").read_text(encoding="utf-8")
    schemas = {
        found
        for path in (ROOT / "src" / "bapipe").rglob("*.py")
        for found in re.findall(r'"(bapipe\.[a-z_]+/\d+)"', path.read_text(encoding="utf-8"))
    }
    assert len(schemas) > 6
    for schema in sorted(schemas):
        if schema.partition("/")[0] not in INTERNAL:
            assert f"`{schema}`" in text, schema


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (["One line."], ["One line."]),
        (
            ["Text:", "", "    drawn", "      so", "", "after"],
            ["Text:", "", "::", "", "    drawn", "      so", "", "after"],
        ),
        (["Text:", "- a", "  goes on", "- b"], ["Text:", "", "- a", "  goes on", "- b"]),
        (["- a", "", "  goes on"], ["- a", "", "  goes on"]),
        (["A sentence", "    that goes on"], ["A sentence", "    that goes on"]),
    ],
)
def test_docstrings_become_restructured_text(written: list[str], read: list[str]) -> None:
    assert extension("docstrings").restructured(written) == read


def test_the_built_pages_ask_for_nothing_from_elsewhere() -> None:
    pages = sorted((ROOT / "docs" / "_build" / "html").rglob("*.html"))
    if not pages:
        pytest.skip("scripts/docs has not built the pages")
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loads = re.findall(r"<(?:script|img|iframe|source)[^>]* src=\"([^\"]+)\"", text)
        loads += re.findall(r"<link[^>]* href=\"([^\"]+)\"", text)
        assert not [target for target in loads if "//" in target], page.name
