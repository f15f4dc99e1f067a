"""Measure: what every layer of a module costs on a device of this machine."""

from bapipe.torch.profiler.assemble_profile import Agreement, agreement, to_profile
from bapipe.torch.profiler.layer_memory import predicted_peak
from bapipe.torch.profiler.measure_settings import MeasureSettings
from bapipe.torch.profiler.measurement import Measurement, read_measurement
from bapipe.torch.profiler.profile_module import Profiled, profile_model, profile_module

__all__ = [
    "Agreement",
    "MeasureSettings",
    "Measurement",
    "Profiled",
    "agreement",
    "predicted_peak",
    "profile_model",
    "profile_module",
    "read_measurement",
    "to_profile",
]
