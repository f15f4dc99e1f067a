"""A loop with Lightning Fabric: its processes, loggers and optimizer around a plan.

torchrun --nproc-per-node 2 examples/train_fabric.py plan.json --out trained
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

try:
    from lightning.fabric import Fabric
except ImportError:
    from lightning_fabric import Fabric

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
    # The pipeline moves what its stages need: to Fabric all ranks are on CPUs, also where they compute on GPUs.
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=int(os.environ["LOCAL_WORLD_SIZE"]))
    fabric.launch()
    losses = []
    with Pipeline(lambda: tiny_gpt2.build(float64=options.float64), options.plan) as pipe:
        plain = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        optimizer = fabric.setup_optimizers(plain)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(plain, options.steps)
        # Not set up: Fabric would deal the batches out to ranks, and each needs its part of every one.
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
                fabric.log("loss", losses[-1], step=pipe.steps)
                fabric.print(f"step {pipe.steps - 1}  loss {losses[-1]:.9f}", flush=True)
                if pipe.steps == (options.stop or options.steps):
                    break
        checkpoints.save(data=loader.state_dict())
        checkpoints.close()
    return losses


if __name__ == "__main__":
    main()
