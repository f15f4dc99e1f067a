"""What all tests share: hypothesis without chance, so that a red test is red again tomorrow."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "bapipe",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("bapipe")
