"""Models too large for this machine, captured on it: each in a process of its own, to see its memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("transformers", reason="transformers is not installed; it is part of the test extra")

PROGRAM = """
import cProfile, gc, json, os, pstats, resource
gc.disable()
import torch, transformers
from bapipe.torch.capturing import capture, empty_parameters
gc.freeze()
gc.enable()
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
with {context}:
    module = {module}
tokens = torch.zeros(2, {sequence}, dtype=torch.long)
inputs = {{"input_ids": tokens, "labels": tokens}}
profile = cProfile.Profile()
captured = profile.runcall(capture, module, (), inputs) if {counted} else capture(module, (), inputs)
known = pstats.Stats(profile).stats.items() if {counted} else ()
stage = captured.stage(*{stage})
print(json.dumps({{
    "calls": sum(calls for (file, *_), (_, calls, *_) in known if os.sep + "bapipe" + os.sep in file),
    "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    "layers": [layer.name for layer in captured.layers],
    "parameters": captured.to_model().parameters,
    "flops": sum(layer.forward_flops for layer in captured.layers),
    "crossing": [[value.shape(1) for value in layer.sent] for layer in captured.layers],
    "checked": captured.checked,
    "stage": [name for name, parameter in stage.named_parameters() if parameter.is_meta],
    "buffers": [name for name, buffer in stage.named_buffers() if buffer.is_meta],
}}))
"""


def run(*, counted: bool = False, **parts: object) -> dict:
    """What a capture in a process of its own finds; with `counted`, how often BaPipe's functions were called."""
    program = PROGRAM.format(counted=counted, **parts)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def llama(blocks: int) -> str:
    return (
        "transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=8192, intermediate_size=28672, "
        f"num_hidden_layers={blocks}, num_attention_heads=64, num_key_value_heads=8, vocab_size=32000))"
    )


@pytest.mark.parametrize("blocks", [2, pytest.param(80, marks=pytest.mark.slow)])
def test_llama_70b_without_its_parameters(blocks: int) -> None:
    found = run(context="empty_parameters()", module=llama(blocks), sequence=4096, stage=(1, 2))
    assert found["gib"] < 8
    assert found["parameters"] == 2 * 32000 * 8192 + 8192 + blocks * (
        2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
    )
    assert len(found["layers"]) == 2 + 2 * blocks
    assert all(shapes == [[1, 4096, 8192]] for shapes in found["crossing"][:-1])
    assert found["checked"] is None
    assert "model.layers.0.self_attn.q_proj.weight" in found["stage"]
    assert not found["buffers"], "buffers such as inv_freq keep their values"
    # 6 floating-point operations a parameter and token are 2 in the forward; the rest is attention
    tokens = 4096
    weights = found["parameters"] - 32000 * 8192 - 8192 * (2 * blocks + 1)
    assert found["flops"] == pytest.approx(2 * tokens * weights + 4 * tokens**2 * 8192 * blocks)


@pytest.mark.parametrize("blocks", [8, *(pytest.param(count, marks=pytest.mark.slow) for count in (12, 48))])
def test_gpt2_with_many_blocks_checked_in_linear_work(blocks: int) -> None:
    few, many = (
        run(
            context="torch.device('cpu')",
            module="transformers.GPT2LMHeadModel(transformers.GPT2Config("
            f"n_layer={count}, n_embd=64, n_head=4, vocab_size=1000, bos_token_id=1, eos_token_id=2))",
            sequence=32,
            stage=(0, 8),
            counted=True,
        )
        for count in (4, blocks)
    )
    assert few["calls"] > 10_000
    assert many["calls"] < 1.25 * blocks / 4 * few["calls"], f"{blocks // 4} times the blocks"
    assert len(many["layers"]) == 2 * blocks + 2
    assert many["checked"] < 1e-4
