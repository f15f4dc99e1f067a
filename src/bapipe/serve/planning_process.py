"""A planning process of `bapipe serve`: questions come on stdin, answers go to stdout, one at a time.

A message is its length as four bytes, then JSON. The first one out is `null`: ready. What is printed goes to
stderr.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import struct
import sys
import traceback
from typing import Any, BinaryIO

from bapipe.errors import BaPipeError
from bapipe.serve.planning import answer_parts, plan_question
from bapipe.serve.question import Question, parse_question
from bapipe.simulator.engine import numba_available

__all__ = ["LENGTH", "limit_memory", "main", "reply", "warm_up"]

LENGTH = struct.Struct(">I")
"""before every message"""


def reply(job: dict[str, Any]) -> dict[str, Any]:
    """{"parts": …}, or {"error": …, "status": …}: 422 what the user can mend, 500 our own mistake."""
    try:
        question = parse_question(job["question"])
        return {"parts": answer_parts(question, draft=bool(job.get("draft")))}
    except BaPipeError as error:
        return {"error": " ".join(str(error).split()), "status": 422}
    except MemoryError:
        words = "so many actions need more memory than one question may take; take fewer stages or micro-batches"
        return {"error": words, "status": 422}
    except Exception:
        traceback.print_exc(file=sys.stderr)
        return {"error": "the planner failed; the terminal of `bapipe serve` shows how", "status": 500}


def main() -> None:
    """Answer until stdin ends. BAPIPE_MEMORY, if set, is the most address space in bytes."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    limit_memory(int(os.environ.get("BAPIPE_MEMORY", "0")))
    warm_up()
    _send(target, None)
    while (job := _receive(source)) is not None:
        _send(target, reply(job))


def warm_up() -> None:
    """Load, and on a new machine compile, what plans need; with numba loaded even small ones use it."""
    if numba_available():
        importlib.import_module("numba")
    plan_question(Question(model="alexnet", cluster="2xv100+1xt4"))


def limit_memory(most: int) -> None:
    """Let this process have so many bytes of address space at most; 0, or where there is no such limit: any."""
    if most > 0:
        with contextlib.suppress(ImportError, OSError, ValueError):
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _receive(source: BinaryIO) -> dict[str, Any] | None:
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    job: dict[str, Any] = json.loads(source.read(LENGTH.unpack(head)[0]))
    return job


def _send(target: BinaryIO, value: object) -> None:
    body = json.dumps(value, allow_nan=False).encode()
    target.write(LENGTH.pack(len(body)) + body)
    target.flush()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        main()
