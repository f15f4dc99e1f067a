"""BaPipe: find the fastest way to spread DNN training over your accelerators, see why, and run it.

    from bapipe import Costs, make_schedule
    from bapipe.simulator.simulate import simulate

    timeline = simulate(make_schedule("1f1b-so", 4, 16), Costs.of(4, forward=10, backward=20, transfer=5))
    print(timeline.time, timeline.bubble)

The names below are the public API; each is loaded when it is first used, so `import bapipe` is immediate. The
function `simulate` stays in its module, whose name it would hide.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__all__ = [
    "Action",
    "BaPipeError",
    "Cluster",
    "Costs",
    "Kind",
    "Model",
    "Network",
    "Plan",
    "Profile",
    "Schedule",
    "Summary",
    "Timeline",
    "__version__",
    "check",
    "make_schedule",
    "read_plan",
    "read_profile",
    "read_schedule",
    "require_valid",
    "summarise",
    "write_plan",
    "write_profile",
    "write_schedule",
]

__version__ = "0.1.0"

if TYPE_CHECKING:
    from bapipe.costs.profile import Profile, read_profile, write_profile
    from bapipe.errors import BaPipeError
    from bapipe.hardware.cluster import Cluster
    from bapipe.models.layers import Model
    from bapipe.records.plan import Plan, read_plan, write_plan
    from bapipe.schedule.actions import Action, Kind, Schedule
    from bapipe.schedule.generators import make_schedule
    from bapipe.schedule.schedule_file import read_schedule, write_schedule
    from bapipe.schedule.validate import check, require_valid
    from bapipe.simulator.lowering import Network
    from bapipe.simulator.simulate import Costs
    from bapipe.simulator.summary import Summary, summarise
    from bapipe.simulator.timeline import Timeline

_HOME = {
    "bapipe.hardware.cluster": ("Cluster",),
    "bapipe.errors": ("BaPipeError",),
    "bapipe.simulator.lowering": ("Network",),
    "bapipe.models.layers": ("Model",),
    "bapipe.records.plan": ("Plan", "read_plan", "write_plan"),
    "bapipe.costs.profile": ("Profile", "read_profile", "write_profile"),
    "bapipe.schedule.actions": ("Action", "Kind", "Schedule"),
    "bapipe.schedule.validate": ("check", "require_valid"),
    "bapipe.schedule.schedule_file": ("read_schedule", "write_schedule"),
    "bapipe.schedule.generators": ("make_schedule",),
    "bapipe.simulator.simulate": ("Costs",),
    "bapipe.simulator.summary": ("Summary", "summarise"),
    "bapipe.simulator.timeline": ("Timeline",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'bapipe' has no attribute '{name}'")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
