"""How smooth the report's timeline is; README.md here says what is claimed. Writes result.json beside itself."""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from bapipe.costs.profile import Profile
from bapipe.costs.resolve_model import load_profile
from bapipe.hardware.cluster_file import read_cluster
from bapipe.io.files import write_text
from bapipe.planner import Request, explore, make_plan
from bapipe.records.plan import Plan
from bapipe.reporting.html.document import make_subject, render_report

CASES = {
    "8 × 64": ("vgg16", "8xv100", Request(global_batch=512, microbatch=8, stages=8, schedule="zb-h2")),
    "64 × 512": ("gpt2-xl", "64xv100", Request(global_batch=512, microbatch=1, stages=64, schedule="1f1b-so")),
}
SHARES = {"whole": 1.0, "1/3": 1 / 3, "1/10": 0.1, "1/50": 0.02, "1/250": 0.004}
"""how much of the mini-batch is in view"""
PANS = 60
MOST_MILLISECONDS = 50.0
LARGEST = 1_000_000

# A pan is drawn as the page draws it, then one pixel is read back: that waits until the browser has painted all.
MEASURE = """
const v = bapipe.view, [shares, pans] = arguments, whole = v.high - v.low, found = {};
for (const [name, share] of Object.entries(shares)) {
  const span = whole * share, step = span / 50;
  v.from = v.low + (whole - span) / 3; v.to = v.from + span; v.draw(); v.context.getImageData(0, 0, 1, 1);
  const drawn = [], painted = [];
  for (let i = 0; i < pans; i++) {
    const by = i % 2 ? -step : step;
    v.from += by; v.to += by;
    const begin = performance.now();
    v.draw();
    drawn.push(performance.now() - begin);
    v.context.getImageData(0, 0, 1, 1);
    painted.push(performance.now() - begin);
  }
  for (const list of [drawn, painted]) list.sort((a, b) => a - b);
  const middle = pans >> 1;
  found[name] = {draw_ms: drawn[middle], paint_ms: painted[middle], worst_ms: painted[pans - 1],
    rects: v.stats.rects, cells: v.stats.cells, lines: v.stats.lines};
}
return found;
"""


def made(case: str) -> tuple[Plan, Profile]:
    model, accelerators, request = CASES[case]
    cluster = read_cluster(accelerators)
    sizes = [request.microbatch or 1]
    profile = load_profile(model, types=list(cluster.types.values()), microbatches=sizes)
    return make_plan(explore(profile, cluster, request)), profile


def chrome() -> Chrome:
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or "chromium"
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"):
        options.add_argument(flag)
    options.add_argument("--window-size=1400,1000")
    driver = shutil.which("chromedriver")
    return Chrome(options=options, service=Service(driver) if driver else None)


def measure(case: str, browser: Chrome, folder: Path) -> dict[str, Any]:
    plan, profile = made(case)
    begin = time.perf_counter()
    text = render_report(make_subject(plan, profile=profile))
    written = time.perf_counter() - begin
    file = folder / "report.html"
    file.write_text(text, encoding="utf-8")
    browser.get(file.as_uri())
    actions = browser.execute_script("return bapipe.view.timelines[0].kind.length;")
    loaded = browser.execute_script("return performance.getEntriesByType('navigation')[0].domComplete;")
    pans = browser.execute_script(MEASURE, SHARES, PANS)
    ordered = {name: pans[name] for name in SHARES}
    return {
        "case": case,
        "actions": actions,
        "bytes": len(text.encode()),
        "write_s": round(written, 3),
        "load_ms": round(loaded),
        "pans": {name: {key: round(value, 1) for key, value in pan.items()} for name, pan in ordered.items()},
    }


def environment(browser: Chrome) -> dict[str, object]:
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "browser": f"Chromium {browser.capabilities['browserVersion']}, painted by the CPU",
        "python": platform.python_version(),
        "bapipe": version("bapipe"),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    browser = chrome()
    try:
        with tempfile.TemporaryDirectory() as folder:
            cases = [measure(case, browser, Path(folder)) for case in CASES]
        result = {"environment": environment(browser), "cases": cases}
    finally:
        browser.quit()
    write_text(Path(__file__).with_name("result.json"), json.dumps(result, indent=1) + "\n")
    print(table(result))
    small = next(case for case in cases if case["case"] == "8 × 64")
    assert small["bytes"] < LARGEST, f"8 × 64 takes {small['bytes']} bytes"
    slowest = max(pan["paint_ms"] for case in cases for pan in case["pans"].values())
    assert slowest < MOST_MILLISECONDS, f"a pan takes {slowest} ms"


def table(result: dict[str, Any]) -> str:
    """As README.md shows it."""
    lines = [
        "| stages × micro-batches | actions | in view | draw | draw and paint | worst | rectangles or cells |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for case in result["cases"]:
        for name, pan in case["pans"].items():
            times = " | ".join(f"{pan[key]:.1f} ms" for key in ("draw_ms", "paint_ms", "worst_ms"))
            count = f"{pan['rects'] + pan['cells']:,.0f}"
            lines.append(f"| {case['case']} | {case['actions']:,} | {name} | {times} | {count} |")
    sizes = [
        f"{case['case']}: {case['bytes'] / 1e6:.2f} MB, written in {case['write_s']} s, loaded in "
        f"{case['load_ms']} ms"
        for case in result["cases"]
    ]
    return "\n".join([*lines, "", *sizes])


if __name__ == "__main__":
    main()
