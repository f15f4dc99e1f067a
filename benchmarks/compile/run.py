"""A stage of Llama blocks with the head: eager, captured, under torch.compile, and compiled layer by layer.

    python benchmarks/compile/run.py            on a GPU, some two minutes; writes result.json and result.md here
    python benchmarks/compile/run.py --tiny     a rehearsal with a tiny model, on a CPU if there is no GPU

Each line is one forward and backward of one micro-batch, with gradients added to those that are there.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from bapipe.torch.capturing import Captured, Stage, capture
from bapipe.torch.compiling.compiled_layers import CompiledLayers, CompiledPrograms, StageLayers
from bapipe.torch.compiling.layer_program import DeferredGradients

HERE = Path(__file__).parent
BLOCKS = 6
MICROBATCH = 4
WARMUP = 3
SAMPLES = 12
CASES = (("bf16", 1024), ("fp32", 256))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Phases = Callable[[], list[Callable[[], None]]]
"""the phases of one step, fresh each time"""


class Blocks(nn.Module):
    """Llama blocks with embedding and head; returns the loss."""

    def __init__(self, tiny: bool) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 5632, "vocab_size": 32000}
        heads = {"num_attention_heads": 32, "num_key_value_heads": 4}
        if tiny:
            sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(num_hidden_layers=BLOCKS, **sizes, **heads)
        self.model = transformers.LlamaForCausalLM(config)
        self.vocabulary = config.vocab_size

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(input_ids=ids, use_cache=False).logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(phases: Phases, device: torch.device, samples: int) -> dict[str, Any]:
    """Median ms of all phases together and of each, ms of the host, peak GB."""
    totals, each, hosts = [], [], []
    peak = None
    for index in range(WARMUP + samples):
        if device.type == "cuda" and index == WARMUP:
            torch.cuda.reset_peak_memory_stats(device)
        synchronize(device)
        begun = time.perf_counter()
        for phase in phases():
            phase()
        issued = time.perf_counter()
        synchronize(device)
        if index >= WARMUP:
            totals.append(time.perf_counter() - begun)
            hosts.append(issued - begun)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 1e9
    for _ in range(samples):
        marks = []
        for phase in phases():
            synchronize(device)
            begun = time.perf_counter()
            phase()
            synchronize(device)
            marks.append(time.perf_counter() - begun)
        each.append(marks)
    return {
        "ms": median(totals) * 1e3,
        "host_ms": median(hosts) * 1e3,
        "phases_ms": [median(column) * 1e3 for column in zip(*each, strict=True)],
        "peak_gb": peak,
    }


def plain(run: Callable[[], Any]) -> Phases:
    """Forward, backward."""

    def phases() -> list[Callable[[], None]]:
        made: list[Tensor] = []

        def forward() -> None:
            found = run()
            made.append(found[0] if isinstance(found, tuple) else found)

        def backward() -> None:
            made.pop().backward()  # type: ignore[no-untyped-call]

        return [forward, backward]

    return phases


def apart(run: Callable[[], Any], layers: CompiledLayers) -> Phases:
    """Forward, input gradients, weight gradients."""

    def phases() -> list[Callable[[], None]]:
        deferred: list[DeferredGradients] = []
        forward, backward = plain(run)()

        def deferring() -> None:
            layers.deferred = deferred
            forward()
            layers.deferred = None

        def weights() -> None:
            for item in deferred:
                item.run()

        return [deferring, backward, weights]

    return phases


def captured_stage(captured: Captured, device: torch.device) -> Stage:
    return captured.stage(0, len(captured.layers) - 1, device=device).to(device)


def case(name: str, length: int, device: torch.device, *, tiny: bool, samples: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    module = Blocks(tiny).to(DTYPES[name])
    ids = torch.randint(module.vocabulary, (MICROBATCH, length))
    labels = torch.randint(module.vocabulary, (MICROBATCH, length))
    captured = capture(module, (ids, labels), check=False)
    module.to(device)
    ids, labels = ids.to(device), labels.to(device)
    rows: list[dict[str, Any]] = []

    def measure(what: str, make: Callable[[], tuple[Phases, dict[str, Any]]]) -> None:
        row: dict[str, Any] = {"dtype": name, "length": length, "what": what}
        try:
            begun = time.perf_counter()
            phases, about = make()
            for phase in phases():
                phase()
            synchronize(device)
            row |= {"first_s": time.perf_counter() - begun, **timed(phases, device, samples), **about}
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:500]
        rows.append(row)
        print(json.dumps(row), flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def eager() -> Any:
        return plain(lambda: module(ids, labels)), {}

    def stage_of() -> tuple[Stage, Callable[[], Any]]:
        stage = captured_stage(captured, device)
        leaves = [ids, labels]
        return stage, lambda: stage(*(leaves[root.index] for root in stage.stage_spec.roots))

    def as_captured() -> Any:
        return plain(stage_of()[1]), {}

    def under_torch() -> Any:
        torch.compiler.reset()
        compiled = torch.compile(module)
        return plain(lambda: compiled(ids, labels)), {}

    programs = CompiledPrograms(device, split=True)

    def compiled_stage() -> tuple[Callable[[], Any], CompiledLayers]:
        stage, _ = stage_of()
        layers = StageLayers(first=0, last=len(captured.layers) - 1, parts={}, store={})
        compiled = programs.attach(stage, captured, layers)
        leaves = [ids, labels]
        return lambda: stage(*(leaves[root.index] for root in stage.stage_spec.roots)), compiled

    def about() -> dict[str, Any]:
        return {"programs": programs.compiled, "layers": len(captured.layers), "failed": programs.failed}

    def ours() -> Any:
        run, _ = compiled_stage()
        run()
        return plain(run), about()

    def ours_split() -> Any:
        run, layers = compiled_stage()
        run()
        return apart(run, layers), about()

    for what, make in (
        ("eager", eager),
        ("captured", as_captured),
        ("compiled, whole backward", ours),
        ("compiled, split backward", ours_split),
        ("torch.compile", under_torch),
    ):
        measure(what, make)
    return rows


def table(rows: list[dict[str, Any]], machine: str) -> str:
    lines = [
        f"Forward and backward of {BLOCKS} Llama blocks with embedding, head and loss, micro-batch {MICROBATCH},",
        f"on {machine}. Phases: forward, backward; of a split one forward, input and weight gradients.",
        "",
        "| dtype, length | what | ms | to eager | phases ms | host ms | peak GB | first run s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        key = f"{row['dtype']}, {row['length']}"
        if "error" in row:
            lines.append(f"| {key} | {row['what']} | failed: {row['error'][:80]} | | | | | |")
            continue
        base = next((item for item in rows if item["what"] == "eager" and item["dtype"] == row["dtype"]), row)
        gain = f"{base['ms'] / row['ms']:.2f}x" if "ms" in base else ""
        phases = ", ".join(f"{value:.1f}" for value in row["phases_ms"])
        peak = "" if row["peak_gb"] is None else f"{row['peak_gb']:.2f}"
        lines.append(
            f"| {key} | {row['what']} | {row['ms']:.1f} | {gain} | {phases} | {row['host_ms']:.1f} | {peak} "
            f"| {row['first_s']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, and write nothing")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of result.json and result.md")
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), help="only this one; what result.json has of others stays"
    )
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("highest")
    machine = f"{torch.cuda.get_device_name()}" if device.type == "cuda" else "a CPU"
    rows: list[dict[str, Any]] = []
    if given.dtype is not None and (given.out / "result.json").exists() and not given.tiny:
        known = json.loads((given.out / "result.json").read_text())["rows"]
        rows = [row for row in known if row["dtype"] != given.dtype]
    for name, length in CASES:
        if given.dtype in (None, name):
            rows += case(
                name, 16 if given.tiny else length, device, tiny=given.tiny, samples=3 if given.tiny else SAMPLES
            )
            if not given.tiny:
                found = {"machine": machine, "torch": torch.__version__, "rows": rows}
                (given.out / "result.json").write_text(json.dumps(found, indent=1) + "\n")
                (given.out / "result.md").write_text(table(rows, f"{machine}, torch {torch.__version__}"))
    print(table(rows, machine))


if __name__ == "__main__":
    main()
