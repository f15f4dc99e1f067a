"""Phases of a longer piece of work, in order, each with its seconds."""

from __future__ import annotations

import pytest

from bapipe.torch.profiler.phase_times import PhaseTimes


def test_phases_are_listed_in_order_and_added_up_also_where_one_fails() -> None:
    phases = PhaseTimes()
    with phases.phase("capture"):
        pass
    with pytest.raises(ValueError, match="too long"), phases.phase("measure"):
        raise ValueError("too long")
    with phases.phase("capture"):
        pass
    assert list(phases.seconds) == ["capture", "measure"]
    assert all(seconds > 0 for seconds in phases.seconds.values())
    phases.seconds.update(capture=1.5, measure=0.25)
    assert str(phases) == "capture 1.5 s, measure 250 ms"
