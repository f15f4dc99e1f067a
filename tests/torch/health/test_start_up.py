"""What a process loads at its start is never searched for unreachable objects; what comes later is."""

from __future__ import annotations

import gc

from bapipe.torch.health.start_up import begin_loading, end_loading


def test_objects_made_while_loading_stay_and_later_ones_are_searched() -> None:
    class Loop:
        def __init__(self) -> None:
            self.itself = self

    begin_loading()
    try:
        assert not gc.isenabled()
        loaded = Loop()
    finally:
        end_loading()
    assert gc.isenabled()
    later = Loop()
    known = gc.get_objects()
    assert any(item is later for item in known)
    assert all(item is not loaded for item in known)
