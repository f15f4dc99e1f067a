"""Memory kept in pages: free in one piece, and still there for other processes to map.

Each test has processes of its own, because an allocator is switched for good.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]

HOLES = """
import sys, torch
from bapipe.torch.device.allocator import keep_in_pages
device = torch.device("cuda", 0)
if sys.argv[1] == "pages":
    keep_in_pages(device)
torch.cuda.set_per_process_memory_fraction(4e9 / torch.cuda.get_device_properties(device).total_memory, device)
large = torch.empty(3600 * 10**6, dtype=torch.uint8, device=device)
del large
held = [torch.empty(180 * 10**6, dtype=torch.uint8, device=device) for _ in range(20)]
del held[::2]
try:
    torch.empty(1300 * 10**6, dtype=torch.uint8, device=device)
    print("fits")
except torch.OutOfMemoryError:
    print("does not fit")
"""

SHARED = """
import os, subprocess, sys, torch
from bapipe.torch.device.allocator import keep_in_pages, mappable
from bapipe.torch.comm.ipc_handles import share_memory
device = torch.device("cuda", 0)
keep_in_pages(device)
before = torch.ones(10**7, device=device)
buffer = mappable(2**21, device).fill_(7)
after = torch.ones(10**7, device=device)
torch.cuda.synchronize()
kinds = [item["is_expandable"] for item in torch.cuda.memory_snapshot()]
print(sorted(set(kinds)), flush=True)
child = (
    "import sys; from bapipe.torch.comm.ipc_handles import map_memory; "
    "print(set(map_memory(bytes.fromhex(sys.argv[1])).tolist()))"
)
subprocess.run([sys.executable, "-c", child, share_memory(buffer).hex()], check=True)
"""


def said(code: str, *arguments: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split("\n")


@pytest.mark.parametrize(("kept", "outcome"), [("pages", "fits"), ("segments", "does not fit")])
def test_what_is_free_in_pieces_is_free_in_one(kept: str, outcome: str) -> None:
    assert said(HOLES, kept)[0] == outcome


def test_another_process_maps_memory_of_one_that_keeps_its_own_in_pages() -> None:
    assert said(SHARED)[:2] == ["[False, True]", "{7}"]
