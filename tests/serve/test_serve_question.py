"""A question is what its URL says, within limits, and so is its command."""

from __future__ import annotations

import shlex
from typing import Any
from urllib.parse import parse_qsl, urlencode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapipe.errors import BaPipeError
from bapipe.serve.question import Question, command_line, parse_question, query_values

BASE = {"model": "vgg16", "cluster": "4xv100"}


def test_texts_and_numbers_mean_the_same() -> None:
    text = parse_question({**BASE, "global_batch": "256", "split_layers": "1", "stages": ""})
    assert text == parse_question({**BASE, "global_batch": 256, "split_layers": True, "stages": None})
    assert text == Question(model="vgg16", cluster="4xv100", global_batch=256, split_layers=True)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"cluster": "4xv100"}, "a question needs a model; give model=…"),
        ({"model": "vgg16"}, "a question needs a cluster"),
        ({**BASE, "global_bach": 4}, r"unknown knob 'global_bach' \(did you mean 'global_batch'\?\)"),
        ({**BASE, "global_batch": "4.5"}, "global_batch must be a whole number, got '4.5'"),
        ({**BASE, "global_batch": True}, "global_batch must be a whole number, got 'True'"),
        ({**BASE, "global_batch": 0}, "global_batch must be from 1 to 65536, got 0; correct it"),
        ({**BASE, "global_batch": 10**400}, "global_batch must be from 1 to 65536, got a number of many digits"),
        ({**BASE, "stages": 513}, "stages must be from 1 to 512, got 513"),
        (
            {**BASE, "global_batch": 8192, "microbatch": 1},
            "a page plans at most 4096 micro-batches, got 8192; raise",
        ),
        (
            {**BASE, "global_batch": 10, "microbatch": 4},
            "a global batch of 10 is no multiple of a micro-batch of 4",
        ),
        ({**BASE, "schedule": "1f1b-s"}, "unknown schedule '1f1b-s'"),
        ({**BASE, "cap": 65_537}, "cap must be from 1 to 65536, got 65537"),
        ({**BASE, "cap": 4, "schedule": "zb-h1"}, "--in-flight belongs to the schedule 1f1b; zb-h1 sets"),
        ({**BASE, "strategy": "best"}, "unknown strategy 'best'"),
        ({**BASE, "space": "papers"}, "unknown space 'papers'; known: full, paper"),
        ({**BASE, "dtype": "fp31"}, r"unknown precision 'fp31' \(did you mean"),
        ({**BASE, "optimizer": "lamb"}, "unknown optimizer 'lamb'"),
        ({**BASE, "link_bandwidth": "fast"}, "link_bandwidth must look like '12 GB/s' or '250 Gb/s', got 'fast'"),
        ({**BASE, "link_bandwidth": "0GB/s"}, "link_bandwidth must be more than 0 and under"),
        ({**BASE, "link_bandwidth": "9e12GB/s"}, "link_bandwidth must be more than 0 and under"),
        (
            {**BASE, "link_bandwidth": "9e999GB/s"},
            r"link_bandwidth must be at most 1e\+30 in plain units",
        ),
        ({**BASE, "memory_limit": 12}, "memory_limit must be a text, got 12"),
        ({**BASE, "split_layers": "perhaps"}, "split_layers must be true or false, got 'perhaps'"),
        ({**BASE, "split_layers": [1]}, "split_layers must be true or false"),
        ({**BASE, "model": "x" * 201}, "model must be at most 200 printable characters"),
        ({**BASE, "model": "a\x00b"}, "model must be at most 200 printable characters, got 'a b'"),
        ({**BASE, "model": {"a": 1}}, "model must be a text"),
    ],
)
def test_mistakes_are_told(values: dict[str, Any], words: str) -> None:
    with pytest.raises(BaPipeError, match=words):
        parse_question(values)


QUESTIONS = st.builds(
    Question,
    model=st.sampled_from(["vgg16", "own profile.json", "it's.toml"]),
    cluster=st.sampled_from(["4xv100", "2xa100+2xv100", "my cluster.toml"]),
    global_batch=st.sampled_from([None, 64, 65_536]),
    microbatch=st.sampled_from([None, 16, 64]),
    schedule=st.sampled_from([None, "1f1b"]),
    cap=st.sampled_from([None, 1, 12]),
    stages=st.sampled_from([None, 1, 512]),
    strategy=st.sampled_from(["exact", "bapipe"]),
    space=st.just("full"),
    optimizer=st.sampled_from(["sgd", "adam"]),
    precision=st.sampled_from([None, "fp16"]),
    memory_limit=st.sampled_from([None, "12 GB"]),
    link_bandwidth=st.sampled_from([None, "1.6GB/s"]),
    split_layers=st.booleans(),
) | st.builds(
    Question,
    model=st.just("vgg16"),
    cluster=st.just("4xv100"),
    schedule=st.sampled_from([None, "zb-h1", "1f1b-so"]),
    space=st.sampled_from(["full", "paper"]),
)


@given(QUESTIONS)
@settings(max_examples=100)
def test_the_url_holds_all_of_it(question: Question) -> None:
    query = urlencode(query_values(question))
    assert parse_question(dict(parse_qsl(query))) == question


@given(QUESTIONS)
@settings(max_examples=50)
def test_the_command_says_all_of_it(question: Question) -> None:
    import click

    from bapipe.cli.plan import plan_command

    words = shlex.split(command_line(question))
    assert words[:2] == ["bapipe", "plan"]
    context = click.Context(plan_command)
    plan_command.parse_args(context, words[2:])
    said = context.params
    for name in (
        "model",
        "cluster",
        "global_batch",
        "microbatch",
        "schedule",
        "cap",
        "stages",
        "strategy",
        "space",
    ):
        assert said[name] == getattr(question, name)
    for name in ("optimizer", "precision", "memory_limit", "link_bandwidth", "split_layers"):
        assert said[name] == getattr(question, name)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from([*Question.__dataclass_fields__]) | st.text(max_size=20)


@given(st.dictionaries(NAMES, VALUES, max_size=6))
@settings(max_examples=200)
def test_anything_is_read_or_refused(values: dict[str, object]) -> None:
    try:
        question = parse_question({**BASE, **values})
    except BaPipeError as error:
        complaint = str(error)
    else:
        complaint = ""
        assert parse_question(query_values(question)) == question
    assert complaint.isprintable()
    assert len(complaint) < 600


def test_a_link_from_before_names_the_precision_by_its_old_name() -> None:
    assert parse_question({**BASE, "dtype": "bf16-mixed"}) == parse_question({**BASE, "precision": "bf16-mixed"})
    assert "--precision bf16-mixed" in command_line(parse_question({**BASE, "dtype": "bf16-mixed"}))
    assert parse_question({**BASE, "minibatch": 4}).global_batch == 4
