"""The report's page: one file, safe against any name, with the plan's own numbers."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import astuple, replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from bapipe.cli import cli
from bapipe.costs.profile import write_profile
from bapipe.costs.resolve_model import load_profile
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster_file import read_cluster
from bapipe.planner import Request, explore, make_plan
from bapipe.records.plan import read_plan, write_plan
from bapipe.records.run_record import write_run
from bapipe.reporting.html.document import make_subject, pictures, render_report, trace_of
from bapipe.reporting.html.head_section import why_not_the_others
from bapipe.reporting.html.page_data import script_json
from report_plans import HOSTILE, SHAPES, explored, hostile, planned, run_of


class Page(HTMLParser):
    """Every tag with its attributes, every figure by the id around it, and the text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.figures: dict[str, list[float]] = {}
        self.text = ""
        self._where = ""
        self._silent = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if attributes.get("id"):
            self._where = attributes["id"] or ""
        if tag == "data":
            self.figures.setdefault(self._where, []).append(float(attributes["value"] or "nan"))
        self._silent = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._silent = self._silent and tag not in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.text += data


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_plan_has_its_numbers_on_the_page(shape: str) -> None:
    plan, profile = planned(shape)
    page = Page(render_report(make_subject(plan, profile=profile)))
    prediction = plan.prediction
    for key in ("time", "throughput", "gap", "lower_bound", "bubble", "exposed_communication"):
        assert page.figures[f"figure-{key}"] == [getattr(prediction, key)]
    stages = page.figures["stages-table"]
    assert stages[0::5] == [stage.forward for stage in plan.stages]
    assert stages[1::5] == [stage.backward for stage in plan.stages]
    assert stages[2::5] == [stage.in_flight for stage in plan.stages]
    memory = page.figures["memory-table"]
    assert memory[0::8] == [stage.memory_bytes for stage in plan.stages]
    assert memory[1::8] == [stage.memory_capacity for stage in plan.stages]
    for number, stage in enumerate(plan.stages):
        assert stage.memory_parts is not None
        parts = memory[8 * number + 2 : 8 * number + 8]
        assert parts == list(astuple(stage.memory_parts))
        assert sum(parts) == pytest.approx(stage.memory_bytes)
    alternatives = [prediction.time, max(stage.memory_bytes for stage in plan.stages)]
    for alternative in plan.alternatives:
        alternatives += (
            [alternative.memory_bytes]
            if alternative.time is None
            else [alternative.time, alternative.memory_bytes]
        )
    assert page.figures["alternatives-table"] == alternatives
    assert f"{prediction.gap:.1%} over the lower bound" in page.text
    assert plan.model.name in page.text


def test_the_page_asks_for_nothing_from_elsewhere() -> None:
    plan, profile = planned("straight")
    text = render_report(make_subject(plan, record=run_of(plan), profile=profile))
    page = Page(text)
    for tag, attributes in page.tags:
        for name in ("src", "href", "srcset", "action", "data", "poster", "background"):
            if tag != "data":
                assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    assert "url(" not in text.replace("url(#bapipe-", "")
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|sendBeacon|import)\s*\(", text)
    policies = [a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a]
    assert policies
    assert policies[0] is not None
    assert policies[0].startswith("default-src 'none'")


def test_eight_stages_of_64_microbatches_take_less_than_a_megabyte() -> None:
    cluster = read_cluster("8xv100")
    profile = load_profile("vgg16", types=list(cluster.types.values()), microbatches=[1, 2, 4, 8])
    request = Request(global_batch=512, microbatch=8, stages=8, schedule="zb-h2")
    plan = make_plan(explore(profile, cluster, request))
    assert (len(plan.stages), plan.microbatches) == (8, 64)
    assert len(render_report(make_subject(plan, record=run_of(plan), profile=profile)).encode()) < 1_000_000


def test_the_same_plan_gives_the_same_bytes() -> None:
    plan, profile = planned("hybrid")
    first, second = (render_report(make_subject(plan, profile=profile)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("shape", ["straight", "hybrid", "data parallel"])
def test_hostile_names_are_escaped_and_cut(shape: str) -> None:
    plan = hostile(planned(shape)[0])
    subject = make_subject(plan, record=run_of(plan))
    text = render_report(subject)
    clean = render_report(make_subject(planned(shape)[0], record=run_of(planned(shape)[0])))
    # The same elements as without hostile names: none was opened by one.
    names = [[tag for tag, _ in Page(page).tags] for page in (text, clean)]
    assert sorted(set(names[0])) == sorted(set(names[1]))
    assert names[0].count("script") == names[1].count("script") == 2
    assert "alert(1)</script>" not in text
    assert "x" * 700 not in text
    for character in "\u2028\u202e\x00\x1b":
        assert character not in text
    assert "🚀" in text
    assert len(text) < len(clean) + 200_000
    for name, picture in pictures(subject).items():
        root = ElementTree.fromstring(picture)
        assert root.tag.endswith("svg"), name
        assert not [element for element in root.iter() if element.tag.endswith(("script", "img"))]
        assert "x" * 700 not in picture
    trace = trace_of(subject)
    json.loads(trace)
    assert "x" * 700 not in trace


def test_hostile_names_are_shown_as_they_are() -> None:
    page = Page(render_report(make_subject(hostile(planned("straight")[0]))))
    assert "</script><script>alert(1)</script>" in page.text
    assert "<img src=x onerror=alert(1)>\"'&" in page.text


@pytest.mark.parametrize("text", HOSTILE[:5])
def test_no_text_leaves_its_script(text: str) -> None:
    found = script_json({"name": text})
    assert not set(found) & set("<>&\u2028\u2029\x00")
    assert json.loads(found) == {"name": text}


def test_a_run_is_set_beside_the_plan() -> None:
    plan, _ = planned("straight")
    subject = make_subject(plan, record=run_of(plan, slower=1.25))
    page = Page(render_report(subject))
    assert subject.comparison is not None
    step = subject.comparison.step_seconds
    assert page.figures["figure-measured"] == [step]
    assert page.figures["figure-measured_throughput"] == [plan.global_batch / step]
    rows = page.figures["comparison-table"]
    assert rows[0::9] == pytest.approx([stage.forward for stage in plan.stages])
    assert rows[1::9] == pytest.approx([1.25 * stage.forward for stage in plan.stages])
    assert page.text.count("(-20%)") >= 1 + 3 * len(plan.stages)
    data = json.loads(re.search(r'id="bapipe-data">(.*?)</script>', render_report(subject), re.DOTALL)[1])  # type: ignore[index]
    assert [timeline["name"] for timeline in data["timelines"]] == ["predicted", "measured"]
    assert set(pictures(subject)) == {
        "balance.svg", "memory.svg", "layers.svg", "alternatives.svg", "timeline.svg", "timeline-measured.svg",
    }  # fmt: skip
    processes = [
        e["args"]["name"] for e in json.loads(trace_of(subject))["traceEvents"] if e["name"] == "process_name"
    ]
    assert processes == ["predicted", "measured"]


def test_another_run_or_profile_is_refused() -> None:
    plan, _ = planned("straight")
    _, other = planned("hybrid")
    with pytest.raises(BaPipeError, match=r"the plan was made from profile \w+, this profile is \w+; give the"):
        make_subject(plan, profile=other)
    with pytest.raises(BaPipeError, match="give the plan that was run"):
        make_subject(replace(plan, notes=("changed",)), record=run_of(plan))


def test_why_not_the_others() -> None:
    plan, _ = planned("straight")
    fastest = min(
        (alternative for alternative in plan.alternatives if alternative.time),
        key=lambda alternative: alternative.time or 0,
    )
    assert f"{fastest.name}: {fastest.reason}." in why_not_the_others(plan)
    assert why_not_the_others(replace(plan, alternatives=())) == "No alternative was considered."
    misfit = replace(fastest, time=None)
    none = why_not_the_others(replace(plan, alternatives=(misfit,)))
    assert none == "Of 1 alternative none is possible: it does not fit."
    assert why_not_the_others(replace(plan, alternatives=(fastest, misfit))).endswith(
        " 1 alternative would not fit."
    )


def test_the_exploration_is_shown_where_it_is_known() -> None:
    plan, profile = planned("hybrid")
    steps = explore(profile, plan.cluster, Request(strategy="bapipe", global_batch=256, stages=4)).steps
    assert steps
    text = Page(render_report(make_subject(plan, profile=profile, steps=steps))).text
    for step in steps:
        assert step.name in text
        assert step.numbers[:60] in text
    assert "by --explain" in Page(render_report(make_subject(plan))).text


def test_notebooks_show_plans_and_timelines() -> None:
    plan, _ = planned("straight")
    shown = plan._repr_html_()
    assert f"{plan.prediction.gap:.1%} over the lower bound" in shown
    assert shown.count("<svg") == 3
    assert "<script" not in hostile(plan)._repr_html_()
    assert explored("straight").best.timeline._repr_html_().startswith("<svg")


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(cli, list(arguments))
    if result.exception is not None:
        raise result.exception
    return result.output


def test_the_command_writes_page_pictures_and_trace(tmp_path: Path) -> None:
    plan, profile = planned("straight")
    write_plan(plan, tmp_path / "plan.json")
    write_run(run_of(plan), tmp_path / "run.json")
    write_profile(profile, tmp_path / "profile.json")
    output = invoke(
        "report", str(tmp_path / "plan.json"), str(tmp_path / "run.json"), "-o", str(tmp_path / "report.html"),
        "--profile", str(tmp_path / "profile.json"), "--svg", str(tmp_path / "pictures"),
        "--png", str(tmp_path / "pictures"), "--trace", str(tmp_path / "trace.json"), "--explain",
    )  # fmt: skip
    assert output.startswith(f"wrote {tmp_path / 'report.html'}, ")
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "layer-table" in page.figures
    assert "steps-table" in {attributes.get("id") for _, attributes in page.tags}
    drawn = {path.suffix: path for path in sorted((tmp_path / "pictures").iterdir())}
    assert len(list((tmp_path / "pictures").iterdir())) == 12
    sizes = re.search(r'width="(\d+)" height="(\d+)"', drawn[".svg"].read_text(encoding="utf-8"))
    assert sizes is not None
    png = drawn[".png"].read_bytes()
    assert png.startswith(b"\x89PNG")
    assert struct.unpack(">II", png[16:24]) == (2 * int(sizes[1]), 2 * int(sizes[2]))
    json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))


def test_a_built_in_model_needs_no_profile(tmp_path: Path) -> None:
    """Its profile is computed again, and used as it has the hash that the plan names."""
    file, page = str(tmp_path / "plan.json"), str(tmp_path / "report.html")
    invoke("plan", "vgg16", "--cluster", "2xv100", "--global-batch", "60", "--micro-batch", "12", "--out", file)
    invoke("report", file, "-o", page)
    assert "layer-table" in Page(Path(page).read_text(encoding="utf-8")).figures
    write_plan(replace(read_plan(file), profile_hash="another"), file)
    invoke("report", file, "-o", page)
    assert "layer-table" not in Page(Path(page).read_text(encoding="utf-8")).figures


def test_planning_offers_the_report(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    arguments = ("plan", "gnmt-8", "--cluster", "4xv100", "--global-batch", "256", "--report", str(page))
    output = invoke(*arguments)
    assert re.search(rf"wrote {re.escape(str(page))}, \d+(\.\d)? kB: open it in a browser\n$", output)
    found = Page(page.read_text(encoding="utf-8"))
    assert {"layer-table", "alternatives-table"} <= set(found.figures)
    assert json.loads(invoke(*arguments, "--json"))["report"] == str(page)
    with pytest.raises(BaPipeError, match="leave one of them out"):
        invoke(*arguments, "--compare")


def test_mistakes_are_said_in_one_line(tmp_path: Path) -> None:
    plan, _ = planned("hybrid")
    file = str(tmp_path / "plan.json")
    write_plan(replace(plan, profile_hash="0"), file)
    with pytest.raises(BaPipeError, match="--explain explores again and needs what was planned"):
        invoke("report", file, "--explain", "-o", str(tmp_path / "report.html"))
    with pytest.raises(BaPipeError, match="the plan was made from profile 0"):
        invoke("report", file, "--profile", "vgg16", "-o", str(tmp_path / "report.html"))
    (tmp_path / "file").write_text("")
    with pytest.raises(BaPipeError, match="name another folder"):
        invoke("report", file, "-o", str(tmp_path / "r.html"), "--svg", str(tmp_path / "file" / "in"))
    assert not (tmp_path / "report.html").exists()
