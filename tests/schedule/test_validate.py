"""Each rule of the checker: it names rank and action, marks the cell in the table, and says what to change."""

from __future__ import annotations

import dataclasses

import pytest

from bapipe.errors import DeadlockError, ScheduleError
from bapipe.schedule.actions import Action, Kind, Lane, Schedule
from bapipe.schedule.generators import capped, interleaved, make_schedule, with_recompute, with_update
from bapipe.schedule.validate import check, require_valid


def schedule_of(*rows: str, **changes: object) -> Schedule:
    """Stage i on rank i, from rows such as "0F0 0B0"."""
    lanes = tuple(Lane.of(rank, [Action.parse(cell) for cell in row.split()]) for rank, row in enumerate(rows))
    actions = [action for lane in lanes for action in lane]
    made = Schedule(
        name="drawn",
        num_stages=len(rows),
        num_microbatches=1 + max(action.microbatch or 0 for action in actions),
        placement=tuple((rank,) for rank in range(len(rows))),
        lanes=lanes,
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def complaint(schedule: Schedule, *, sends: str = "preposted") -> tuple[str, str]:
    """The message and the table of the first problem."""
    with pytest.raises(ScheduleError) as caught:
        require_valid(schedule, sends=sends)  # type: ignore[arg-type]
    message, _, table = str(caught.value).partition("\n")
    return message, table


def test_a_right_schedule_has_no_problems() -> None:
    schedule = schedule_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert check(schedule) == []
    require_valid(schedule)


def test_wrong_rank() -> None:
    message, table = complaint(schedule_of("0F0 1F0 0B0", "1B0"))
    assert message.startswith("rank 0: 1F0 belongs to rank 1; move it there")
    assert table.splitlines() == ["rank 0      0F0   [1F0]   0B0", "rank 1      1B0"]


def test_twice() -> None:
    message, table = complaint(schedule_of("0F0 0B0 0F0"))
    assert message == "rank 0: 0F0 runs twice, first at position 0; remove one"
    assert table == "rank 0      0F0    0B0   [0F0]"


def test_missing() -> None:
    message, table = complaint(schedule_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1"))
    assert message == "rank 1: 1B1 never runs; add it"
    assert table.splitlines()[1] == "rank 1      1F0    1B0    1F1   [nothing]"


def test_missing_forward() -> None:
    message, _ = complaint(schedule_of("0F0 0B0 0F1 0B1", "1F0 1B0"))
    assert message == "rank 1: 1F1 never runs; add it"


def test_missing_weight_gradient() -> None:
    assert complaint(schedule_of("0F0 0I0"))[0] == "rank 0: 0W0 never runs; add it"


def test_full_and_split_backward_of_one_microbatch() -> None:
    assert "keep either B or I and W" in complaint(schedule_of("0F0 0B0 0I0 0W0"))[0]


def test_backward_before_forward() -> None:
    message, table = complaint(schedule_of("0B0 0F0"))
    assert message == "rank 0: 0B0 runs before 0F0; put 0F0 ahead of it"
    assert table == "rank 0     [0B0]   0F0"


def test_weight_gradient_before_input_gradient() -> None:
    assert complaint(schedule_of("0F0 0W0 0I0"))[0].startswith("rank 0: 0W0 runs before 0I0; put 0I0 ahead of it")


def test_recompute_before_forward_and_after_backward() -> None:
    assert complaint(schedule_of("0R0 0F0 0B0"))[0].startswith("rank 0: 0R0 runs before 0F0")
    assert complaint(schedule_of("0F0 0B0 0R0"))[0].startswith("rank 0: 0R0 runs after 0B0; put it ahead of 0B0")


def test_update_before_the_last_backward() -> None:
    assert complaint(schedule_of("0F0 0F1 0B0 0U 0B1"))[0].startswith(
        "rank 0: 0B1 runs after 0U; put it ahead of 0U"
    )


def test_update_on_a_rank_without_the_stage() -> None:
    message, _ = complaint(schedule_of("0F0 0B0 1U", "1F0 1B0"))
    assert message == "rank 0: 1U is on a rank without stage 1; move it"


def test_outside_the_sizes() -> None:
    schedule = dataclasses.replace(schedule_of("0F0 0B0"), lanes=(Lane.of(0, [Action.parse("7F0")]),))
    assert complaint(schedule)[0].startswith("rank 0: 7F0 is outside 1 stages and 1 micro-batches; correct it")


def test_wrong_replica() -> None:
    """Micro-batch 1 of a stage with two replicas belongs to the second."""
    schedule = make_schedule("gpipe", 1, 2, replicas=[2])
    lanes = (Lane.of(0, [*schedule.lanes[0], *schedule.lanes[1]]), Lane.of(1, []))
    assert complaint(dataclasses.replace(schedule, lanes=lanes))[0].startswith("rank 0: 0F1 belongs to rank 1")


def test_cap() -> None:
    schedule = schedule_of("0F0 0F1 0F2 0B0 0B1 0B2", caps=(2,))
    message, table = complaint(schedule)
    assert message == (
        "rank 0: 0F2 makes 3 in-flight micro-batches at stage 0, over its cap of 2; "
        "run a backward first or raise the cap"
    )
    assert "[0F2]" in table


def test_cap_counts_until_the_weight_gradient() -> None:
    """A split backward holds the activations until W."""
    assert check(schedule_of("0F0 0I0 0W0 0F1 0I1 0W1", caps=(1,))) == []
    assert "over its cap of 1" in complaint(schedule_of("0F0 0I0 0F1 0W0 0I1 0W1", caps=(1,)))[0]


def test_deadlock() -> None:
    """Rank 0 wants the backward of 1 first, rank 1 sends that of 0 first."""
    schedule = schedule_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    message, table = complaint(schedule)
    assert message == (
        "rank 0: 0B0 waits for ever (deadlock; waiting: rank 0 at 0B0, rank 1 at 1F1); "
        "stage 1 must run its backward of micro-batch 0 earlier (and 1 more)"
    )
    assert table.splitlines() == ["rank 0      0F0   [0B0]   0F1    0B1", "rank 1      1F0    1F1    1B0    1B1"]
    with pytest.raises(DeadlockError):
        require_valid(schedule)


def test_deadlock_names_the_forward_to_move() -> None:
    schedule = schedule_of("0F1 0F0 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2B0 2F1 2B1")
    assert check(schedule) == []  # out of order, yet nothing waits for ever
    stuck = schedule_of("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1")
    messages = [problem.message for problem in check(stuck)]
    assert any("stage 0 must run 0F1 earlier" in message for message in messages)


def test_all_reduce_before_the_last_backward_deadlocks() -> None:
    schedule = with_update(make_schedule("gpipe", 1, 2, replicas=[2]))
    early = Lane.of(0, [Action.parse("0F0"), Action.parse("0A"), Action.parse("0B0")])
    lanes = (early, schedule.lanes[1], schedule.lanes[3])
    message, _ = complaint(dataclasses.replace(schedule, lanes=lanes))
    assert "put it behind the last backward of stage 0" in message


def test_rendezvous_deadlock_where_preposted_receives_do() -> None:
    """Interleaved ranks all send first and nobody receives: fine with preposted receives only."""
    schedule = interleaved(2, 4, virtual=2)
    assert check(schedule) == []
    message, table = complaint(schedule, sends="rendezvous")
    assert "with blocking sends waits for ever" in message
    assert "run it with preposted receives" in message
    assert table.count("[") == 1


def test_rendezvous_deadlock_of_caps_that_fall_at_once() -> None:
    """Rank 1 sends its fourth forward while rank 2 still wants to hand back the first backward."""
    schedule = capped(3, 4, [4, 4, 1])
    assert check(schedule) == []
    problems = check(schedule, sends="rendezvous")
    assert [(problem.rank, problem.deadlock) for problem in problems] == [(0, True), (1, True), (2, True)]


def test_every_rank_with_lanes_that_run_at_once() -> None:
    schedule = make_schedule("fbp-as", 3, 4)
    assert check(schedule) == []
    swapped = dataclasses.replace(schedule, lanes=(*schedule.lanes[:5], Lane.of(2, list(schedule.lanes[5])[::-1])))
    message, _ = complaint(swapped)
    assert "waits for ever" in message


def test_all_problems_are_found() -> None:
    schedule = schedule_of("0F0 0F0 0B0", "1F0")
    assert [problem.rank for problem in check(schedule)] == [0, 1]
    assert complaint(schedule)[0].endswith("(and 1 more)")


def test_a_hundred_problems_are_enough() -> None:
    schedule = schedule_of("0F0 " * 1000 + "0B0")
    assert len(check(schedule)) == 100
    assert complaint(schedule)[0].endswith("(and 99 or more)")


def test_the_table_shows_what_is_near() -> None:
    """Twenty ranks of forty actions are not printed for one cell."""
    schedule = with_recompute(make_schedule("1f1b-sno", 20, 20))
    actions = list(schedule.lanes[10])
    at = next(index for index in range(30, 60) if actions[index].kind == Kind.R)
    actions[at], actions[at + 1] = actions[at + 1], actions[at]
    lanes = (*schedule.lanes[:10], Lane.of(10, actions), *schedule.lanes[11:])
    _, table = complaint(dataclasses.replace(schedule, lanes=lanes))
    lines = table.splitlines()
    assert len(lines) == 9
    assert sum("[" in line for line in lines) == 1
    assert "[" in lines[4]
    assert lines[4].startswith("rank 10  … ")
    assert lines[4].endswith(" …")
    assert all(len(line) < 100 for line in lines)
