"""A loop with Accelerate: its processes, printing, trackers and optimizer around a plan.

torchrun --nproc-per-node 2 examples/train_accelerate.py plan.json --out trained
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_gpt2

from bapipe.torch import Checkpoints, Pipeline


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, and return every step's loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", help="plan.json of examples/tiny_gpt2.py")
    parser.add_argument("--out", type=Path, default="trained", help="folder for checkpoints")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stop", type=int, help="leave after so many steps, to go on with --resume")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--float64", action="store_true")
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)
    gpus = torch.cuda.is_available()
    # A pipeline's ranks agree over gloo, also where they compute on GPUs.
    groups = [InitProcessGroupKwargs(backend="cpu:gloo,cuda:nccl")] if gpus else []
    # Ranks have stages, not copies: a scheduler steps once for all of them.
    accelerator = Accelerator(cpu=not gpus, step_scheduler_with_optimizer=False, kwargs_handlers=groups)
    losses = []
    with Pipeline(lambda: tiny_gpt2.build(float64=options.float64), options.plan) as pipe:
        plain = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        optimizer = accelerator.prepare(plain, device_placement=[False])
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(plain, options.steps)
        # Not prepared: Accelerate would deal the batches out to ranks, and each needs its part of every one.
        loader = pipe.data_loader(tiny_gpt2.Sentences(64), shuffle=True, drop_last=True)
        checkpoints = Checkpoints(pipe, options.out, optimizer=plain, scheduler=scheduler)
        loaded = checkpoints.load() if options.resume else None
        if loaded is not None:
            loader.load_state_dict(loaded.data)
        while pipe.steps < (options.stop or options.steps):
            for batch in loader:
                losses.append(pipe.step(batch))
                pipe.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                accelerator.log({"loss": losses[-1]}, step=pipe.steps)
                accelerator.print(f"step {pipe.steps - 1}  loss {losses[-1]:.9f}", flush=True)
                if pipe.steps == (options.stop or options.steps):
                    break
        checkpoints.save(data=loader.state_dict())
        checkpoints.close()
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main()
