"""The report of FPGA plans shows their boards, and of replicated stages every rank."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from bapipe.fpga import explore_fpga, make_fpga_plan
from bapipe.hardware.cluster_file import read_cluster
from bapipe.models.builtin import builtin_model
from bapipe.planner import Request
from bapipe.reporting.html.board_section import boards_section
from bapipe.reporting.html.document import make_subject, render_report
from bapipe.reporting.html.sections import sections_html
from report_plans import planned, run_of


def cells(html: str, name: str) -> list[list[str]]:
    """Texts of the cells of a table, row by row."""
    body = re.search(rf'id="{name}-table">.*?<tbody>(.*?)</tbody>', html, re.DOTALL)
    assert body is not None, name
    return [
        [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
        for row in re.findall(r"<tr>(.*?)</tr>", body[1])
    ]


def values(html: str, name: str) -> list[list[float]]:
    """Exact values of the figures of a table, row by row."""
    body = re.search(rf'id="{name}-table">.*?<tbody>(.*?)</tbody>', html, re.DOTALL)
    assert body is not None, name
    return [
        [float(value) for value in re.findall(r'<data value="([^"]+)"', row)]
        for row in re.findall(r"<tr>(.*?)</tr>", body[1])
    ]


def test_the_boards_of_an_fpga_plan() -> None:
    found = explore_fpga(builtin_model("vgg16"), read_cluster("2xvcu129+2xvcu118"), Request(global_batch=32))
    plan = make_fpga_plan(found)
    assert plan.deployment is not None
    page = render_report(make_subject(plan))
    rows = values(page, "boards")
    for row, board in zip(rows, plan.deployment.boards, strict=True):
        dsps = (board.dsp_forward, board.dsp_error, board.dsp_gradient)
        assert row[:5] == [board.compute, board.ddr, *dsps]
        assert row[5] == sum(dsps) / board.dsp_installed
        assert row[6:8] == [board.efficiency, board.ddr_rate / board.ddr_bandwidth]
        assert 0 < row[5] <= 1
    chips = values(page, "on-chip")
    for row, board in zip(chips, plan.deployment.boards, strict=True):
        assert board.ram_usable in row
        assert all(share <= 1 + 1e-9 for share in row[row.index(board.ram_usable) + 1 :][:1])
    assert [row[1] for row in cells(page, "boards")] == [
        f"{board.accelerator} {board.type}" for board in plan.deployment.boards
    ]
    assert len(cells(page, "assumptions")) == len(plan.deployment.assumptions)
    assert page.index('id="boards"') > page.index('id="memory"')
    spilled = sum(item.where != "on-chip" for board in plan.deployment.boards for item in board.placed)
    assert (f"{spilled} pieces lie outside" in page) == (spilled > 0)


def test_other_plans_have_no_boards() -> None:
    assert boards_section(planned("straight")[0]) == ""


@pytest.mark.parametrize("shape", ["hybrid", "data parallel", "interleaved"])
def test_a_run_s_rows_name_stage_and_rank(shape: str) -> None:
    """A replicated stage has a row for each rank, so the row's number is not the stage's."""
    plan, _ = planned(shape)
    subject = make_subject(plan, record=run_of(plan))
    assert subject.comparison is not None
    shown = cells(sections_html(subject), "comparison")
    assert [row[:2] for row in shown] == [[str(row.stage), str(row.rank)] for row in subject.comparison.stages]
    worst = max(subject.comparison.stages, key=lambda row: abs(row.busy.error or 0.0))
    assert f"busy time of rank {worst.rank} is furthest off" in sections_html(subject)


def test_memory_is_compared_where_it_was_measured_alike() -> None:
    plan, _ = planned("straight")
    record = run_of(plan)
    assert all(
        row[-1].endswith("→ –") for row in cells(sections_html(make_subject(plan, record=record)), "comparison")
    )
    ranks = len(record.peak_memory)
    allocated = replace(
        record, memory_source=("allocated",) * ranks, peak_memory=tuple(range(10**8, 10**8 + ranks))
    )
    rows = values(sections_html(make_subject(plan, record=allocated)), "comparison")
    assert [row[-1] for row in rows] == [float(10**8 + rank) for rank in range(ranks)]
