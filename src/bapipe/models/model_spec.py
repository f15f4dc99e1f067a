"""MODEL of the command line: what a text names. The one place that knows every way to name a model.

Nothing is read or imported here: the reader of each kind does that (`costs.resolve_model` for costs,
`torch.inputs.build_model` for a module).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bapipe.errors import BaPipeError, nearest
from bapipe.models.builtin import BUILTIN_NAMES, Argument, is_builtin
from bapipe.models.layers import ModelRef

__all__ = ["HUGGING_FACE", "ZOO", "ModelSpec", "model_ref", "parse_arguments", "parse_model_spec"]

ZOO = {
    "vgg16": "bapipe.torch.zoo.vgg:build_vgg16",
    "resnet50": "bapipe.torch.zoo.resnet:build_resnet50",
    "gnmt-8": "bapipe.torch.zoo.gnmt:build_gnmt",
    "gpt": "bapipe.torch.zoo.gpt:build_gpt",
    "unet": "bapipe.torch.zoo.unet:build_unet",
}
"""PyTorch modules by name; gnmt-L works for every even L of at least 4"""
HUGGING_FACE = "hf:"
"""before a model type, folder or cached name of the transformers library"""
_HUGGING_FACE_BUILD = "bapipe.torch.integrations.hugging_face:build"
_CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_BUILDERS = ("build", "build_model", "create", "create_model", "get_model", "make", "make_model", "model")
"""names of functions that say nothing of the model; it then bears its file's"""
_GNMT = re.compile(r"gnmt-?([0-9]{1,4})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What a text names where costs are asked for."""

    text: str
    kind: Literal["builtin", "profile", "layer table", "graph", "code"]
    """a table by name, profile.json, a TOML layer table, PipeDream's graph.txt, or a function that builds a
    module"""


def parse_model_spec(text: str) -> ModelSpec:
    """What the text names, by its form alone; refuses what has none of the forms."""
    text = text.strip()
    lower = text.lower()
    if lower.startswith(HUGGING_FACE):
        return ModelSpec(text=text, kind="code")
    if lower.endswith(".json"):
        return ModelSpec(text=text, kind="profile")
    if lower.endswith(".toml"):
        return ModelSpec(text=text, kind="layer table")
    if lower.endswith(".txt"):
        return ModelSpec(text=text, kind="graph")
    if lower.endswith(".onnx"):
        raise BaPipeError(
            f"'{text[:100]}' is an ONNX graph; run `bapipe import-onnx {text[:100]} -o layers.toml` first and "
            "give the layer table that it writes"
        )
    if is_builtin(text):
        return ModelSpec(text=text, kind="builtin")
    if _CALLABLE.fullmatch(text) or lower in ZOO:
        return ModelSpec(text=text, kind="code")
    _refuse_script(text)
    raise BaPipeError(
        f"unknown model '{text[:60]}'{nearest(text, BUILTIN_NAMES)}; give a built-in name "
        f"({', '.join(BUILTIN_NAMES)}), a profile.json, a layer table .toml, a .graph.txt or "
        f"package.module:function or {HUGGING_FACE}type of transformers"
    )


def model_ref(text: str, args: Mapping[str, Argument] | None = None) -> ModelRef:
    """The function that builds the module which the text names: its own, or that of a model of the zoo."""
    text = text.strip()
    lower, given = text.lower(), dict(args or {})
    if lower.startswith(HUGGING_FACE):
        return _hugging_face_ref(text[len(HUGGING_FACE) :].strip(), given)
    match = _GNMT.fullmatch(lower)
    if match:
        return ModelRef(name=text, ref=ZOO["gnmt-8"], args={"layers": int(match[1]), **given})
    if lower in ZOO:
        return ModelRef(name=lower, ref=ZOO[lower], args=given)
    if ":" in text:
        module, _, function = text.partition(":")
        name = module.rpartition(".")[2] if function in _BUILDERS else function
        return ModelRef(name=name or text, ref=text, args=given)
    _refuse_script(text)
    raise BaPipeError(
        f"unknown model '{text[:60]}'{nearest(text, ZOO)}; give package.module:function, "
        f"{HUGGING_FACE}type of transformers or {', '.join(ZOO)}"
    )


def _refuse_script(text: str) -> None:
    """A file of code is named without its ending, and with the function in it."""
    if text.lower().endswith(".py"):
        module = text[:-3].strip("./").replace("/", ".")
        raise BaPipeError(
            f"'{text[:60]}' is a file of code; name its function that builds the model, as {module[:60]}:build"
        )


def _hugging_face_ref(model: str, given: dict[str, Argument]) -> ModelRef:
    if not model:
        raise BaPipeError(f"{HUGGING_FACE} is followed by a model type, folder or org/name, as {HUGGING_FACE}gpt2")
    if "model" in given:
        raise BaPipeError(f"'model' is what follows {HUGGING_FACE}, got --arg model too; leave that out")
    name = model.rstrip("/").rpartition("/")[2] or model
    return ModelRef(name=name, ref=_HUGGING_FACE_BUILD, args={"model": model, **given})


def parse_arguments(texts: Sequence[str]) -> dict[str, Argument]:
    """key=value texts; whole numbers, numbers, true and false become what they look like."""
    found: dict[str, Argument] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise BaPipeError(f"an argument looks like key=value, got '{text[:60]}'")
        found[key] = _plain(value)
    return found


def _plain(text: str) -> Argument:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
