"""The app in a real browser, against a real server: from the pick to the download, and back by the URL."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

from bapipe.io.files import content_hash
from bapipe.records.plan import read_plan
from bapipe.units import format_seconds
from served import BAPIPE, Served, serving

EXAMPLES = Path(__file__).parents[2] / "examples"
START = {"model": "gnmt-8", "cluster": "4xv100-16", "global_batch": "64", "schedule": "1f1b-so"}
Open = Callable[[str], Any]
PATIENCE = 120.0
"""seconds; what has not happened by then does not happen"""


@pytest.fixture(scope="module")
def app_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    for name in ("tiny-profile.json", "cluster-two-cpus.toml"):
        shutil.copy(EXAMPLES / name, folder / name)
    profile = json.loads((folder / "tiny-profile.json").read_text(encoding="utf-8"))
    profile["model"]["name"] = "</script><script>alert(1)</script>"
    (folder / "<img src=x>.json").write_text(json.dumps(profile), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def server(browser: Any, app_folder: Path) -> Iterator[Served]:  # noqa: ARG001  # skips where there is no browser
    with serving("--folder", str(app_folder)) as running:
        yield running


class AppPage:
    """The app in the browser, and what it did since it was opened."""

    def __init__(self, chrome: Any, served: Served) -> None:
        self.chrome, self.served = chrome, served

    def script(self, text: str, *arguments: object) -> Any:
        return self.chrome.execute_script(text, *arguments)

    def settled(self) -> None:
        """Wait until the answer to what the knobs say is shown."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if self.script(
                "return typeof app !== 'undefined' && app.idle"
                " && (app.shown !== null || !document.getElementById('error').hidden);"
            ):
                return
            time.sleep(0.05)
        raise AssertionError(f"no answer: {self.script('return document.body.innerText;')[:500]}")

    def turn(self, knob: str, value: object) -> None:
        """Set a knob as a user does, and wait for the answer."""
        self.script(
            "const [id, value] = arguments, knob = document.getElementById(id);"
            "if (knob.type === 'checkbox') knob.checked = value; else knob.value = value;"
            "for (const kind of ['input', 'change']) knob.dispatchEvent(new Event(kind, {bubbles: true}));",
            knob,
            value,
        )
        self.settled()

    def click(self, name: str) -> None:
        self.script("document.getElementById(arguments[0]).click();", name)
        self.settled()

    def figure(self, key: str) -> float:
        return float(self.script("return document.querySelector(arguments[0]).value;", f"#figure-{key} data"))

    def query(self) -> dict[str, str]:
        found = parse_qs(urlsplit(self.chrome.current_url).query)
        return {name: values[0] for name, values in found.items()}

    def plan(self) -> dict[str, Any]:
        query = {name: value for name, value in self.query().items() if name != "pin"}
        found: dict[str, Any] = self.served.ask("/files/plan.json", query).json
        return found

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.chrome.get_log("browser")]

    def other_requests(self) -> list[str]:
        """Addresses elsewhere that were asked for."""
        found = []
        for entry in self.chrome.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        assert found
        return [url for url in found if not url.startswith((self.served.url, "data:"))]


@pytest.fixture
def open_app(browser: Any, server: Served) -> Iterator[Open]:
    def opened(query: str = "") -> AppPage:
        browser.get("about:blank")
        for log in ("browser", "performance"):
            browser.get_log(log)
        browser.get(server.url + query)
        page = AppPage(browser, server)
        page.settled()
        return page

    yield opened
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def address(values: dict[str, str]) -> str:
    return "?" + urlencode(values)


def test_from_the_pick_to_the_download(open_app: Open, tmp_path: Path) -> None:
    page = open_app()
    page.turn("model", "gnmt-8")
    page.turn("global_batch", "64")
    page.turn("schedule", "1f1b-so")
    first = page.plan()
    assert page.query() == START
    assert page.figure("time") == first["prediction"]["time"]

    page.turn("link_bandwidth", "1.6GB/s")
    page.turn("count", "3")
    second = page.plan()
    assert second["cluster"]["name"] == "3xv100-16"
    assert second["prediction"]["time"] != first["prediction"]["time"]
    for key in ("time", "throughput", "gap", "lower_bound", "bubble", "exposed_communication"):
        assert page.figure(key) == second["prediction"][key]
    answer = page.script("return document.getElementById('answer').innerText;")
    assert format_seconds(second["prediction"]["time"]) in answer
    rows = page.script("return document.querySelectorAll('#alternatives-table tbody tr').length;")
    assert rows == 1 + len(second["alternatives"])
    drawn = page.script("const t = bapipe.view.timelines[0]; return [t.kind.length, bapipe.view.stats.rects];")
    assert drawn[0] >= 2 * len(second["stages"]) * second["microbatches"]
    assert drawn[1] > 0

    folder = tmp_path / "downloads"
    behaviour = {"behavior": "allow", "downloadPath": str(folder)}
    page.chrome.execute_cdp_cmd("Page.setDownloadBehavior", behaviour)
    for name in ("plan.json", "cluster.toml", "command.sh"):
        page.click(f"download-{name.replace('.', '-')}")
    end = time.monotonic() + PATIENCE
    wanted = {"plan.json", "cluster.toml", "command.sh"}
    while time.monotonic() < end and not (folder.is_dir() and wanted <= {file.name for file in folder.iterdir()}):
        time.sleep(0.05)
    downloaded = read_plan(folder / "plan.json")
    assert downloaded.prediction.time == page.figure("time")
    command = (folder / "command.sh").read_text(encoding="utf-8").strip()
    assert command == page.script("return document.getElementById('command').innerText;")
    subprocess.run([BAPIPE, *shlex.split(command)[1:]], cwd=tmp_path, check=True, capture_output=True)
    assert content_hash(read_plan(tmp_path / "plan.json")) == content_hash(downloaded)
    assert page.errors() == []
    assert page.other_requests() == []


def test_two_plans_side_by_side(open_app: Open) -> None:
    page = open_app(address(START))
    a = page.plan()
    page.click("pin")
    page.turn("schedule", "gpipe")
    page.turn("stages", "2")
    b = page.plan()
    cells = page.script(
        "return [...document.querySelectorAll('#compare-table tbody tr')].map(row =>"
        "  [...row.cells].map(cell => [cell.innerText, Number(cell.querySelector('data')?.value ?? NaN)]));"
    )
    rows = {row[0][0]: row[1:] for row in cells}
    times = [plan["prediction"]["time"] for plan in (a, b)]
    assert [cell[1] for cell in rows["time per global batch"]] == [*times, times[1] - times[0]]
    assert rows["time per global batch"][2][0].endswith("A is better" if times[0] < times[1] else "B is better")
    assert [cell[0] for cell in rows["asked: schedule"]] == ["1f1b-so", "gpipe", "differs"]
    assert rows["global batch"][2][0] == "same"
    stages = page.script("return [...document.querySelectorAll('#compare-stages-table tbody tr')].length;")
    assert stages == max(len(a["stages"]), len(b["stages"]))
    assert page.script("return document.querySelectorAll('#compare .pair svg').length;") == 6

    shown = "return bapipe.view.rows.map(item => item.label);"
    both = page.script(shown)
    ranks = [len({name for stage in plan["stages"] for name in stage["accelerators"]}) for plan in (a, b)]
    names = [label.rsplit(" ", 1)[1] for label in both]
    assert names == ["A"] * names.count("A") + ["B"] * names.count("B")
    assert (names.count("A") >= ranks[0], names.count("B") >= ranks[1]) == (True, True)
    ends = page.script("return bapipe.view.timelines.map(t => t.end);")
    assert ends == pytest.approx(times, rel=0.2)
    page.script(
        "const choice = document.getElementById('timeline-shown');"
        "choice.value = 'B'; choice.dispatchEvent(new Event('change'));"
    )
    assert set(page.script("return bapipe.view.rows.map(item => item.t.name);")) == {"B"}

    state, table = page.chrome.current_url, page.script("return document.getElementById('compare').innerText;")
    again = open_app(state.removeprefix(page.served.url))
    assert again.chrome.current_url == state
    assert again.script("return document.getElementById('compare').innerText;") == table
    again.click("pin")
    assert "pin" not in again.query()
    assert again.script("return document.getElementById('compare').hidden;")
    assert again.script("return bapipe.view.timelines.length;") == 1
    assert again.errors() == []
    assert again.other_requests() == []


def test_reload_back_and_forward(open_app: Open) -> None:
    page = open_app(address(START))
    page.turn("global_batch", "128")
    page.turn("split_layers", True)
    page.turn("optimizer", "adam")
    state, words = page.query(), page.script("return document.getElementById('answer').innerText;")
    assert state == {**START, "global_batch": "128", "split_layers": "1", "optimizer": "adam"}
    page.chrome.refresh()
    page.settled()
    assert page.query() == state
    assert page.script("return document.getElementById('answer').innerText;") == words
    names = "model kind count global_batch schedule optimizer"
    knobs = f"return '{names}'.split(' ').map(id => document.getElementById(id).value);"
    assert page.script(knobs) == ["gnmt-8", "v100-16", "4", "128", "1f1b-so", "adam"]
    for _ in range(3):
        page.chrome.back()
        page.settled()
    assert page.query() == START
    assert page.script(knobs) == ["gnmt-8", "v100-16", "4", "64", "1f1b-so", "sgd"]
    assert page.figure("time") == page.plan()["prediction"]["time"]
    page.chrome.forward()
    page.settled()
    assert page.query() == {**START, "global_batch": "128"}
    assert page.figure("time") == page.plan()["prediction"]["time"]


def test_own_files_and_mixed_clusters(open_app: Open) -> None:
    page = open_app()
    page.turn("kind", "cluster-two-cpus.toml")
    page.turn("model", "tiny-profile.json")
    assert page.query() == {"model": "tiny-profile.json", "cluster": "cluster-two-cpus.toml"}
    assert page.figure("time") == page.plan()["prediction"]["time"]
    assert page.script("return document.getElementById('count-row').hidden;")
    assert not page.script("return document.getElementById('command-where').hidden;")
    page.script("document.getElementById('shorthand').value = '1xa100+1xv100';")
    page.turn("model", "alexnet")
    page.turn("kind", "+")
    assert page.query()["cluster"] == "1xa100+1xv100"
    assert page.plan()["cluster"]["name"] == "1xa100+1xv100"
    assert page.errors() == []


def test_hostile_files_do_nothing(open_app: Open) -> None:
    page = open_app()
    page.turn("kind", "cluster-two-cpus.toml")
    page.turn("model", "<img src=x>.json")
    page.click("pin")
    assert page.script("return document.querySelector('h1').innerText;").startswith("</script><script>alert(1)")
    assert page.script("return document.querySelectorAll('img, main script').length;") == 0
    assert page.errors() == []
    assert page.other_requests() == []


def test_what_is_wrong_is_told_in_the_page(open_app: Open) -> None:
    page = open_app(address({**START, "memory_limit": "1MB"}))
    words = page.script("return document.getElementById('error').innerText;")
    assert words.startswith("nothing fits: the closest, 1f1b-so")
    assert page.script("return document.getElementById('take').hidden;")
    assert page.script("return document.getElementById('result').innerText;") == ""
    assert page.script("return document.querySelectorAll('#contents a').length;") == 0
    page.turn("memory_limit", "")
    assert page.script("return document.getElementById('error').hidden;")
    assert page.figure("time") == page.plan()["prediction"]["time"]
    page.turn("memory_limit", "much")
    words = page.script("return document.getElementById('error').innerText;")
    assert words == "memory_limit must look like '16 GB' or '512 MiB', got 'much'"


def test_boards_of_fpgas_are_shown(open_app: Open) -> None:
    page = open_app(address({"model": "alexnet", "cluster": "2xvcu118", "global_batch": "8"}))
    boards = page.plan()["deployment"]["boards"]
    shown = page.script(
        "return [...document.querySelectorAll('#boards-table tbody tr')]"
        ".map(row => Number(row.querySelector('data').value));"
    )
    assert shown == [board["compute"] for board in boards]
    assert page.errors() == []


def test_the_keyboard_reaches_every_knob(open_app: Open) -> None:
    page = open_app(address(START))

    def press(key: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            values = {"type": kind, "key": key, "windowsVirtualKeyCode": code}
            page.chrome.execute_cdp_cmd("Input.dispatchKeyEvent", values)

    page.script("document.activeElement.blur(); scrollTo(0, 0);")
    seen: list[str] = []
    for _ in range(45):
        press("Tab", 9)
        seen.append(page.script("return document.activeElement.id || document.activeElement.className;"))
    knobs = page.script(
        "return [...document.querySelectorAll('form select, form input, form button')]"
        ".filter(e => e.offsetParent !== null).map(e => e.id);"
    )
    assert [name for name in seen if name in knobs] == knobs
    assert seen[0] == "skip"
    assert "timeline-view" in seen
    labels = page.script(
        "return [...document.querySelectorAll('form select, form input')]"
        ".filter(e => !e.labels.length).map(e => e.id);"
    )
    assert labels == []


@pytest.mark.parametrize("width", [320, 390, 800])
@pytest.mark.parametrize("pinned", [False, True])
def test_narrow_screens_do_not_scroll_sideways(width: int, pinned: bool, open_app: Open, browser: Any) -> None:
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    pin = {"pin": address({**START, "schedule": "gpipe"})[1:]} if pinned else {}
    page = open_app(address({**START, **pin}))
    page.script("document.querySelectorAll('details').forEach(each => { each.open = true; });")
    assert page.script("return document.documentElement.scrollWidth;") <= width
    assert page.script("return document.getElementById('compare').hidden;") is not pinned


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_the_app(scheme: str, open_app: Open, browser: Any) -> None:
    found = importlib.util.find_spec("axe_core_python")
    if found is None or not found.submodule_search_locations:
        pytest.skip("axe-core is not installed; `pip install axe-core-python` brings it")
    source = next(Path(next(iter(found.submodule_search_locations))).rglob("axe.min.js"), None)
    assert source is not None, "axe-core-python has no axe.min.js; reinstall it"
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    page = open_app(address({**START, "pin": address({**START, "schedule": "gpipe"})[1:]}))
    page.script("document.querySelectorAll('details').forEach(each => { each.open = true; });")
    page.script(source.read_text(encoding="utf-8") + "; window.axe = axe;")
    violations, passes = page.chrome.execute_async_script(
        "const done = arguments[0]; axe.run(document).then(found => done([found.violations, found.passes]));"
    )
    assert {"color-contrast", "label", "select-name"} <= {check["id"] for check in passes}
    serious = [
        (violation["id"], violation["help"], [node["html"][:200] for node in violation["nodes"][:3]])
        for violation in violations
        if violation["impact"] in ("serious", "critical")
    ]
    assert serious == []


def test_dark_and_light_by_the_button(open_app: Open, browser: Any) -> None:
    features = [{"name": "prefers-color-scheme", "value": "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    page = open_app(address({**START, "memory_limit": "1MB"}))  # nothing is drawn yet
    colour = "return getComputedStyle(document.body).backgroundColor;"
    assert page.script(colour) == "rgb(255, 255, 255)"
    page.click("theme")
    assert page.script(colour) == "rgb(20, 24, 29)"
    page.turn("memory_limit", "")
    assert page.script("return bapipe.view.color.page;") == "#14181d"
    page.click("theme")
    assert page.script(colour) == "rgb(255, 255, 255)"
    assert page.script("return bapipe.view.color.page;") == "#ffffff"


def test_the_guide_s_screenshot(open_app: Open, tmp_path: Path, browser: Any) -> None:
    """Taken here so that it shows what the app is today; BAPIPE_SCREENSHOTS names the folder to keep it in."""
    features = [{"name": "prefers-color-scheme", "value": "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    metrics = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    asked = {"model": "gnmt-8", "cluster": "4xv100", "link_bandwidth": "1.6GB/s", "global_batch": "2048"}
    page = open_app(address(asked))
    page.script("document.documentElement.style.scrollbarWidth = 'none';")
    page.script("document.getElementById('status').textContent = '';")  # how long it took differs
    shot = base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"])
    kept = os.environ.get("BAPIPE_SCREENSHOTS")
    file = Path(kept) / "serve.png" if kept else tmp_path / "serve.png"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(shot)
    assert shot.startswith(b"\x89PNG")
    assert len(shot) > 30_000


def test_a_timeline_too_large_to_send_is_told(open_app: Open) -> None:
    page = open_app(address(START))
    page.script(
        "window.asked = window.fetch;"
        "window.fetch = async (...request) => {"
        "  const reply = await window.asked(...request), body = await reply.json();"
        "  if (body && body.data) { body.data = null; body.actions = 999999; }"
        "  return new Response(JSON.stringify(body), {status: reply.status}); };"
    )
    page.turn("global_batch", "32")
    words = page.script("return document.getElementById('timeline').innerText;")
    assert "999999 actions are too many for this page; bapipe report draws them" in words
    assert page.figure("time") == page.plan()["prediction"]["time"]
    page.script("window.fetch = window.asked;")
    page.turn("global_batch", "16")
    assert page.script("return bapipe.view.stats.rects;") > 0
    assert page.errors() == []


def test_a_first_answer_stands_until_the_best_is_there(open_app: Open) -> None:
    page = open_app(address(START))
    page.script(
        "const asked = window.fetch;"
        "window.held = new Promise(go => { window.release = go; });"
        "window.fetch = async (path, ...rest) => {"
        "  if (path.startsWith('/api/plan')) await window.held;"
        "  return asked(path, ...rest); };"
        "const knob = document.getElementById('schedule'); knob.value = '';"
        "knob.dispatchEvent(new Event('input', {bubbles: true}));"
    )
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and not page.script("return app.shown !== null && app.shown.b.draft;"):
        time.sleep(0.05)
    draft = page.figure("time")
    assert page.script("return document.getElementById('status').innerText;").startswith("First answer, from data")
    assert page.script("return document.getElementById('take').hidden;")
    assert page.script("return document.getElementById('main').getAttribute('aria-busy');") == "true"
    assert page.script("return bapipe.view.stats.rects;") > 0
    page.script("window.release();")
    page.settled()
    assert not page.script("return app.shown.b.draft;")
    assert page.script("return document.getElementById('status').innerText;").startswith("Planned in ")
    assert not page.script("return document.getElementById('take').hidden;")
    assert draft >= page.figure("time") == page.plan()["prediction"]["time"]
    assert page.errors() == []
