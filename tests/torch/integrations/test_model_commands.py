"""Models of transformers by their configs: profile, plan and run with --check, without a line of Python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install bapipe[torch]")
pytest.importorskip("transformers", reason="needs transformers: pip install bapipe[dev]")

from bapipe.records.plan import read_plan

LLAMA = (
    "hf:llama", "num_hidden_layers=2", "hidden_size=32", "intermediate_size=64", "num_attention_heads=4",
    "num_key_value_heads=2", "vocab_size=100", "sequence=16",
)  # fmt: skip
MODELS = {
    "gpt2": ("hf:gpt2", "n_layer=2", "n_embd=32", "n_head=4", "vocab_size=100", "sequence=16"),
    "llama": LLAMA,
    "t5": ("hf:t5", "num_layers=2", "d_model=32", "d_ff=64", "num_heads=4", "d_kv=8", "vocab_size=100",
           "sequence=16"),
    "vit": ("hf:vit", "num_hidden_layers=2", "hidden_size=32", "intermediate_size=64", "num_attention_heads=4",
            "image_size=32", "patch_size=8"),
    "peft": LLAMA,
}  # fmt: skip
"""MODEL and what follows --arg"""


def _bapipe(*arguments: str, folder: Path) -> str:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("bapipe")), *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "NO_COLOR": "1"},
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "gpt2" else [pytest.mark.slow]) for name in MODELS]
)
def test_profile_plan_and_run_with_check(name: str, tmp_path: Path) -> None:
    if name == "peft":
        pytest.importorskip("peft", reason="needs peft: pip install peft")
    model, *changes = MODELS[name]
    options = [word for change in changes for word in ("--arg", change)]
    lora = ("--lora", "r=4") if name == "peft" else ()
    _bapipe("profile", model, *options, *lora, "--micro-batch", "2", "-o", "profile.json", folder=tmp_path)
    _bapipe(
        "plan", "profile.json", "--cluster", "2xcpu", "--stages", "2", "--global-batch", "8", "--micro-batch", "2",
        "--out", "plan.json", folder=tmp_path,
    )  # fmt: skip
    assert len(read_plan(tmp_path / "plan.json").stages) == 2
    for engine in ("bapipe",) if name == "gpt2" else ("bapipe", "torch"):
        text = _bapipe("run", "plan.json", "--steps", "2", "--check", "--engine", engine, folder=tmp_path)
        found = re.search(r"gradients differ from one process .* by at most (\S+) .*, losses by (\S+);", text)
        assert found is not None, text
        assert max(map(float, found.groups())) < 1e-4
