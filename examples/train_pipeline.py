"""A training loop of your own, on as many processes as the plan has ranks:

torchrun --nproc-per-node 2 examples/train_pipeline.py examples/plan.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_model

from bapipe.torch import Pipeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", help="plan.json of examples/tiny_model.py")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait for a silent rank")
    options = parser.parse_args()

    torch.set_num_threads(1)
    with Pipeline(tiny_model.build, options.plan, tiny_model.loss, timeout=options.timeout) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
        for step in range(options.steps):
            inputs, targets = tiny_model.make_batch(step, pipe.plan.global_batch)
            loss = pipe.step(inputs.float(), targets)
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if pipe.rank == 0:
                print(f"step {step}  loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
