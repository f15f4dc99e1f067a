"""One of three ranks that agree on the time: `clock_worker.py FOLDER RANK`; rank 2 has another, fast clock."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch.distributed as dist

from bapipe.torch.comm.rank_agreement import clock_offset

AHEAD = 1000.0


def main(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=3)
    ahead = AHEAD if rank == 2 else 0.0
    offset = clock_offset("other" if rank == 2 else "same", clock=lambda: time.time() + ahead)
    (folder / f"clock-{rank}.json").write_text(json.dumps(offset), encoding="ascii")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
