"""What all tests share: hypothesis without chance, so that a red test stays red; Ctrl+C; which files go first."""

from __future__ import annotations

import signal

import pytest
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

# Where the tests run in the background of a shell, or by nohup, they and all that they start would not be
# interrupted, or not hear that their terminal was closed.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

LONG = (
    "tests/distributed/",
    "tests/torch/",
    "tests/test_documents.py",
    "tests/browser/",
    "tests/serve/",
    "tests/fpga/",
)
"""files that take long, most of them because they start processes and wait for them"""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: with `-n`, one that is handed out last would leave the other processes without work."""

    def place(item: pytest.Item) -> int:
        return next((index for index, name in enumerate(LONG) if item.nodeid.startswith(name)), len(LONG))

    items.sort(key=place)
