"""The plan that a page gets is the one that its command makes; and the server answers whatever it is asked."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapipe.hardware.cluster_file import read_cluster
from bapipe.io.files import content_hash
from bapipe.records.plan import read_plan
from served import BAPIPE, Served

SMALL = {"model": "alexnet", "cluster": "2xv100", "schedule": "data-parallel", "microbatch": "8"}
QUESTIONS = {
    "plain": {"model": "alexnet", "cluster": "2xv100", "global_batch": "16"},
    "knobs": {
        "model": "gnmt-8",
        "cluster": "2xa100+2xv100",
        "global_batch": "32",
        "microbatch": "4",
        "schedule": "1f1b-so",
        "stages": "3",
        "optimizer": "adam",
        "memory_limit": "12 GB",
        "link_bandwidth": "1.6GB/s",
        "split_layers": "1",
    },
    "paper": {"model": "vgg16", "cluster": "3xv100", "global_batch": "24", "space": "paper", "strategy": "bapipe"},
    "number type": {**SMALL, "dtype": "fp16"},
    "fpga": {"model": "alexnet", "cluster": "2xvcu118", "global_batch": "8"},
    "own profile": {"model": "tiny-profile.json", "cluster": "cluster-two-cpus.toml"},
    "own layers": {"model": "layers-small-cnn.toml", "cluster": "cluster-4-v100.toml", "global_batch": "32"},
    "own layers on fpgas": {"model": "layers-small-cnn.toml", "cluster": "2xvcu118", "global_batch": "8"},
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_command_makes_the_same_plan(name: str, served: Served, own_folder: Path, tmp_path: Path) -> None:
    question = QUESTIONS[name]
    answer = served.ask("/api/plan", question).json
    downloaded = served.ask("/files/plan.json", question)
    assert downloaded.status == 200
    assert downloaded.headers["content-disposition"] == 'attachment; filename="plan.json"'
    (tmp_path / "downloaded.json").write_bytes(downloaded.body)
    command = shlex.split(served.ask("/files/command.sh", question).body.decode())
    assert shlex.join(command) == answer["command"]
    assert command[-2:] == ["--out", "plan.json"]
    made = tmp_path / "made.json"
    subprocess.run([BAPIPE, *command[1:-1], str(made)], cwd=own_folder, check=True, capture_output=True)
    assert made.read_bytes() == downloaded.body
    assert content_hash(read_plan(made)) == answer["hash"]
    assert content_hash(read_plan(tmp_path / "downloaded.json")) == answer["hash"]


def test_the_cluster_file_is_the_cluster_with_its_knobs(served: Served, tmp_path: Path) -> None:
    question = QUESTIONS["knobs"]
    (tmp_path / "cluster.toml").write_bytes(served.ask("/files/cluster.toml", question).body)
    (tmp_path / "plan.json").write_bytes(served.ask("/files/plan.json", question).body)
    assert read_cluster(str(tmp_path / "cluster.toml")) == read_plan(tmp_path / "plan.json").cluster
    assert read_cluster(str(tmp_path / "cluster.toml")).within.bandwidth == 1.6e9


def test_a_page_s_figures_are_the_plan_s(served: Served) -> None:
    answer = served.ask("/api/plan", QUESTIONS["plain"]).json
    plan = served.ask("/files/plan.json", QUESTIONS["plain"]).json
    told = {figure["key"]: figure.get("value") for figure in answer["figures"]}
    for key in ("time", "throughput", "gap", "lower_bound", "bubble", "exposed_communication"):
        assert told[key] == plan["prediction"][key]
    assert told["memory"] == max(stage["memory_bytes"] for stage in plan["stages"])
    assert f'<dd id="figure-time"><data value="{plan["prediction"]["time"]!r}">' in answer["sections"]
    assert len(answer["stages"]) == len(plan["stages"])
    assert [timeline["name"] for timeline in answer["data"]["timelines"]] == ["predicted"]


def test_the_report_needs_nothing_else(served: Served) -> None:
    page = served.ask("/files/report.html", QUESTIONS["plain"])
    assert page.headers["content-disposition"] == 'attachment; filename="report.html"'
    assert "http://" not in page.body.decode().replace("http://www.w3.org/2000/svg", "")


def test_post_and_get_are_the_same(served: Served) -> None:
    values = {"model": "alexnet", "cluster": "2xv100", "global_batch": 16, "split_layers": False}
    posted = served.ask("/api/plan", method="POST", body=json.dumps(values).encode())
    assert posted.json == served.ask("/api/plan", QUESTIONS["plain"]).json


def test_a_draft_is_a_plan_that_may_be_slower(served: Served) -> None:
    question = {"model": "gnmt-8", "cluster": "4xv100", "global_batch": "64"}
    draft, plan = served.ask("/api/draft", question).json, served.ask("/api/plan", question).json
    times = [{figure["key"]: figure.get("value") for figure in one["figures"]}["time"] for one in (draft, plan)]
    assert (draft["draft"], plan["draft"]) == (True, False)
    assert times[0] >= times[1]
    assert served.ask("/api/draft", SMALL).json is None
    assert served.ask("/api/draft", QUESTIONS["fpga"]).json is None
    assert served.ask("/api/draft", {"model": "llama-70b", "cluster": "1xt4"}).json is None


def test_a_file_that_changes_is_planned_anew(served: Served, own_folder: Path) -> None:
    text = (own_folder / "cluster-two-cpus.toml").read_text(encoding="utf-8")
    own = own_folder / "changing.toml"
    own.write_text(text, encoding="utf-8")
    question = {"model": "tiny-profile.json", "cluster": own.name}
    before = served.ask("/api/plan", question).json
    assert served.ask("/api/plan", question).json == before
    own.write_text(text.replace('name = "', 'name = "other '), encoding="utf-8")
    assert served.ask("/api/plan", question).json["hash"] != before["hash"]
    own.unlink()
    assert served.ask("/api/plan", question).status == 422


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"model": "llama-70b", "cluster": "2xv100", "global_batch": "8"}, "nothing fits: the closest"),
        ({"model": "vgg17", "cluster": "2xv100"}, "unknown model 'vgg17' (did you mean 'vgg16'?)"),
        ({"model": "vgg16", "cluster": "513xv100"}, "a page plans at most 512 accelerators, the cluster has 513"),
        ({"model": "vgg16", "cluster": "4xv1000"}, "unknown accelerator 'v1000'"),
        ({"model": "vgg16", "cluster": "four"}, "unknown accelerator 'four'"),
        ({"model": "os:system", "cluster": "4xv100"}, "unknown model 'os:system'"),
        ({"model": "gnmt-9999", "cluster": "4xv100"}, "GNMT has at most 1000 layers here"),
        ({**SMALL, "global_batch": "17"}, "a global batch of 17 is no multiple of a micro-batch of 8"),
        ({**SMALL, "stages": "9"}, "data parallelism has one stage"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_told_in_a_line(question: dict[str, str], words: str, served: Served) -> None:
    for path in ("/api/plan", "/files/plan.json"):
        reply = served.ask(path, question)
        assert reply.status == 422
        assert set(reply.json) == {"error"}
        assert reply.json["error"].startswith(words)
        assert "\n" not in reply.json["error"]


def test_two_hundred_at_once_are_all_answered(served: Served) -> None:
    def one(number: int) -> tuple[int, bool]:
        kinds: list[Callable[[], int]] = [
            lambda: served.ask("/api/plan", SMALL).status,
            lambda: served.ask("/api/plan", {**SMALL, "global_batch": str(16 * (1 + number))}).status,
            lambda: served.ask("/", headers={"Host": "evil.example"}).status,
            lambda: served.ask("/assets/serve.js").status,
        ]
        return kinds[number % 4](), number % 4 != 2

    with ThreadPoolExecutor(200) as pool:
        found = list(pool.map(one, range(200)))
    assert all(status == (200 if good else 421) for status, good in found)


TEXTS = st.text(max_size=30) | st.sampled_from(
    ["NaN", "-1", "1e308", "\x00", "../x", "9" * 500, "🚀", "%00", "1f1b"]
)
NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)
KNOBS = st.sampled_from([
    "model", "cluster", "global_batch", "microbatch", "schedule", "stages", "strategy", "space", "optimizer",
    "dtype", "memory_limit", "link_bandwidth", "split_layers",
])  # fmt: skip
SANE = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["alexnet", "tiny-profile.json"]),
        "cluster": st.sampled_from(["1xv100", "2xv100+1xt4"]),
    },
    optional={
        "global_batch": st.integers(1, 32),
        "microbatch": st.integers(1, 8),
        "schedule": st.sampled_from(["1f1b", "1f1b-as", "fbp-as", "zb-h1", "interleaved", "pipedream", "gpipe"]),
        "stages": st.integers(1, 4),
        "strategy": st.sampled_from(["exact", "bapipe", "pipedream", "gpipe", "dp", "uniform"]),
        "space": st.sampled_from(["full", "paper"]),
        "dtype": st.sampled_from(["fp64", "fp32", "fp16", "fp8"]),
        "memory_limit": st.sampled_from(["1B", "1e-30GB", "100MB", "1e17"]),
        "link_bandwidth": st.sampled_from(["1b/s", "1e-300GB/s", "1e17B/s"]),
        "split_layers": st.booleans(),
    },
)  # fmt: skip


def answered(served: Served, path: str, *, method: str = "GET", body: bytes | None = None) -> None:
    reply = served.ask(path, method=method, body=body)
    assert reply.status in (200, 307, 400, 404, 405, 422), (path, body, reply.body[:300])
    if reply.status == 422:
        assert set(reply.json) == {"error"}


@given(st.dictionaries(KNOBS | TEXTS, NESTED, max_size=5) | NESTED)
@settings(max_examples=120)
def test_no_json_breaks_it(served: Served, values: object) -> None:
    answered(served, "/api/plan", method="POST", body=json.dumps(values).encode())


@given(st.binary(max_size=200) | st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000, b"1" * 10_000, b"NaN"]))
@settings(max_examples=60)
def test_no_bytes_break_it(served: Served, body: bytes) -> None:
    answered(served, "/api/plan", method="POST", body=body)


@given(
    st.sampled_from(["/api/plan", "/api/draft", "/files/plan.json", "/assets/", "/", "/api/choices"]),
    st.lists(st.tuples(KNOBS | TEXTS, TEXTS), max_size=5),
    st.text(max_size=20),
)
@settings(max_examples=150)
def test_no_address_breaks_it(served: Served, path: str, pairs: list[tuple[str, str]], tail: str) -> None:
    def quoted(text: str) -> str:
        return quote(text.encode("utf-8", "surrogatepass"), safe="")

    query = "&".join(f"{quoted(name)}={quoted(value)}" for name, value in pairs)
    answered(served, f"{path}{quoted(tail)}?{query}")


@given(SANE)
@settings(max_examples=60)
def test_no_sane_question_breaks_it(served: Served, values: dict[str, object]) -> None:
    """Knobs at their ends, each valid alone: the planner plans or says why not."""
    answered(served, "/api/plan", method="POST", body=json.dumps(values).encode())
