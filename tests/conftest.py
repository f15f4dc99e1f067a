"""What all tests share: hypothesis without chance, a red test stays red; Ctrl+C; gc; which files go first."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from example_counts import examples
from warm_python import USUAL_START, warm_starts

settings.register_profile(
    "bapipe",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("bapipe")

# Where the tests run in the background of a shell, or by nohup, they and all that they start would not be
# interrupted, or not hear that their terminal was closed.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Torch's threads that wait for each other leave the cores to others: those that spin, in several processes
# at once, take as much time as all that they compute. Read when torch is loaded, here and in what tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Torch, transformers and the tests themselves stay for good: searches for unreachable objects among them take a
# fifth of the time of tests that capture models.
gc.set_threshold(50_000, 20, 20)


def pytest_collection_finish() -> None:
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cold", action="store_true", help="start every process anew, as a user does")


@pytest.fixture(scope="module")
def warm(request: pytest.FixtureRequest) -> Iterator[None]:
    """In a file that uses this, the processes that tests start begin with torch loaded; see warm_python.py."""
    with contextlib.nullcontext() if request.config.getoption("cold") else warm_starts():
        yield


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that uses this starts every process anew, as a user does, wherever it is."""
    monkeypatch.setattr(subprocess, "Popen", USUAL_START)


@pytest.fixture
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process only."""
    import torch.distributed as dist

    store = tmp_path_factory.mktemp("process-group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


LONG = (
    "tests/distributed/",
    "tests/torch/",
    "tests/test_documents.py",
    "tests/browser/",
    "tests/serve/",
    "tests/fpga/",
)
"""files that take long, most of them because they start processes and wait for them"""


TOGETHER = ("tests/browser/", "tests/reproduce/", "tests/serve/")
"""folders whose files share a browser, computed tables or a server: one process runs all of them"""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """With `--dist loadfile`, as usual but for the folders that stay together; None for any other way."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFileOrFolder(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return next((name for name in TOGETHER if nodeid.startswith(name)), nodeid.split("::", 1)[0])

    return ByFileOrFolder(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: with `-n`, one that is handed out last would leave the other processes without work."""

    def place(item: pytest.Item) -> int:
        return next((index for index, name in enumerate(LONG) if item.nodeid.startswith(name)), len(LONG))

    items.sort(key=place)
