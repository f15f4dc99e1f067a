"""torchrun as `bapipe run` starts it, which ends with its parent.

`python -m bapipe.torch.launch.torchrun_agent PARENT ARGUMENTS`, with torchrun's own arguments.
"""

from __future__ import annotations

import runpy
import sys

from bapipe.torch.health.parent_death import end_with_parent

__all__: list[str] = []

if __name__ == "__main__":
    end_with_parent(int(sys.argv.pop(1)))
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
