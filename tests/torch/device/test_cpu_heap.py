"""Freed memory is kept by the process: the same tensors again cause no page faults."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from bapipe.torch.device.cpu_heap import keep_heap
kept = keep_heap() if sys.argv[1] == "kept" else None
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
    """Some 1000 pages each, 160 tensors: as the system has it each is mapped anew; kept, nearly none is."""

    def faults(how: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", FAULTS, how], env=_environment(), capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    kept, count = faults("kept")
    _, usual = faults("usual")
    assert kept == "True"
    assert int(count) < int(usual) / 10
