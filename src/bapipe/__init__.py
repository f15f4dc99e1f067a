"""BaPipe: find the fastest way to spread DNN training over your accelerators, see why, and run it.

    from bapipe import Costs, make_schedule
    from bapipe.simulate import simulate

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
    from bapipe.cluster import Cluster
    from bapipe.errors import BaPipeError
    from bapipe.lowering import Network
    from bapipe.model import Model
    from bapipe.plan import Plan, read_plan, write_plan
    from bapipe.profile import Profile, read_profile, write_profile
    from bapipe.schedule.actions import Action, Kind, Schedule
    from bapipe.schedule.check import check, require_valid
    from bapipe.schedule.files import read_schedule, write_schedule
    from bapipe.schedule.orders import make_schedule
    from bapipe.simulate import Costs
    from bapipe.summary import Summary, summarise
    from bapipe.timeline import Timeline

_HOME = {
    "bapipe.cluster": ("Cluster",),
    "bapipe.errors": ("BaPipeError",),
    "bapipe.lowering": ("Network",),
    "bapipe.model": ("Model",),
    "bapipe.plan": ("Plan", "read_plan", "write_plan"),
    "bapipe.profile": ("Profile", "read_profile", "write_profile"),
    "bapipe.schedule.actions": ("Action", "Kind", "Schedule"),
    "bapipe.schedule.check": ("check", "require_valid"),
    "bapipe.schedule.files": ("read_schedule", "write_schedule"),
    "bapipe.schedule.orders": ("make_schedule",),
    "bapipe.simulate": ("Costs",),
    "bapipe.summary": ("Summary", "summarise"),
    "bapipe.timeline": ("Timeline",),
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
