"""Answers to questions: from the cache, from one who asks the same right now, or from a planning process.

A question that nobody waits for any more is given up.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from bapipe.io.files import content_hash
from bapipe.serve.own_files import files_of, list_folder
from bapipe.serve.process_pool import Workers
from bapipe.serve.question import Question, query_values

__all__ = ["CACHE_BYTES", "PATIENCE", "Answer", "Answers"]

CACHE_BYTES = 64 * 2**20
"""of answers that are kept"""
PATIENCE = 2.0
"""seconds that a process goes on with a question whose askers have left: to start another takes as long, and who
turns a knob leaves question after question"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a planning process said."""

    parts: dict[str, str]
    """by name, as `bapipe.serve.planning.answer_parts` gives them; empty where there is an error"""
    error: str | None = None
    status: int = 200

    @property
    def size(self) -> int:
        return sum(map(len, self.parts.values())) + len(self.error or "") + 200


@dataclass(slots=True, kw_only=True, eq=False)
class _Asked:
    """A question under way."""

    waiting: int = 0
    """how many want its answer"""
    begun: bool = False
    """whether a process works on it"""
    task: asyncio.Task[Answer] = field(init=False)


class Answers:
    """Asks the workers, each question once."""

    def __init__(self, workers: Workers, *, folder: Path | None, most_bytes: int = CACHE_BYTES) -> None:
        self._workers, self._folder, self._most = workers, folder, most_bytes
        self._kept: OrderedDict[str, Answer] = OrderedDict()
        self._asked: dict[str, _Asked] = {}
        self._size = 0

    async def get(self, question: Question, *, draft: bool = False) -> Answer:
        """Raises BaPipeError for a file that is not there, BusyError and SlowError.

        Cancelled, as for one who has left, it takes the answer from no other; the last to leave ends the question.
        """
        key = self._key(question, draft)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = _Asked()
            asked.task = asyncio.create_task(self._ask(key, question, draft, asked))
            asked.task.add_done_callback(lambda _: self._forget(key, asked))
        asked.waiting += 1
        try:
            return await asyncio.shield(asked.task)
        finally:
            asked.waiting -= 1
            if not asked.waiting and not asked.task.done():
                delay = PATIENCE if asked.begun else 0.0
                asyncio.get_running_loop().call_later(delay, self._give_up, key, asked)

    def _give_up(self, key: str, asked: _Asked) -> None:
        if not asked.waiting and not asked.task.done():
            self._forget(key, asked)
            asked.task.cancel()

    def _forget(self, key: str, asked: _Asked) -> None:
        """Let one who asks again begin anew."""
        if self._asked.get(key) is asked:
            del self._asked[key]

    def _key(self, question: Question, draft: bool) -> str:
        """The question, and the state of the files that it names."""
        stamps = [(file.name, file.stamp) for file in files_of(question, list_folder(self._folder))]
        return content_hash([query_values(question), draft, stamps])

    async def _ask(self, key: str, question: Question, draft: bool, asked: _Asked) -> Answer:
        def begin() -> None:
            asked.begun = True

        said = await self._workers.ask({"question": query_values(question), "draft": draft}, begin=begin)
        answer = Answer(parts=said.get("parts", {}), error=said.get("error"), status=said.get("status", 200))
        if answer.status < 500:
            self._keep(key, answer)
        return answer

    def _keep(self, key: str, answer: Answer) -> None:
        self._kept[key] = answer
        self._size += answer.size
        while self._size > self._most and self._kept:
            _, oldest = self._kept.popitem(last=False)
            self._size -= oldest.size
