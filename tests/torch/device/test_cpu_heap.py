"""Freed memory is kept by the process: the same tensors again cause no page faults."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from bapipe.torch.device.cpu_heap import keep_heap
kept = keep_heap()
torch.set_num_threads(1)
def step():
    made = [torch.empty(2**20).fill_(1.0) for _ in range(8)]  # 4 MiB each
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator is Linux's")
def test_the_same_tensors_again_cause_no_page_faults() -> None:
    """160 tensors of 1024 pages each: kept, the process maps hardly more than the first eight."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=_environment(), capture_output=True, text=True, check=True
    )
    kept, count = done.stdout.split()
    assert kept == "True"
    assert int(count) < 160 * 1024 / 10
