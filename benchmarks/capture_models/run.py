"""Which model types of transformers are captured, with the gradients of eager: writes result.json.

python benchmarks/capture_models/run.py                all types that result.json does not have yet
python benchmarks/capture_models/run.py led longt5     these, again

Every type that is trained for a task which BaPipe makes samples for is built with random weights from its config
class, as `hf:TYPE` builds it, and made small by the same names of config attributes for all; what is not small
then, or does not run by itself, is left out. The rest is captured, which checks outputs, loss, gradients and
buffers against eager. Each type has a process of its own, with 5 GB and 90 s.
"""

from __future__ import annotations

import collections
import json
import os
import platform
import resource
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from bapipe.errors import BaPipeError
from bapipe.torch.capturing import capture
from bapipe.torch.integrations import hugging_face
from bapipe.torch.integrations.task_batches import find_task

RESULT = Path(__file__).with_name("result.json")
BATCH, SEQUENCE = 4, 16
MEMORY, SECONDS = 5 << 30, 90
MOST_PARAMETERS = 80_000_000
_LAYERS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
)
_WIDTHS = (
    "hidden_size",
    "n_embd",
    "d_model",
    "dim",
    "emb_dim",
    "embedding_size",
    "moe_intermediate_size",
    "image_size",
)
_INNER = ("hidden_dim", "intermediate_size", "n_inner", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim")
_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
    "num_experts", "num_local_experts", "n_routed_experts",
)  # fmt: skip
SMALL = {
    **dict.fromkeys(_LAYERS, 2),
    **dict.fromkeys(_WIDTHS, 32),
    **dict.fromkeys(_INNER, 64),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "eos_token_id"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "patch_size"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    "vocab_size": 100,
    "pad_token_id": 0,
}
"""values of the attributes that a config has as whole numbers"""
LEFT = ((), ("head_dim",), ("head_dim", "num_key_value_heads"), ("image_size", "patch_size", "head_dim"))
"""attributes that are left as they are, tried one after the other until a model runs"""


def _small(name: str) -> dict[str, int]:
    config = CONFIG_MAPPING[name]()
    known = ((key, getattr(config, key, None), value) for key, value in SMALL.items())
    return {key: value for key, own, value in known if isinstance(own, int) and not isinstance(own, bool)}


def _made(name: str) -> tuple[torch.nn.Module, dict[str, Any]] | str:
    """The model and a batch, or why there is none."""
    small, why = _small(name), ""
    changes = [{key: value for key, value in small.items() if key not in left} for left in LEFT]
    sequence = {"sequence": SEQUENCE} if "vocab_size" in small else {}
    for own in (*changes, {key: value for key, value in small.items() if key in _LAYERS}):
        try:
            with torch.device("meta"):
                parameters = sum(item.numel() for item in hugging_face.build(name, **own).parameters())
            if parameters > MOST_PARAMETERS:
                why = f"{parameters / 1e6:.0f} million parameters"
                continue
            torch.manual_seed(0)
            model = hugging_face.build(name, **own)
            batch = hugging_face.make_batch(1, BATCH, name, **sequence, **own)
            model.train()
            model(**batch)
            return model, batch
        except BaPipeError as error:
            return str(error)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
    return why


def outcome(name: str) -> dict[str, Any]:
    """What came of one type."""
    made = _made(name)
    if isinstance(made, str):
        return {"outcome": "left out", "why": made.partition("\n")[0][:300]}
    begin = time.perf_counter()
    try:
        captured = capture(made[0], (), made[1])
    except BaPipeError as error:
        return {"outcome": "refused", "why": str(error)[:300]}
    except Exception as error:
        return {"outcome": "failed", "why": f"{type(error).__name__}: {error}"[:300]}
    return {
        "outcome": "captured",
        "layers": len(captured.layers),
        "any_batch": captured.dynamic,
        "leaf_modules": len(captured.opaque),
        "difference": captured.checked,
        "seconds": time.perf_counter() - begin,
    }


def _in_a_process(name: str) -> dict[str, Any]:
    """By a fork, which has transformers loaded already."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        signal.alarm(SECONDS)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        try:
            found = outcome(name)
        except BaseException as error:
            found = {"outcome": "left out", "why": f"{type(error).__name__}: {error}"[:300]}
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    if told:
        found: dict[str, Any] = json.loads(told)
        return found
    return {"outcome": "left out", "why": f"ended by signal {os.waitstatus_to_exitcode(status)}"}


def _trained(name: str) -> bool:
    """Whether it is trained for a task that BaPipe makes samples for."""
    try:
        find_task(SimpleNamespace(model_type=name, architectures=None), None)
    except BaPipeError:
        return False
    return True


def main() -> None:
    transformers.logging.set_verbosity_error()
    rows = {row["type"]: row for row in json.loads(RESULT.read_text())["rows"]} if RESULT.exists() else {}
    for name in sys.argv[1:]:
        rows.pop(name, None)
    names = [name for name in CONFIG_MAPPING_NAMES if _trained(name)]
    for name in names:
        if name in rows or (sys.argv[1:] and name not in sys.argv[1:]):
            continue
        rows[name] = {"type": name, **_in_a_process(name)}
        print(name, rows[name]["outcome"], flush=True)
        counts = collections.Counter(row["outcome"] for row in rows.values())
        result = {
            "environment": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "known": len(names),
            "types": len(rows),
            "captured": counts["captured"],
            "refused": counts["refused"],
            "failed": counts["failed"],
            "left_out": counts["left out"],
            "largest_difference": max((row.get("difference") or 0.0 for row in rows.values()), default=0.0),
            "rows": [rows[key] for key in sorted(rows)],
        }
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
