"""Every way to name a model on the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bapipe.costs.profile import Profile, write_profile
from bapipe.costs.resolve_model import load_profile
from bapipe.errors import BaPipeError
from bapipe.hardware.catalog import find_type
from paths import REPOSITORY

ROOT = REPOSITORY
GRAPH = ROOT / "tests" / "data" / "small.graph.txt"
TABLE = ROOT / "examples" / "layers-small-cnn.toml"
V100 = find_type("v100")


def load(spec: object, **options: object) -> Profile:
    arguments: dict[str, object] = {"types": [V100], "microbatches": [1, 8], **options}
    return load_profile(str(spec), **arguments)  # type: ignore[arg-type]


def test_builtin() -> None:
    profile = load("vgg16", args={"classes": 10})
    assert profile.model.name == "vgg16"
    assert profile.model.args == {"classes": 10}
    assert profile.dtype == "fp32"
    assert profile.accelerators["v100-16"].microbatches == (1, 8)
    assert load("gnmt-6", precision="fp16").dtype == "fp16"


def test_layer_table() -> None:
    profile = load(TABLE)
    assert profile.model.name == "small-cnn"
    assert profile.accelerators["v100-16"].source == "analytic"


def test_profile_file(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    written = load("alexnet")
    write_profile(written, file)
    assert load(file, microbatches=[3]) == written
    assert load(file, precision="fp32") == written
    with pytest.raises(BaPipeError, match="the profile of alexnet is of fp32, asked for bf16"):
        load(file, precision="bf16")


def test_graph() -> None:
    assert load(GRAPH, batch=4, microbatches=[4]).accelerators["v100-16"].source == "measured"
    scaled = load(GRAPH).accelerators["v100-16"]
    assert scaled.source == "analytic"
    assert scaled.microbatches == (1, 8)
    assert "scaled from batch 128" in scaled.description
    with pytest.raises(BaPipeError, match="is of fp32, asked for fp16"):
        load(GRAPH, precision="fp16")


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (
            "my.package:build",
            {},
            r"is code.*run `bapipe profile my.package:build` first and give the profile.json",
        ),
        ("resnet5", {}, r"unknown model 'resnet5' \(did you mean 'resnet50'\?\); give a built-in name \(vgg16, "),
        ("", {}, r"unknown model ''"),
        ("none.json", {}, r"there is no file none.json"),
        ("none.toml", {}, r"there is no file none.toml"),
        ("none.graph.txt", {}, r"there is no file none.graph.txt"),
        ("vgg16", {"precision": "bf16"}, r"accelerator 'v100-16' has no peak for bf16; it has fp32, fp16"),
        ("vgg16", {"args": {"imag": 3}}, r"vgg16 has no option 'imag' \(did you mean 'image'\?\)"),
        ("none.toml", {"args": {"image": 3}}, r"options such as image are for built-in models, got 'none.toml'"),
        ("vgg16", {"batch": 3}, r"a batch is given for \*.graph.txt only, got 'vgg16'"),
        ("gnmt-5", {}, r"even number of layers of at least 4, got 5"),
    ],
)
def test_bad_specs(spec: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(BaPipeError, match=message):
        load(spec, **options)


def test_no_torch_is_imported() -> None:
    code = "import sys, bapipe.costs.resolve_model, bapipe.hardware.cluster_file; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    for name in ("gpt2", "gnmt-8", "resnet18"):
        profile = load(name, types=[V100, find_type("a100")], precision="fp16")
        write_profile(profile, tmp_path / "profile.json")
        assert load(tmp_path / "profile.json").hash == profile.hash
