"""The commands that documents show, and small stand-ins for those that want a GPU, many nodes or a long time.

A page's blocks run one after the other in one folder, as a reader would type them. What a page takes for granted
(a plan, a profile, a cluster file) lies there already.
"""

from __future__ import annotations

import re
import shlex
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onnx import TensorProto

from command import bapipe
from onnx_graphs import GraphMaker
from paths import REPOSITORY

__all__ = ["PAGES", "Block", "blocks", "prepare", "shell_commands", "stand_in"]

PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "examples/**/*.md")
    for page in REPOSITORY.glob(pattern)
)
_STAND_INS = (
    (r"^bapipe profile (?:vgg16|gnmt-8)\b", "bapipe profile examples.tiny_model:build --iterations 1"),
    (r" --arg vocab_size=4096 --arg sequence=64", ""),
    (
        r"hf:gpt2 --arg n_layer=4",
        "hf:gpt2 --arg n_layer=2 --arg n_embd=32 --arg n_head=2 --arg vocab_size=64 --iterations 1",
    ),
    (
        r"hf:llama --arg num_hidden_layers=4",
        "hf:llama --arg num_hidden_layers=2 --arg hidden_size=32 --arg intermediate_size=32 --arg vocab_size=64 "
        "--arg num_attention_heads=2 --arg num_key_value_heads=2 --iterations 1",
    ),
    (r"--device cuda", "--device cpu --threads 1"),
    (r"--hosts .* -o", """--hosts a,b --via "env HOST={host} sh -c" --between "1 Gb/s" -o"""),
    (r" --slice-of \d+ --slice-memory \w+", ""),
    (r"--micro-batch [\d,]+", "--micro-batch 4,8"),
    (r"--arg blocks=12", "--arg blocks=2 --iterations 1"),
    (r"--global-batch 256", "--global-batch 32"),
    (r"^bapipe cluster detect\b", "bapipe cluster detect --ranks 2 --threads 1"),
    (r"--ranks 4", "--ranks 2"),
    (r"(?<!launch )--steps \d+", "--steps 2"),
    (r"--every \d+", "--every 1"),
    (r"^bapipe auto (?=my_model)", "bapipe auto --ranks 2 --micro-batch 8,16 --race 1 --arg width=64 "),
    (r"^bapipe auto\b(?=.* --steps)", "bapipe auto --ranks 2 --micro-batch 8,16 --race 1 --arg hidden=64"),
    (r"^(bapipe what-if .*--sweep \S+\.\.\S+)", r"\1 --points 2"),
    (r"^scripts/demo$", "bash -n scripts/demo"),
)
"""what a document has -> what a test runs in its place: the same options with a model that takes seconds"""
_GIVEN = {
    "plan.json": "examples/plan.json",
    "run.json": "examples/run.json",
    "profile.json": "examples/tiny-profile.json",
    "cluster.toml": "examples/cluster-two-cpus.toml",
}
"""files that pages take for granted"""
_OF_SEQUENCES = """
import torch
from torch import nn

def build(length=8):
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)), (torch.rand(4, length, 16),)
"""
"""the reader's own model, where a page does not show one"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    kind: str
    """sh, console, python, …; empty where the page does not say"""
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*kinds: str) -> Iterator[Block]:
    """Every block of these kinds, page by page; one inside a list is indented there, not here."""
    for page in PAGES:
        opened: tuple[int, str] | None = None
        lines: list[str] = []
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.lstrip().startswith("```"):
                lines.append(line)
            elif opened is None:
                opened, lines = (number, line.lstrip(" `")), []
            else:
                if opened[1] in kinds:
                    name = page.relative_to(REPOSITORY).as_posix()
                    yield Block(
                        page=name, line=opened[0], kind=opened[1], text=textwrap.dedent("\n".join(lines)) + "\n"
                    )
                opened = None


def shell_commands(text: str) -> Iterator[str]:
    """The lines of a block, joined where they end in a backslash, without their comments."""
    for line in text.replace("\\\n", " ").splitlines():
        command = re.sub(r"\s+#(?: .*)?$", "", line.removeprefix("$ ")).strip()
        if command:
            yield command


def stand_in(command: str) -> str:
    """What a test runs for it."""
    for pattern, text in _STAND_INS:
        command = re.sub(pattern, text, command)
    return command


def prepare(page: str, folder: Path) -> None:
    """Lay out what the page's commands take for granted, its own Python blocks included."""
    for name in ("examples", "scripts"):
        (folder / name).symlink_to(REPOSITORY / name)
    for name, source in _GIVEN.items():
        shutil.copy(REPOSITORY / source, folder / name)
    shown = next(
        (block.text for block in blocks("python") if block.page == page and "def build(" in block.text), ""
    )
    (folder / "my_model.py").write_text(shown or _OF_SEQUENCES, encoding="utf-8")
    (folder / "train.py").write_text("", encoding="utf-8")
    if any("model.onnx" in block.text for block in blocks("sh") if block.page == page):
        graph = GraphMaker()
        made = graph.linear(graph.linear("x", "up", 16, 64), "down", 64, 16)
        graph.save(folder / "model.onnx", {"x": (TensorProto.FLOAT, ("batch", "sequence", 16))}, made)
    if any("other.json" in block.text for block in blocks("sh") if block.page == page):
        made = "plan profile.json --cluster cluster.toml --global-batch 64 --schedule gpipe --out other.json"
        assert bapipe(*shlex.split(made), folder=folder).returncode == 0
