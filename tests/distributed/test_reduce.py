"""Gradients larger than a bucket are summed in pieces, and none is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

RANKS = 3
CODE = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from bapipe.torch.runtime import gradient_sync

gradient_sync.BUCKET_BYTES = 40
folder, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
parameters = [nn.Parameter(torch.zeros(size)) for size in (3, 101, 4, 7, 2)]
reducer = gradient_sync.Reducer(parameters, dist.group.WORLD)
reducer.start()
used = [item for index, item in enumerate(parameters) if index != 4 and (index != 3 or rank == 1)]
sum((item * torch.arange(len(item)) * (rank + 1)).sum() for item in used).backward()
reducer.finish()
for index, item in enumerate(parameters):
    if index == 4:
        assert item.grad is None, "no rank has a gradient of it"
        continue
    weight = 2 if index == 3 else sum(range(1, ranks + 1))
    assert torch.equal(item.grad, weight * torch.arange(len(item), dtype=torch.float32)), (index, item.grad)
pieces = [len(part._works) for part in [gradient_sync._Sum(parameters[:2], dist.group.WORLD)] if part.wait()]
assert pieces == [11], pieces  # 104 elements, ten at a time
dist.barrier()
del reducer  # which holds the group
dist.destroy_process_group()
"""


def test_a_sum_larger_than_a_bucket(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, str(tmp_path), str(rank), str(RANKS)],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS, said
