"""The catalogue: every figure with its source, peaks of FPGAs computed, names found or corrected."""

from __future__ import annotations

import pytest

from bapipe.errors import BaPipeError
from bapipe.hardware.catalog import catalog_aliases, find_type, load_catalog
from bapipe.hardware.catalog.accelerator_types import TypeEntry, accelerator_type
from bapipe.io.decode import decode

CATALOG = load_catalog()
GPU = {"kind": "gpu", "memory": "16 GB", "memory_bandwidth": "900 GB/s", "flops": {"fp32": "14 TFLOPS"}}


def built(**changes: object) -> object:
    data = {key: value for key, value in {**GPU, **changes}.items() if value is not None}
    return accelerator_type("mine", decode(TypeEntry, data, where="here"), where="here")


def test_it_holds_what_was_promised() -> None:
    assert {
        "v100-16", "v100-32", "a100-40", "a100-80", "h100", "h200", "l4", "t4", "rtx3090", "rtx4090", "mi250-gcd",
        "mi300x", "vcu118", "vcu129", "cpu-core",
    } == set(CATALOG)  # fmt: skip


@pytest.mark.parametrize("name", CATALOG)
def test_every_figure_has_a_source(name: str) -> None:
    kind = CATALOG[name]
    wanted = {"flops", "memory", "memory_bandwidth", "link_bandwidth", "efficiency"}
    assert set(kind.sources) == wanted | ({"board"} if kind.kind == "fpga" else set())
    assert kind.link_bandwidth is not None
    assert set(kind.efficiency.compute) == set(kind.flops)
    assert "assumption" in kind.sources["efficiency"]
    assert (kind.execution == "asynchronous") == (kind.kind == "fpga")


def test_figures_of_the_v100_are_in_si_units() -> None:
    kind = CATALOG["v100-16"]
    assert kind.flops == {"fp32": 14e12, "fp16": 112e12}
    assert (kind.memory, kind.memory_bandwidth, kind.link_bandwidth) == (16e9, 900e9, 12e9)


@pytest.mark.parametrize(
    ("name", "dsp", "mebibits", "peak"), [("vcu118", 6840, 345.9, 3.42e12), ("vcu129", 12288, 454.9, 6.144e12)]
)
def test_fpga_boards_are_those_of_table_v(name: str, dsp: int, mebibits: float, peak: float) -> None:
    kind = CATALOG[name]
    assert kind.board["dsp"] == dsp
    assert kind.board["on_chip_bytes"] == pytest.approx(mebibits * 2**20 / 8)
    assert kind.memory_bandwidth == 40e9
    assert kind.link_bandwidth == pytest.approx(31.25e9)
    assert kind.flops == {"fp16": pytest.approx(peak)}
    assert kind.efficiency.compute["fp16"] == kind.board["utilisation"] == 0.9


@pytest.mark.parametrize(
    ("alias", "name"),
    [("v100", "v100-16"), ("V100", "v100-16"), ("a100", "a100-40"), ("mi300", "mi300x"), ("mi250", "mi250-gcd"),
     ("4090", "rtx4090"), ("cpu", "cpu-core"), (" h100 ", "h100")],
)  # fmt: skip
def test_aliases(alias: str, name: str) -> None:
    assert find_type(alias).name == name


def test_aliases_hide_no_type() -> None:
    aliases = catalog_aliases()
    assert not set(aliases) & set(CATALOG)
    assert set(aliases.values()) <= set(CATALOG)


def test_the_catalogue_cannot_be_changed_by_its_reader() -> None:
    load_catalog().clear()
    assert load_catalog()


def test_unknown_name_is_corrected() -> None:
    with pytest.raises(BaPipeError, match=r"unknown accelerator 'v10O' \(did you mean 'v100'\?\); known are"):
        find_type("v10O")


def test_own_type_takes_defaults() -> None:
    kind = built()
    assert kind.execution == "synchronous"
    assert kind.link_bandwidth is None
    assert kind.efficiency.launch == 30e-6
    fpga = built(
        kind="fpga", flops=None, board={"dsp": 100, "on_chip_bytes": "1 MB", "clock": 1e8, "macs_per_dsp_cycle": 2}
    )
    assert fpga.execution == "asynchronous"
    assert fpga.flops == {"fp16": 100 * 2 * 2 * 1e8}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memroy": 1}, r"unknown key 'memroy' \(did you mean 'memory'\?\)"),
        ({"memory": "16 apples"}, r"here: memory must look like '16 GB'"),
        ({"memory": 0}, r"here: memory must be more than 0, got 0"),
        ({"memory_bandwidth": "16 GB"}, r"here: memory_bandwidth must look like '12 GB/s'"),
        ({"flops": {"fp23": 1}}, r"flops: unknown dtype 'fp23' \(did you mean 'fp32'\?\)"),
        ({"flops": {"fp32": 0}}, r"flops: fp32 must be more than 0"),
        ({"flops": None}, r"here: 'flops' is missing; add for instance"),
        ({"kind": "gppu"}, r"must be one of gpu, fpga, cpu; got 'gppu' \(did you mean 'gpu'\?\)"),
        ({"link_bandwidth": 0}, r"link_bandwidth must be more than 0"),
        ({"board": {"dsp": 1, "on_chip_bytes": 1, "clock": 1}}, r"'board' is for kind = \"fpga\", got \"gpu\""),
        ({"kind": "fpga", "board": {"dsp": 0, "on_chip_bytes": 1, "clock": 1}}, r"board: dsp must be more than 0"),
        ({"kind": "fpga", "board": {"dsp": 1, "on_chip_bytes": 1}}, r"'clock' is missing"),
        ({"efficiency": {"memory": 0}}, r"efficiency: memory must be a share such as 0.8, got 0"),
        ({"efficiency": {"compute": {"fp32": 85}}}, r"efficiency: compute: fp32 must be a share"),
        ({"efficiency": {"compute": {"f32": 0.5}}}, r"compute: unknown dtype 'f32'"),
        ({"efficiency": {"launch": "soon"}}, r"efficiency: launch must look like"),
    ],
)
def test_bad_types_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(BaPipeError, match=message):
        built(**changes)
