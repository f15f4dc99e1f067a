"""A real Chromium without a window, and pages opened in it."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bapipe.costs.resolve_model import load_profile
from bapipe.hardware.cluster_file import read_cluster
from bapipe.planner import Request, explore, make_plan
from bapipe.records.plan import write_plan
from bapipe.reporting.html.document import make_subject, render_report
from report_plans import planned, run_of

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,900",
)
HOW = "the report's browser tests need it: `apt-get install chromium chromium-driver` and `pip install selenium`"


def chromium() -> tuple[str, str]:
    """Paths of the browser and its driver; skips the test, saying how to get them, where they are missing."""
    if importlib.util.find_spec("selenium") is None:
        pytest.skip(f"selenium is not installed; {HOW}")
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((path for path in map(shutil.which, names) if path), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip(f"Chromium or its driver is not installed; {HOW}")
    return browser, driver


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    binary, driver = chromium()
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = binary
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = Chrome(options=options, service=Service(driver))
    chrome.set_script_timeout(60)
    try:
        yield chrome
    finally:
        chrome.quit()


class Opened:
    """A page in the browser, and what it did since it was opened."""

    def __init__(self, chrome: Any, path: Path) -> None:
        self.chrome = chrome
        self.path = path

    def script(self, text: str, *arguments: object) -> Any:
        return self.chrome.execute_script(text, *arguments)

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.chrome.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()));"
        )

    def emulate(self, **features: str) -> None:
        pairs = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": pairs})
        self.settle()

    def resize(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.settle()

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.chrome.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses that the page asked for, its own file left out."""
        found = []
        for entry in self.chrome.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return [url for url in found if not url.startswith("data:") and url.split("#")[0] != self.path.as_uri()]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[[Path], Opened]]:
    def opened(path: Path) -> Opened:
        for log in ("browser", "performance"):
            browser.get_log(log)
        browser.get(path.as_uri())
        page = Opened(browser, path)
        page.settle()
        return page

    yield opened
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="session")
def straight(folder: Path) -> Path:
    plan, profile = planned("straight")
    write_plan(plan, folder / "plan.json")
    (folder / "straight.html").write_text(render_report(make_subject(plan, profile=profile)), encoding="utf-8")
    return folder / "straight.html"


@pytest.fixture(scope="session")
def with_run(folder: Path) -> Path:
    plan, profile = planned("zero bubble")
    subject = make_subject(plan, record=run_of(plan), profile=profile)
    (folder / "run.html").write_text(render_report(subject), encoding="utf-8")
    return folder / "run.html"


@pytest.fixture(scope="session")
def big(folder: Path) -> Path:
    """64 stages × 512 micro-batches: 65,536 forwards and backwards."""
    cluster = read_cluster("64xv100")
    profile = load_profile("gpt2-xl", types=list(cluster.types.values()), microbatches=[1])
    request = Request(global_batch=512, microbatch=1, stages=64, schedule="1f1b-so")
    plan = make_plan(explore(profile, cluster, request))
    assert (len(plan.stages), plan.microbatches) == (64, 512)
    (folder / "big.html").write_text(render_report(make_subject(plan, profile=profile)), encoding="utf-8")
    return folder / "big.html"
