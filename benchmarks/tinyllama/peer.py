"""One rank of torch.distributed.pipelining on the same blocks: its schedules, by NCCL, stages compiled or not.

torchrun starts it; rank 0 writes what it took.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
import transformers
from model import config, token_loss
from torch import Tensor, nn

from bapipe.torch import slices
from bapipe.torch.health.parent_death import end_with_parent

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Part(nn.Module):
    """Some blocks of a model, with the embedding where they are the first and the head where they are the last."""

    def __init__(self, first: int, last: int, blocks: int, tiny: bool) -> None:
        super().__init__()
        about = config(tiny)
        about.num_hidden_layers = blocks
        whole = transformers.LlamaForCausalLM(about)
        self.embedding = whole.model.embed_tokens if first == 0 else None
        self.blocks = nn.ModuleList(whole.model.layers[first:last])
        self.norm, self.head = (whole.model.norm, whole.lm_head) if last == blocks else (None, None)
        self.rotary = whole.model.rotary_emb

    def forward(self, value: Tensor) -> Tensor:
        hidden = value if self.embedding is None else self.embedding(value)
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        embeddings = self.rotary(hidden, position_ids=positions)
        for block in self.blocks:
            made = block(hidden, attention_mask=None, position_ids=positions, position_embeddings=embeddings)
            hidden = made[0] if isinstance(made, tuple) else made
        return hidden if self.norm is None or self.head is None else self.head(self.norm(hidden))


def bounds(cuts: str | None, blocks: int, stages: int) -> list[int]:
    """Where stages begin, in blocks; without cuts equal ones, the last of which has the head besides."""
    if cuts:
        return [0, *(int(item) for item in cuts.split(",")), blocks]
    return [round(blocks * index / stages) for index in range(stages + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--schedule", default="Schedule1F1B")
    parser.add_argument("--cuts")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    end_with_parent(os.getppid())  # torchrun's ranks outlive it where it is killed
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if given.device == "cuda":
        cut = slices.status(0)
        assert cut is not None, "start the slices first"
        os.environ.update(slices.slice_environment(cut, rank))
        # As our ranks do: what is free in pieces serves a large tensor, too.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if given.device == "cuda" else "gloo")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    blocks = config(given.tiny).num_hidden_layers
    kind = getattr(pipelining, given.schedule)
    per_rank = 1 if issubclass(kind, pipelining.schedules.PipelineScheduleSingle) else 2
    stages = per_rank * world
    own = [rank, stages - 1 - rank] if "ZBV" in given.schedule else list(range(rank, stages, world))
    begin = bounds(given.cuts, blocks, stages)
    pieces, parameters = [], []
    for index in own[:per_rank]:
        with torch.device(device):
            part = Part(begin[index], begin[index + 1], blocks, given.tiny).to(DTYPES[given.dtype])
        if given.compile:
            part.compile()
        parameters += list(part.parameters())
        pieces.append(pipelining.PipelineStage(part, index, stages, device))
    schedule = kind(pieces[0] if per_rank == 1 else pieces, given.microbatches, loss_fn=token_loss)
    fused = {"fused": True} if device.type == "cuda" else {}
    optimizer = torch.optim.Adam(parameters, lr=1e-4, **fused)
    samples = given.microbatches * given.size
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(config(given.tiny).vocab_size, (samples, given.sequence), generator=generator).to(device)
    labels = words.roll(-1, 1)
    seconds, losses = [], []
    for _ in range(given.steps):
        _settle(device)
        dist.barrier()
        start = time.perf_counter()
        told: list[Tensor] = []
        args = (words,) if 0 in own else ()
        schedule.step(*args, **({"target": labels, "losses": told} if stages - 1 in own else {}))
        optimizer.step()
        optimizer.zero_grad()
        _settle(device)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        losses.append(float(torch.stack(told).mean()) if told else None)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    peaks: list[int] = [0] * world
    dist.all_gather_object(peaks, peak)
    found: list[list[float | None]] = [[]] * world
    dist.all_gather_object(found, losses)
    if rank == 0:
        own_losses = next(item for item in found if item[0] is not None)
        row = {
            "samples_per_second": samples / median(seconds[2:]),
            "seconds": seconds,
            "losses": own_losses,
            "peaks": peaks,
            "bounds": begin,
        }
        given.out.write_text(json.dumps(row))
    dist.barrier()
    os._exit(0)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
