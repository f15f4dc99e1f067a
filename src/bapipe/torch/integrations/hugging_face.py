"""Models of transformers by name, as MODEL `hf:…`: no file of one's own is needed.

`hf:gpt2` is a model type from its config class, with random weights; `hf:path/to/folder` and `hf:org/name`, which
is looked for in the local cache, have the weights of their safetensors files. Arguments (`--arg`) change the
config; `task`, `sequence` and `image_size` say what is trained, on random samples of which size, `lora` adds
adapters.
"""

from __future__ import annotations

import copy
import functools
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bapipe.errors import BaPipeError, first_line, nearest
from bapipe.models.model_spec import HUGGING_FACE
from bapipe.torch.capturing.module_state import empty_parameters
from bapipe.torch.integrations.lora_adapters import add_lora, name_without_lora
from bapipe.torch.integrations.task_batches import Batch, class_of, find_task
from bapipe.torch.runtime.materialise import open_state

__all__ = ["build", "build_hollow", "make_batch"]


def build(model: str, *, task: str | None = None, lora: str | None = None, **changes: Any) -> nn.Module:
    """The model with all of its weights; it returns its loss."""
    return _finished(model, task, lora, changes, _with_weights)


def build_hollow(
    model: str, *, task: str | None = None, lora: str | None = None, **changes: Any
) -> tuple[nn.Module, Mapping[str, Tensor]] | None:
    """The same without memory for its parameters, and what they are read from; None where that cannot be.

    That is where they are random, or where the files lack or name otherwise what the model has.
    """
    folder = _folder(model)
    if folder is None or not any(folder.glob("*.safetensors")):
        return None
    module = _finished(model, task, lora, changes, _without_weights)
    own = {
        name: tensor
        for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.state_dict().items())
        if not tensor.is_meta
    }
    adapters = {name: tensor for name, tensor in own.items() if "lora_" in name}
    saved = _SavedNames(open_state(folder), _prefix(module))
    wanted = [name for name, _ in module.named_parameters() if name not in adapters]
    if any(name not in saved for name in wanted):
        return None
    return module, ChainMap({}, dict(adapters), saved, own)  # type: ignore[arg-type]


def make_batch(
    seed: int,
    size: int,
    model: str,
    *,
    task: str | None = None,
    sequence: int | None = None,
    image_size: int | None = None,
    lora: str | None = None,
    **changes: Any,
) -> Batch:
    """Random samples for the task of the model, labels included."""
    del lora
    config = _config(model, _key({**changes, **({} if image_size is None else {"image_size": image_size})}))
    generator = torch.Generator().manual_seed(seed)
    return find_task(config, task).make(config, generator, size, sequence, image_size)


def _finished(
    model: str, task: str | None, lora: str | None, changes: dict[str, Any], make: Callable[..., nn.Module]
) -> nn.Module:
    changes.pop("sequence", None)
    config = copy.deepcopy(_config(model, _key(changes)))
    chosen = find_task(config, task)
    if not config.architectures:
        config.architectures = [class_of(chosen, config)]  # by which transformers chooses among several classes
    module = make(config, chosen.auto_class, _folder(model))
    return module if lora is None else add_lora(module, lora)


def _with_weights(config: Any, auto_class: str, folder: Path | None) -> nn.Module:
    import transformers

    chosen = getattr(transformers, auto_class)
    if folder is None:
        return _as_float(chosen.from_config(config))
    try:
        return _as_float(
            chosen.from_pretrained(folder, config=config, local_files_only=True, use_safetensors=True)
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise BaPipeError(
            f"the weights in {folder} cannot be loaded: {first_line(error)}; give a folder with config.json and "
            "safetensors files of this model"
        ) from error


def _without_weights(config: Any, auto_class: str, _: Path | None) -> nn.Module:
    import transformers

    with empty_parameters():
        return _as_float(getattr(transformers, auto_class).from_config(config))


def _as_float(module: nn.Module) -> nn.Module:
    """In fp32, whatever its files are in; --precision says what is trained in."""
    return module.float()


def _prefix(module: nn.Module) -> str:
    inner = module.get_base_model() if hasattr(module, "get_base_model") else module  # type: ignore[operator]
    return f"{getattr(inner, 'base_model_prefix', '')}."


class _SavedNames(Mapping[str, Tensor]):
    """The tensors of a folder under the names that a module has for them.

    Files are written from the module itself, or from the part of it without a head.
    """

    def __init__(self, state: Mapping[str, Tensor], prefix: str) -> None:
        self._state, self._prefix = state, prefix

    def _found(self, name: object) -> str | None:
        plain = name_without_lora(str(name))
        return next((item for item in (plain, plain.removeprefix(self._prefix)) if item in self._state), None)

    def __contains__(self, name: object) -> bool:
        return self._found(name) is not None

    def __getitem__(self, name: str) -> Tensor:
        found = self._found(name)
        if found is None:
            raise KeyError(name)
        return self._state[found]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def _key(changes: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(changes.items()))


@functools.lru_cache(maxsize=8)
def _config(model: str, changes: tuple[tuple[str, Any], ...]) -> Any:
    """The config of a type, folder or cached model with what the arguments change in it."""
    _require()
    import transformers

    folder = _folder(model)
    if folder is None:
        config = _made_with(model, changes)
    else:
        try:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise BaPipeError(
                f"{folder}/config.json cannot be read as a transformers config: {first_line(error)}; give a model "
                f"of a type that transformers {transformers.__version__} has"
            ) from error
        for name, value in changes:
            _change(config, name, value)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # of generation
    if getattr(config.get_text_config(), "pad_token_id", 0) is None:
        config.get_text_config().pad_token_id = 0  # which classifiers of sequences ask for
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    return config


def _made_with(model: str, changes: tuple[tuple[str, Any], ...]) -> Any:
    """The config of a type, made with the changes, so that what follows from them follows: a head's width, say."""
    from transformers import AutoConfig

    usual = AutoConfig.for_model(model)
    values = {name: _converted(usual, name, value) for name, value in changes if _has(usual, name)}
    size = values.get("vocab_size")
    for name in _SPECIAL:
        token = getattr(usual, name, None)
        if isinstance(size, int) and isinstance(token, int) and token >= size > 0:
            values.setdefault(name, size - 1)
    try:
        config = AutoConfig.for_model(model, **values)
        for name, value in values.items():
            if getattr(config, name) != value:  # under a name that another type has for it
                setattr(config, name, value)
    except Exception as error:
        given = ", ".join(f"{name}={str(value)[:40]}" for name, value in values.items())
        raise BaPipeError(
            f"the config of {model} refuses {given[:200]}: {' '.join(str(error).split())[:200]}; correct --arg"
        ) from error
    return config


_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
"""tokens that a smaller vocabulary may lack"""


def _has(config: Any, name: str) -> bool:
    """Whether the config has it; refuses what neither it nor a batch has."""
    if hasattr(config, name):
        return True
    if name == "image_size":
        return False  # of batches alone: a convolutional network takes any
    raise BaPipeError(
        f"the config of {config.model_type} has no '{name[:40]}'{nearest(name, config.to_dict())}; correct --arg"
    )


def _converted(config: Any, name: str, value: Any) -> Any:
    """The value as the config has it: of a list the parts, in the type of its parts."""
    old = getattr(config, name)
    if not isinstance(old, (list, tuple)):
        return value
    kinds = {type(item) for item in old} or {str}
    kind = kinds.pop() if len(kinds) == 1 else float
    try:
        return [kind(item) for item in str(value).split(",")]
    except (TypeError, ValueError) as error:
        raise BaPipeError(
            f"{name} of {config.model_type} cannot be {str(value)[:40]!r}: {first_line(error)}; correct --arg"
        ) from error


def _change(config: Any, name: str, value: Any) -> None:
    if not _has(config, name):
        return
    try:
        setattr(config, name, _converted(config, name, value))
    except (TypeError, ValueError) as error:
        raise BaPipeError(
            f"{name} of {config.model_type} cannot be {str(value)[:40]!r}: {first_line(error)}; correct --arg"
        ) from error


@functools.lru_cache(maxsize=8)
def _folder(model: str) -> Path | None:
    """Where config and weights of a model are; None for a model type."""
    _require()
    from transformers import CONFIG_MAPPING

    types = list(CONFIG_MAPPING.keys())
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return path
    if model in types:
        return None
    if path.is_dir():
        raise BaPipeError(f"{path} has no config.json; give a folder that save_pretrained() wrote")
    parts = model.split("/")
    if len(parts) != 2 or not all(parts) or model.startswith((".", "~")):
        raise BaPipeError(
            f"{HUGGING_FACE}{model[:60]} is no model type of transformers"
            f"{nearest(model, types)} and no folder; give a type such as {HUGGING_FACE}gpt2, a "
            "folder with config.json, or org/name"
        )
    return _cached(model)


def _cached(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        found = Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError, ValueError) as error:
        raise BaPipeError(
            f"{model[:80]} is not in the local Hugging Face cache; download it with 'hf download {model[:80]}', "
            f"or give the folder that it lies in as {HUGGING_FACE}path/to/folder"
        ) from error
    if not (found / "config.json").is_file():
        raise BaPipeError(
            f"the local Hugging Face cache has {model[:80]} without its config.json; download it again with "
            f"'hf download {model[:80]}'"
        )
    return found


def _require() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise BaPipeError(
            f"{HUGGING_FACE}… needs transformers, which is missing; pip install transformers"
        ) from error
