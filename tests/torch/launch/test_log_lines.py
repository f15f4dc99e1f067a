"""What the library logs, as lines of a command."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from bapipe.torch.launch.log_lines import print_log


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    library = logging.getLogger("bapipe")
    kept = library.handlers[:], library.level, library.propagate
    yield
    library.handlers[:], library.level, library.propagate = kept


def test_warnings_go_to_standard_error_and_the_rest_to_who_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[str] = []
    print_log()
    print_log(shown.append)
    logger = logging.getLogger("bapipe.torch.somewhere")
    logger.info("step %d", 3)
    logger.warning("a checkpoint was skipped")
    logger.debug("not said")
    assert shown == ["step 3"]
    assert capsys.readouterr() == ("", "bapipe: a checkpoint was skipped\n")


def test_without_a_display_only_warnings_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_log()
    logging.getLogger("bapipe").info("step 3")
    logging.getLogger("bapipe").error("rank 1 failed")
    assert capsys.readouterr() == ("", "bapipe: rank 1 failed\n")
