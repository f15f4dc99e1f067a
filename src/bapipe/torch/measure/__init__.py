"""Measure: what every layer of a module costs on a device of this machine."""

from bapipe.torch.measure.assemble import Agreement, agreement, to_profile
from bapipe.torch.measure.memory import predicted_peak
from bapipe.torch.measure.profiling import Profiled, profile_model, profile_module
from bapipe.torch.measure.record import Measurement, read_measurement
from bapipe.torch.measure.settings import Settings
from bapipe.torch.measure.source import ZOO, find_model

__all__ = [
    "ZOO",
    "Agreement",
    "Measurement",
    "Profiled",
    "Settings",
    "agreement",
    "find_model",
    "predicted_peak",
    "profile_model",
    "profile_module",
    "read_measurement",
    "to_profile",
]
