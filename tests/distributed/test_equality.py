"""Training by a plan is training by one process: losses, every gradient, statistics and weights; and what is held.

Each rank compares itself with plain training over the same micro-batches (equality_alone) and counts what is alive
without asking the runtime (equality_watch); the tests look at what the ranks found (equality_worker).
"""

from __future__ import annotations

import fcntl
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from equality_cases import (  # noqa: E402
    DIGITS,
    FACTORS,
    LONG,
    NEVER,
    OTHERS,
    PAIRS,
    ROWS,
    TORCH,
    UPDATED,
    full_product,
)
from equality_models import SUBJECTS, as_call, build, make_batch  # noqa: E402
from equality_plans import Case, make_plan, make_schedule_of, write_cases  # noqa: E402

from bapipe.schedule.channel_window import AHEAD, WINDOW  # noqa: E402
from bapipe.torch.capturing import capture  # noqa: E402
from bapipe.torch.runtime.build_stages import own_stages  # noqa: E402
from quick_script import QUICK_SCRIPT  # noqa: E402

HERE = Path(__file__).resolve().parent
LIMITS = {"float64": 1e-12, "dropout": 1e-12, "float32": 1e-5}
NEEDED = {"gpt2": "transformers", "llama": "transformers", "digits": "sklearn"}
"""model -> the package that it comes from"""
HALVES = (("gnmt", "resnet", "unet", "digits", "drifting"), ("vgg", "gpt2", "llama", "whole"))
"""models that are captured side by side: about equal work for two cores"""
FULL = full_product()
Results = dict[str, list[dict[str, Any]]]
"""case -> what each of its ranks found"""


def _missing(case: Case) -> str | None:
    package = NEEDED.get(case.model)
    return None if package is None or importlib.util.find_spec(package) else package


def _parameters(cases: Sequence[Case]) -> list[Any]:
    return [
        pytest.param(
            case,
            id=case.name,
            marks=pytest.mark.skipif(
                _missing(case) is not None, reason=f"needs {_missing(case)}: pip install bapipe[dev]"
            ),
        )
        for case in cases
    ]


def _train(cases: Sequence[Case], folder: Path, *, seconds: float) -> Results:
    """Run the cases, half of the models in one set of processes and half in another."""
    chosen = [case for case in dict.fromkeys(cases) if _missing(case) is None]
    # The processes fork: no threads before that, neither OpenMP's nor CUDA's.
    quiet = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = {**os.environ, **quiet}
    sets = []
    for index, models in enumerate(HALVES):
        own, place = [case for case in chosen if case.model in models], folder / f"set{index}"
        place.mkdir()
        write_cases(own, place / "cases.json")
        with (place / "log").open("w") as log:
            command = [sys.executable, QUICK_SCRIPT, str(HERE / "equality_worker.py"), str(place)]
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        sets.append((process, place, own))
    try:
        codes = [process.wait(timeout=seconds) for process, _, _ in sets]
    finally:
        for process, _, _ in sets:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    assert codes == [0] * len(sets), "\n".join((place / "log").read_text()[-5000:] for _, place, _ in sets)
    found = {}
    for _, place, own in sets:
        for index, case in enumerate(own):
            ranks = range(make_schedule_of(case).num_ranks)
            files = [place / f"result-{index}-{rank}.json" for rank in ranks]
            found[case.name] = [json.loads(file.read_text()) for file in files]
    return found


def _once(factory: pytest.TempPathFactory, name: str, work: Callable[[Path], Results]) -> Results:
    """The results, made by whichever of pytest's own processes asks first."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = shared / name, shared / f"{name}.json"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            assert not folder.exists(), "the processes that train the cases have failed; see the first error"
            folder.mkdir()
            done.write_text(json.dumps(work(folder)))
    return json.loads(done.read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return _once(
        tmp_path_factory, "equality", lambda folder: _train((*PAIRS, *OTHERS, *TORCH), folder, seconds=1500)
    )


@pytest.fixture(scope="session")
def trained_in_full(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return _once(tmp_path_factory, "equality-full", lambda folder: _train(FULL, folder, seconds=7200))


def _check(case: Case, ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        assert "error" not in found, f"rank {rank}: {found.get('error')}"
    _check_numbers(case, ranks)
    for rank, found in enumerate(ranks):
        _check_memory(case, rank, found)


def _check_numbers(case: Case, ranks: list[dict[str, Any]]) -> None:
    first = ranks[0]
    assert {name for found in ranks for name in found["parameters"]} == (
        set(first["all_parameters"]) - set(first["unused"])
    )
    hashes: dict[str, set[str]] = {}
    for found in ranks:
        assert found["losses"] == first["losses"], "ranks are told different losses"
        assert not found["wrongly_none"], "one side has a gradient, the other has none"
        for difference, what in found["differences"]:
            assert difference <= LIMITS[case.numbers], what
        for name, value in found["gradient_hashes"].items():
            hashes.setdefault(name, set()).add(value)
    assert all(len(values) == 1 for values in hashes.values()), "holders of one weight have different gradients"
    assert len(first["losses"]) == case.steps
    assert case.training != "accumulate" or len(first["differences"]) == case.steps
    if case.numbers == "dropout":
        assert first["random"] or not SUBJECTS[case.model].dropout


def _check_memory(case: Case, rank: int, found: dict[str, Any]) -> None:
    schedule = make_schedule_of(case)
    for stage in schedule.stages_of(rank):
        if schedule.caps is None:
            continue
        ranks = schedule.placement[stage]
        own = schedule.microbatch_counts(stage)[ranks.index(rank)]
        cap = schedule.replica_cap(stage, ranks.index(rank))
        assert cap is not None
        assert schedule.dealing is not None or cap == schedule.caps[stage] // len(ranks)
        live = min(own, cap)
        peaks = [step[str(stage)] for step in found["peak_in_flight"]]
        if schedule.dealing is not None and stage in schedule.parted_stages():
            assert max(peaks) <= live  # a whole pipeline's K, of which the common cap gives some replicas more
        else:
            assert peaks == [live] * case.steps
        graphs = found["graphs"][str(stage)]
        if stage in schedule.parted_stages():
            assert graphs <= live  # the watched node lies above all weights, so those that wait may not hold it
        elif stage not in case.recompute:
            assert graphs == live
        else:
            assert graphs == min(own, 1)
        if schedule.num_ranks == schedule.num_stages and not case.evaluate:
            before, after = found["crossing"][str(stage)]
            # Posted receives, one in use and one just used; errors that pass through are sent on as they came.
            assert found["received"] <= before * (live + AHEAD) + after * (AHEAD + 2 + WINDOW + 1)
            assert found["sent"] <= after * (live + 1) + before * (WINDOW + 2)
    assert found["left"] == [0] * case.steps, "graphs or boundary tensors outlive the step"
    if case.training == "accumulate":
        assert max(found["tensors"]) == found["tensors"][0], "tensors outlive the step"


@pytest.mark.parametrize("case", _parameters(PAIRS))
def test_pairs_of_choices(trained: Results, case: Case) -> None:
    _check(case, trained[case.name])


@pytest.mark.parametrize("case", _parameters(OTHERS))
def test_replicas_interleaving_whole_modules_and_updates(trained: Results, case: Case) -> None:
    _check(case, trained[case.name])


@pytest.mark.parametrize("case", _parameters(TORCH))
def test_torchs_engine_trains_as_one_process(trained: Results, case: Case) -> None:
    for rank, found in enumerate(trained[case.name]):
        assert "error" not in found, f"rank {rank}: {found.get('error')}"
        assert found["left"] == [0] * case.steps, "graphs outlive the step"
    _check_numbers(case, trained[case.name])


@pytest.mark.slow
@pytest.mark.parametrize("case", _parameters(FULL))
def test_all_choices(trained_in_full: Results, case: Case) -> None:
    _check(case, trained_in_full[case.name])


def test_every_pair_is_among_the_cases() -> None:
    assert len(ROWS) == len(PAIRS) < 40
    for one, two in itertools.combinations(FACTORS, 2):
        met = {(row[one], row[two]) for row in ROWS}
        wanted = {
            (left, right)
            for left, right in itertools.product(FACTORS[one], FACTORS[two])
            if ((one, left), (two, right)) not in NEVER
        }
        assert met == wanted


def test_some_ranks_need_no_data(trained: Results) -> None:
    given_none = [
        case.name
        for case in (*PAIRS, *OTHERS)
        if case.data == "needed" and not all(found["needs_data"] for found in trained.get(case.name, ()))
    ]
    assert len(given_none) > 3


@pytest.mark.parametrize("case", _parameters((*UPDATED, *(case for case in TORCH if case.training == "adamw"))))
def test_weights_after_updates(trained: Results, case: Case) -> None:
    for found in trained[case.name]:
        difference, what = found["weights"]
        # AdamW divides by a gradient's own size: rounding of a gradient that is nought (a bias before batch-norm)
        # becomes an update of up to rate · rounding / 1e-8.
        assert difference <= 1e-10, what
        for loss, expected in zip(found["losses"], found["expected_losses"], strict=True):
            assert math.isclose(loss, expected, rel_tol=1e-12)


@pytest.mark.parametrize("case", _parameters([case for case in (*OTHERS, *TORCH) if case.evaluate]))
def test_evaluation_between_steps(trained: Results, case: Case) -> None:
    for found in trained[case.name]:
        assert len(found["evaluated"]) == case.steps
        for loss, expected in zip(found["evaluated"], found["expected_evaluated"], strict=True):
            assert math.isclose(loss, expected, rel_tol=1e-12)


@pytest.mark.parametrize("case", _parameters(DIGITS))
def test_digits_have_the_loss_curve_of_one_process(trained: Results, case: Case) -> None:
    for found in trained[case.name]:
        assert len(found["losses"]) == case.steps
        for loss, expected in zip(found["losses"], found["expected_losses"], strict=True):
            assert math.isclose(loss, expected, rel_tol=1e-9)
        assert sum(found["losses"][-20:]) < 0.2 * sum(found["losses"][:20]), "it has learnt nothing"


@pytest.mark.parametrize("few, many", [LONG[:2], LONG[2:]], ids=[LONG[0].model, LONG[2].model])
def test_memory_does_not_grow_with_micro_batches(trained: Results, few: Case, many: Case) -> None:
    for one, other in zip(trained[few.name], trained[many.name], strict=True):
        for what in ("received", "sent", "graphs"):
            assert one[what] == other[what]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_all_forms_of_a_stage_share_its_tensors_on_a_gpu() -> None:
    case = Case(model="resnet", schedule="gpipe", stages=2, microbatches=2, short=True)
    args, kwargs = as_call(make_batch(case.model, case.numbers, 0, 3)[0])
    captured = capture(build(case.model, case.numbers), args, kwargs)
    plan = make_plan(case, [layer.name for layer in captured.layers])
    own = own_stages(
        captured, plan, make_schedule_of(case), rank=0, sizes=case.sizes, device=torch.device("cuda", 0)
    )
    forms = [*own.stages[0].values(), *own.evaluation[0].values()]
    assert len(forms) == 4
    for name, tensor in (*forms[0].named_parameters(), *forms[0].named_buffers()):
        assert tensor.is_cuda
        for form in forms[1:]:
            assert dict((*form.named_parameters(), *form.named_buffers()))[name] is tensor, name
