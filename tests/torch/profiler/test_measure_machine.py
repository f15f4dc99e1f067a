"""This machine: its cluster file, links between its ranks, its slices; and the commands around measuring."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from bapipe.cli.profile import cluster_group, merge_command, profile_command, slices_group
from bapipe.costs.profile import read_profile
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster_file import parse_cluster, read_cluster
from bapipe.models.model_spec import parse_arguments
from bapipe.torch import slices
from bapipe.torch.profiler import detect_machine
from bapipe.torch.profiler.detect_machine import AcceleratorGroup, Machine, cluster_text, usable_memory
from bapipe.torch.profiler.environment import accelerator_name
from bapipe.torch.profiler.link_record import (
    LinkMeasurement,
    LinkSample,
    collective_bandwidth,
    collective_rates,
    fit,
    fsdp_units,
    links_of,
)
from bapipe.torch.profiler.measure_links import measure_links
from bapipe.torch.profiler.measurement import Environment
from bapipe.torch.profiler.statistics import SampleSummary

pytestmark = pytest.mark.usefixtures("warm")

MIB = 2**20


def sample(nbytes: int, seconds: float, *, both: bool = False, pair: tuple[int, int] = (0, 1)) -> LinkSample:
    summary = SampleSummary(median=seconds, low=seconds, high=seconds, count=5)
    return LinkSample(first=pair[0], second=pair[1], nbytes=nbytes, both=both, seconds=summary)


def link(pair: tuple[int, int], rate: float, *, shared: bool = False) -> list[LinkSample]:
    times = [(size, both, 1e-5 + size / (rate / (2 if both and shared else 1))) for size in (8, MIB, 16 * MIB)
             for both in (False, True)]  # fmt: skip
    return [sample(size, seconds, both=both, pair=pair) for size, both, seconds in times]


def test_not_all_of_a_gpu_is_for_tensors() -> None:
    """CUDA's own, and what torch's allocator cannot place; even a tiny slice has something left."""
    assert usable_memory(16e9) == pytest.approx(0.95 * 16e9 - 0.5e9)
    assert usable_memory(0.4e9) == 0.2e9


MEASURED = LinkMeasurement(
    ranks=3,
    backend="gloo",
    device="cpu",
    pairs=(*link((0, 1), 1e9), *link((1, 2), 2e9, shared=True)),
    all_reduce=tuple(sample(size, 2e-5 + size / 5e8, both=True) for size in (8, MIB, 16 * MIB)),
)
SENT = replace(
    MEASURED,
    buckets=(sample(64 * MIB, 64 * MIB / 1e9, both=True, pair=(0, 1)), sample(100 * MIB, 0.2, pair=(0, 2))),
    gather=tuple(sample(size, 1e-4 + size / 8e8, pair=(0, 2)) for size in (8, MIB, 16 * MIB)),
    scatter=tuple(sample(size, 1e-4 + size / 4e8, pair=(0, 2)) for size in (8, MIB, 16 * MIB)),
    unit_gather=tuple(sample(size, 2e-3 + size / 5e8, pair=(0, 2)) for size in (2**12, MIB, 16 * MIB)),
    unit_scatter=tuple(sample(size, 3e-3 + size / 2.5e8, pair=(0, 2)) for size in (2**12, MIB, 16 * MIB)),
    overlap=0.25,
)
"""with other collectives: those of all three ranks count"""
CORES = AcceleratorGroup(
    type="cpu-core",
    description="a test",
    device="cpu",
    count=3,
    memory=8e9,
    memory_bandwidth=1e10,
    flops={"fp32": 1e11},
)
MACHINE = Machine(node="here", kind="cpu", groups=(CORES,))


def test_latency_and_bandwidth_are_found_again() -> None:
    latency, rate = fit([sample(8, 1e-5), sample(MIB, 1e-5 + MIB / 1e9), sample(16 * MIB, 1e-5 + 16 * MIB / 1e9)])
    assert latency == pytest.approx(1e-5)
    assert rate == pytest.approx(1e9, rel=1e-3)


def test_messages_that_all_take_as_long_have_a_rate_from_below() -> None:
    """As between slices of one GPU: a rate that follows from the least message would be bytes per millisecond."""
    latency, rate = fit([sample(8, 1.05e-3), sample(MIB, 1.0e-3), sample(16 * MIB, 1.02e-3)])
    assert latency == pytest.approx(1.05e-3)
    assert rate == pytest.approx(16 * MIB / 1.02e-3)


def test_both_directions_at_once_tell_the_duplex() -> None:
    links = links_of(MEASURED)
    assert (links[0, 1].duplex, links[1, 2].duplex) == ("full", "half")
    assert links[0, 1].bandwidth == pytest.approx(1e9, rel=1e-3)
    assert links[1, 2].bandwidth == pytest.approx(2e9, rel=1e-3)
    assert collective_bandwidth(MEASURED) == pytest.approx(4 / 3 * 5e8, rel=1e-2)


def test_a_measured_cluster_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(cluster_text(MACHINE, MEASURED))
    cluster = read_cluster(str(path))
    assert [item.name for item in cluster.accelerators] == ["here/0", "here/1", "here/2"]
    assert cluster.within.bandwidth == pytest.approx(1e9, rel=1e-3)
    assert cluster.link(1, 2).duplex == "half"
    assert cluster.collective_bandwidth == pytest.approx(6.67e8, rel=1e-2)
    assert cluster.types["cpu-core"].memory == 8e9


def test_rates_of_collectives_are_those_of_a_ring_of_all_ranks(tmp_path: Path) -> None:
    rates = collective_rates(SENT)
    assert rates.buckets == pytest.approx(4 / 3 * 100 * MIB / 0.2)
    assert rates.gather == pytest.approx(2 / 3 * 8e8)
    assert rates.scatter == pytest.approx(2 / 3 * 4e8)
    path = tmp_path / "cluster.toml"
    path.write_text(cluster_text(MACHINE, SENT))
    cluster = read_cluster(str(path))
    assert cluster.collective_overlap == 0.25
    for name, rate in rates.known.items():
        assert cluster.collective_rates.known[name] == pytest.approx(rate, rel=1e-3)
    lines = CliRunner().invoke(cluster_group, ["show", str(path)]).output.splitlines()
    units = cluster.fsdp_units
    assert units is not None
    assert units.gather.bandwidth == pytest.approx(5e8, rel=1e-3)
    assert units.gather.seconds_if_any(5e8) == pytest.approx(1.002, rel=1e-3)
    assert units.scatter.seconds_if_any(5e8) == pytest.approx(2.003, rel=1e-3)
    assert units.scatter.seconds_if_any(0.0) == 0.0
    starts = ("all-reduce: ", "all-reduces in buckets: ", "all-gather: ", "reduce-scatter: ", "FSDP2, a unit: ")
    assert all(any(line.startswith(start) for line in lines) for start in starts)


def test_what_was_measured_before_there_were_other_collectives_has_none_of_their_rates() -> None:
    assert collective_rates(MEASURED).known == {}
    text = cluster_text(MACHINE, MEASURED)
    assert "overlap" not in text
    assert "gather" not in text
    assert "fsdp" not in text


def test_detect_describes_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    result = CliRunner().invoke(cluster_group, ["detect", "-o", str(path), "--ranks", "2"])
    assert result.exit_code == 0, result.output
    cluster = read_cluster(str(path))
    assert len(cluster) == 2
    kind = cluster.type_of(0)
    assert kind.memory > 0
    assert kind.flops["fp32"] > 0


def test_links_between_two_ranks_of_this_machine() -> None:
    found = measure_links(2, largest=MIB, seconds=0.05)
    assert (found.ranks, found.backend, found.device) == (2, "gloo", "cpu")
    assert {(item.nbytes, item.both) for item in found.pairs} == {
        (size, both) for size in (8, 2**12, 2**16, MIB) for both in (False, True)
    }
    assert all(item.seconds.count >= 5 and item.seconds.median > 0 for item in (*found.pairs, *found.all_reduce))
    assert links_of(found)[0, 1].bandwidth > 0
    assert [item.nbytes for item in found.buckets] == [4 * MIB]
    for collective in (found.gather, found.scatter):
        assert [item.nbytes for item in collective] == [8, 2**12, 2**16, MIB]
    assert set(collective_rates(found).known) == {"buckets", "gather", "scatter"}
    for one in (found.unit_gather, found.unit_scatter):
        assert [item.nbytes for item in one] == [2**12, MIB]
        assert all(item.seconds.median >= 0 for item in one)
    assert fsdp_units(found) is not None
    assert found.overlap is not None
    assert 0 <= found.overlap <= 1


def test_a_reduce_scatter_leaves_every_rank_with_as_many_numbers() -> None:
    """Of three ranks each has a part of messages that do not divide by three."""
    found = measure_links(3, largest=2**12, seconds=0.01)
    assert [(item.second, item.nbytes) for item in found.scatter] == [(1, 8), (1, 2**12), (2, 8), (2, 2**12)]
    assert [(item.second, item.nbytes) for item in found.gather] == [(1, 8), (1, 2**12), (2, 8), (2, 2**12)]


def test_links_need_two_ranks() -> None:
    with pytest.raises(BaPipeError, match="between 2 to 64 ranks, got 1; correct --ranks"):
        measure_links(1)


@pytest.mark.parametrize(
    ("name", "slice_", "expected"),
    [
        ("NVIDIA H200", "", "h200"),
        ("NVIDIA H200", "25 % of the multiprocessors by CUDA MPS", "h200-25pct"),
        ("NVIDIA H200", "12.5 % of the multiprocessors", "h200-12.5pct"),
        ("NVIDIA A100-SXM4-80GB", "", "a100-80"),
        ("Tesla V100-PCIE-32GB", "", "v100-32"),
        ("Tesla T4", "", "t4"),
        ("NVIDIA GeForce RTX 4090", "", "rtx4090"),
        ("NVIDIA Quadro P400", "", "nvidia-quadro-p400"),
    ],
)
def test_devices_get_the_catalogue_s_names(name: str, slice_: str, expected: str) -> None:
    environment = Environment(device="cuda", name=name, torch="2.11", threads=8, slice=slice_)
    assert accelerator_name(environment) == expected


def test_a_cut_gpu_is_detected_under_the_type_that_profiles_of_its_slices_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut = slices.Slices(gpu=0, percentages=(25.0,) * 4, memory=16e9, folder="/x")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(slices, "status", lambda _: cut)
    monkeypatch.setattr(detect_machine, "_copy_rate", lambda _: 4e12)
    monkeypatch.setattr(detect_machine, "_product_rate", lambda *_: 4e13)
    found = detect_machine.detect()
    profiled = Environment(
        device="cuda",
        name="NVIDIA H200",
        torch="2.11",
        threads=1,
        slice=f"{slices.describe(cut, 0)}, 3 others beside",
    )
    (group,) = found.groups
    assert group.type == accelerator_name(profiled) == "h200-25pct"
    assert (found.count, group.memory, group.memory_bandwidth) == (4, detect_machine.usable_memory(16e9), 1e12)
    unequal = slices.Slices(gpu=0, percentages=(25.0, 25.0, 50.0, 25.0), memory=16e9, folder="/x")
    monkeypatch.setattr(slices, "status", lambda _: unequal)
    found = detect_machine.detect()
    assert str(found) == "2 × h200-25pct + 1 × h200-50pct + 1 × h200-25pct"
    cluster = parse_cluster(cluster_text(found), where="here")
    names = ["h200-25pct", "h200-25pct", "h200-50pct", "h200-25pct"]
    assert [item.type for item in cluster.accelerators] == names
    rates = {name: kind.memory_bandwidth for name, kind in cluster.types.items()}
    assert rates == {"h200-25pct": 1e12, "h200-50pct": 2e12}


def test_gpus_of_several_types_are_detected_rank_after_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["NVIDIA A100-SXM4-80GB", "NVIDIA H200", "NVIDIA H200"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: names[device.index])
    monkeypatch.setattr(
        "torch.cuda.get_device_properties",
        lambda device: SimpleNamespace(total_memory=(80e9, 141e9, 140e9)[device.index]),
    )
    monkeypatch.setattr(slices, "status", lambda _: None)
    measured: list[str] = []
    monkeypatch.setattr(detect_machine, "_copy_rate", lambda device: measured.append(str(device)) or 4e12)
    monkeypatch.setattr(detect_machine, "_product_rate", lambda *_: 4e13)
    found = detect_machine.detect()
    assert measured == ["cuda:0", "cuda:1"]  # one of each type
    assert [(group.count, group.device, group.memory) for group in found.groups] == [
        (1, "cuda:0", usable_memory(80e9)),
        (2, "cuda:1", usable_memory(140e9)),  # what each of them has
    ]
    cluster = parse_cluster(cluster_text(found), where="here")
    assert [item.type for item in cluster.accelerators] == [found.groups[0].type, "h200", "h200"]


def test_slices_have_their_own_environment(tmp_path: Path) -> None:
    cut = slices.Slices(gpu=1, percentages=(50, 25, 12.5, 12.5), memory=16e9, folder=str(tmp_path))
    assert slices.slice_environment(cut, 2) == {
        "CUDA_VISIBLE_DEVICES": "0",
        "CUDA_MPS_PIPE_DIRECTORY": f"{tmp_path}/pipe",
        "CUDA_MPS_LOG_DIRECTORY": f"{tmp_path}/log",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "12.5",
        "NCCL_HOSTID": f"{socket.gethostname()}-gpu1-slice2",
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=15258M",
    }
    assert slices.even_slices(4) == (25.0,) * 4
    with pytest.raises(BaPipeError, match="there are slices 0 to 3, got 4"):
        slices.slice_environment(cut, 4)
    with pytest.raises(BaPipeError, match="1 to 48 slices"):
        slices.even_slices(0)
    with pytest.raises(BaPipeError, match="shares over 0 and up to 100 %"):
        slices.Slices(gpu=0, percentages=(50, 120), folder="x")


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is an NVIDIA GPU here")
def test_slices_need_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAPIPE_CACHE", str(tmp_path))
    with pytest.raises(BaPipeError, match="slices need an NVIDIA GPU, and nvidia-smi finds none here"):
        CliRunner().invoke(slices_group, ["start", "--count", "4", "--memory", "16GB"], catch_exceptions=False)
    assert "GPU 0 is not cut" in CliRunner().invoke(slices_group, ["status"]).output
    assert "GPU 0 was not cut" in CliRunner().invoke(slices_group, ["stop"]).output


def test_arguments_become_what_they_look_like() -> None:
    found = parse_arguments(["layers=24", "rate=0.5", "tied=false", "name=a=b"])
    assert found == {"layers": 24, "rate": 0.5, "tied": False, "name": "a=b"}
    with pytest.raises(BaPipeError, match="looks like key=value, got 'layers'"):
        parse_arguments(["layers"])


def test_the_commands_write_and_merge_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAPIPE_CACHE", str(tmp_path))
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    for kind in ("one", "two"):
        command = ["measured_models:sequential", "--microbatch", "1,2", "--arg", "width=16", "--type", kind]
        command += ["-o", str(tmp_path / f"{kind}.json"), "--details", str(tmp_path / "details.json")]
        result = CliRunner().invoke(profile_command, command, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        assert "sum of layers" in result.output
    both = tmp_path / "both.json"
    merging = [str(tmp_path / "one.json"), str(tmp_path / "two.json"), "-o", str(both)]
    result = CliRunner().invoke(merge_command, merging, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    merged = read_profile(both)
    assert set(merged.accelerators) == {"one", "two"}
    assert merged.model.args == {"width": 16}
    assert (tmp_path / "details.json").read_text().startswith('{\n "schema": "bapipe.measurement/3"')


def test_a_rank_is_profiled_while_the_others_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAPIPE_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of the load, too
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    command = ["measured_models:sequential", "--micro-batch", "1", "--arg", "width=16", "--ranks", "2"]
    command += ["-o", str(tmp_path / "profile.json")]
    result = CliRunner().invoke(profile_command, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (table,) = read_profile(tmp_path / "profile.json").accelerators.values()
    assert "one of 2 ranks, all training" in table.description


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a model to profile"),
        (["vgg16", "--links"], "--links measures this machine, not a model"),
        (["vgg16", "--slice-of", "4"], "--slice-of cuts a GPU, got --device cpu; add --device cuda"),
        (["vgg16", "-o", "/no/such/folder/p.json"], "is in a folder that does not exist"),
        (["--links", "--device", "tpu"], "a device is cpu or cuda, got 'tpu'"),
        (["vgg16", "--ranks", "2", "--device", "cuda"], "--ranks of a profile are those of a CPU"),
    ],
)
def test_mistakes_on_the_command_line(arguments: list[str], message: str) -> None:
    with pytest.raises(BaPipeError, match=message):
        CliRunner().invoke(profile_command, arguments, catch_exceptions=False)
