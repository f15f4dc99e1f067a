"""One rank of our trials, as `bapipe.torch.trials.trial_worker`, that measures when it is its turn."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # before torch, which takes seconds to import
    from bapipe.torch.health.parent_death import end_with_parent, noted_parent
    from bapipe.torch.health.start_up import begin_loading

    end_with_parent(noted_parent(sys.argv))
    begin_loading()

sys.path.insert(0, str(Path(__file__).resolve().parent))

from turns import VARIABLE, Turn

from bapipe.torch.trials.trial_worker import main

if __name__ == "__main__":
    turn = Turn(os.environ.get(VARIABLE) or None)
    first = os.environ.get("RANK", "0") == "0"  # it waits for the turn, and the others for it
    status = main(on_ready=turn.take if first else None, on_done=turn.leave)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
