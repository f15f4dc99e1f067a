"""Only files of the folder can be named, whatever the name looks like."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bapipe.errors import BaPipeError
from bapipe.serve.own_files import files_of, list_folder
from bapipe.serve.question import Question
from served import Served

OUTSIDE = [
    "../secret.toml",
    "..%2fsecret.toml",
    "%2e%2e/secret.toml",
    "deeper/inner.toml",
    "deeper/../cluster-4-v100.toml",
    "./cluster-4-v100.toml",
    "link.toml",
    "loop.toml",
    "-dash.toml",
    "..\\secret.toml",
    "/etc/hosts",
    "CLUSTER-4-V100.TOML",
    "cluster-4-v100.toml\x00",
    "tiny-profile.json/",
    "file:///etc/passwd",
]


def test_the_list(own_folder: Path) -> None:
    found = {file.name: file.kind for file in list_folder(own_folder)}
    assert found == {
        "broken.toml": "cluster",
        "cluster-4-v100.toml": "cluster",
        "cluster-two-cpus.toml": "cluster",
        "layers-small-cnn.toml": "model",
        "near.toml": "cluster",
        "tiny-profile.json": "model",
    }
    assert list_folder(None) == ()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BaPipeError, match=r"cannot be read: .*; name another with --folder"):
        list_folder(tmp_path / "no")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    assert list_folder(tmp_path) == ()


@pytest.mark.parametrize("name", OUTSIDE)
def test_nothing_else_has_a_name(name: str, own_folder: Path) -> None:
    listed = list_folder(own_folder)
    with pytest.raises(BaPipeError, match="unknown model"):
        files_of(Question(model=name, cluster="4xv100"), listed)
    if name.lower().endswith(".toml") or "/" in name or "\\" in name:  # what read_cluster takes for a file
        with pytest.raises(BaPipeError, match="unknown cluster"):
            files_of(Question(model="vgg16", cluster=name), listed)


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("knob", ["model", "cluster"])
def test_the_server_reads_nothing_outside(name: str, knob: str, served: Served) -> None:
    reply = served.ask("/api/plan", {"model": "alexnet", "cluster": "2xv100", knob: name})
    assert reply.status == 422
    assert reply.json["error"].startswith((f"unknown {knob} ", "cluster must be at most", "model must be at most"))


@pytest.mark.parametrize("knob", ["model", "cluster"])
def test_no_path_is_read(knob: str, served: Served, own_folder: Path) -> None:
    for path in (own_folder.parent / "secret.toml", own_folder / "cluster-4-v100.toml"):
        reply = served.ask("/api/plan", {"model": "alexnet", "cluster": "2xv100", knob: str(path)})
        assert reply.status == 422
        assert reply.json["error"].startswith(f"unknown {knob} ")


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../serve.py",
        "/assets/..%2f__init__.py",
        "/assets/%2e%2e/app.py",
        "/assets//etc/passwd",
        "/assets/serve.html",
        "/files/..%2fplan.json",
        "/files/tiny-profile.json",
        "/files//etc/passwd",
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/api/",
        "/api/plan/",
    ],
)
def test_no_other_path_is_served(path: str, served: Served) -> None:
    reply = served.ask(path)
    assert reply.status in (404, 307)
    if reply.status == 404:
        assert set(reply.json) == {"error"}


def test_a_broken_file_is_told_without_the_machine_s_paths(served: Served, own_folder: Path) -> None:
    reply = served.ask("/api/plan", {"model": "alexnet", "cluster": "broken.toml"})
    assert reply.status == 422
    assert reply.json["error"].startswith("broken.toml is not valid TOML")
    assert str(own_folder) not in reply.json["error"]
