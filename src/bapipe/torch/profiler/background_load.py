"""Load for the other slices of a GPU, or the other ranks of a CPU, while one is profiled: training steps of the
same model, until stopped."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bapipe.errors import BaPipeError
from bapipe.models.builtin import Argument
from bapipe.models.model_spec import model_ref, parse_arguments
from bapipe.torch.inputs.build_model import build_model
from bapipe.torch.slices.mps import Slices, describe, slice_environment

__all__ = ["Load", "beside_ranks", "loaded", "main"]

_PATIENCE = 180.0
"""seconds for a load to build its model and run a step"""
_GO = b"g"
"""what a load waits for before its first step"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What runs on the other slices, or as the other ranks."""

    name: str
    """of the own slice, with the others loaded, in a profile"""
    wait: Callable[[], None]
    """lets them train, and returns when all of them do. They start meanwhile, which takes half a minute, in which
    the model can be captured and compiled: they find in the compiler's cache what was compiled"""


@contextlib.contextmanager
def loaded(
    slices: Slices,
    own: int,
    spec: str,
    args: Mapping[str, Argument],
    *,
    precision: str,
    microbatch: int,
    compiled: bool = False,
) -> Iterator[Load]:
    """Every slice but `own` begins to train the model; they end when this does, or when this process is gone."""
    others = [index for index in range(len(slices)) if index != own]
    each = str(max(1, (os.cpu_count() or 1) // len(slices)))
    threads = {"OMP_NUM_THREADS": each, "TORCHINDUCTOR_COMPILE_THREADS": each}
    beside = f", {len(others)} others training beside it" if others else ""
    command = _command("cuda", spec, args, precision=precision, microbatch=microbatch, compiled=compiled)
    with _trained([threads | slice_environment(slices, index) for index in others], command) as wait:
        yield Load(name=f"{describe(slices, own)}{beside}", wait=wait)


@contextlib.contextmanager
def beside_ranks(
    ranks: int,
    spec: str,
    args: Mapping[str, Argument],
    *,
    precision: str,
    microbatch: int,
    threads: int = 1,
    compiled: bool = False,
) -> Iterator[Load]:
    """All but one of so many CPU ranks begin to train the model, as in a run: they share caches and memory."""
    own = {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = _command("cpu", spec, args, precision=precision, microbatch=microbatch, compiled=compiled)
    with _trained([own] * (ranks - 1), command) as wait:
        yield Load(name=f"one of {ranks} ranks, all training", wait=wait)


def _command(
    device: str, spec: str, args: Mapping[str, Argument], *, precision: str, microbatch: int, compiled: bool
) -> list[str]:
    """What trains the model; who starts it adds where it says that it does."""
    command = [sys.executable, "-m", "bapipe.torch.profiler.background_load", spec, "--device", device]
    command += ["--precision", precision, "--microbatch", str(microbatch)]
    command += ["--compile"] if compiled else []
    return [*command, *(f"--arg={key}={value}" for key, value in args.items())]


@contextlib.contextmanager
def _trained(environments: Sequence[Mapping[str, str]], command: Sequence[str]) -> Iterator[Callable[[], None]]:
    """A process that trains in each environment; lets them begin, and returns when all do."""
    with tempfile.TemporaryDirectory(prefix="bapipe-load-") as folder, contextlib.ExitStack() as stack:
        loads = []
        for index, environment in enumerate(environments):
            ready = Path(folder) / f"ready{index}"
            with open(Path(folder) / f"error{index}", "wb") as errors:
                process = subprocess.Popen(
                    [*command, "--ready", str(ready)],
                    env={**os.environ, **environment},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                )
            stack.callback(_end, process)
            loads.append((process, ready, Path(folder) / f"error{index}"))
        stack.callback(_release, [process for process, _, _ in loads])  # all of them, then each is waited for

        def wait() -> None:
            for process, _, _ in loads:
                _let_train(process)
            for process, ready, errors in loads:
                _await(process, ready, errors)

        yield wait


def _await(process: subprocess.Popen[bytes], ready: Path, errors: Path) -> None:
    end = time.monotonic() + _PATIENCE
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > end:
            lines = errors.read_text(errors="replace").strip().splitlines()
            said = lines[-1][:200] if lines else "it said nothing"
            raise BaPipeError(
                f"the load beside the profile did not start: {said}; give the slices or ranks more memory"
            )
        time.sleep(0.1)


def _let_train(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended; `_await` says why
        process.stdin.write(_GO)
        process.stdin.flush()


def _release(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    _release([process])
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(argv: Sequence[str] | None = None) -> None:
    """Train from the first byte of standard input to its end, or for `--seconds`."""
    from bapipe.hardware.precision import DEFAULT_PRECISION, find_precision
    from bapipe.torch.compiling.compiled_layers import CompiledPrograms
    from bapipe.torch.device.precision_modes import set_precision
    from bapipe.torch.profiler.environment import find_device
    from bapipe.torch.profiler.training_step import training_step

    parser = argparse.ArgumentParser(prog="bapipe.torch.profiler.background_load")
    parser.add_argument("model")
    parser.add_argument("--arg", action="append", default=[])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default=DEFAULT_PRECISION)
    parser.add_argument("--microbatch", type=int, default=16)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--ready", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3600.0)
    options = parser.parse_args(argv)
    go, stop = threading.Event(), threading.Event()

    def watch() -> None:
        while sys.stdin.read(1):
            go.set()
        stop.set()
        go.set()

    threading.Thread(target=watch, daemon=True).start()
    device, precision = find_device(options.device), find_precision(options.precision)
    set_precision(precision, device)
    source = build_model(model_ref(options.model, parse_arguments(options.arg)))
    programs = CompiledPrograms(device) if options.compile else None
    step = training_step(source, device=device, precision=precision, size=options.microbatch, programs=programs)
    go.wait()
    if not stop.is_set():
        step()
        options.ready.touch()
    end = time.monotonic() + options.seconds
    while not stop.is_set() and time.monotonic() < end:
        step()


if __name__ == "__main__":
    main()
    os._exit(0)  # the interpreter takes seconds to take apart what the capture and the compiler made
