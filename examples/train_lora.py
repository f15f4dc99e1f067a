"""A loop of one's own that trains adapters of PEFT (LoRA) on a frozen model by a plan.

torchrun --nproc-per-node 2 examples/train_lora.py plan.json --out trained
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_gpt2

from bapipe.torch import Checkpoints, Pipeline


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, and return every step's loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", help="plan.json of examples/tiny_gpt2.py with --arg adapters=true")
    parser.add_argument("--out", type=Path, default="trained", help="folder for checkpoints")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stop", type=int, help="leave after so many steps, to go on with --resume")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--float64", action="store_true")
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)
    losses = []
    with Pipeline(lambda: tiny_gpt2.build(float64=options.float64, adapters=True), options.plan) as pipe:
        adapters = [parameter for parameter in pipe.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(adapters, lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
        loader = pipe.data_loader(tiny_gpt2.Sentences(64), shuffle=True, drop_last=True)
        checkpoints = Checkpoints(pipe, options.out, optimizer=optimizer, scheduler=scheduler)
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
                if pipe.rank == 0:
                    print(f"step {pipe.steps - 1}  loss {losses[-1]:.9f}", flush=True)
                if pipe.steps == (options.stop or options.steps):
                    break
        checkpoints.save(data=loader.state_dict())
        checkpoints.close()
    return losses


if __name__ == "__main__":
    main()
