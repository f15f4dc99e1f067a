"""Answers to questions: from the cache, from one who asks the same right now, or from a planning process."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from bapipe.io.files import content_hash
from bapipe.serve.own_files import files_of, list_folder
from bapipe.serve.process_pool import Workers
from bapipe.serve.question import Question, query_values

__all__ = ["CACHE_BYTES", "Answer", "Answers"]

CACHE_BYTES = 64 * 2**20
"""of answers that are kept"""


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


class Answers:
    """Asks the workers, each question once."""

    def __init__(self, workers: Workers, *, folder: Path | None, most_bytes: int = CACHE_BYTES) -> None:
        self._workers, self._folder, self._most = workers, folder, most_bytes
        self._kept: OrderedDict[str, Answer] = OrderedDict()
        self._asked: dict[str, asyncio.Task[Answer]] = {}
        self._size = 0

    async def get(self, question: Question, *, draft: bool = False) -> Answer:
        """Raises BaPipeError for a file that is not there, BusyError and SlowError."""
        key = self._key(question, draft)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        task = self._asked.get(key)
        if task is None:
            task = self._asked[key] = asyncio.create_task(self._ask(key, question, draft))
            task.add_done_callback(lambda _: self._asked.pop(key, None))
        # One who leaves does not take the answer from the others.
        return await asyncio.shield(task)

    def _key(self, question: Question, draft: bool) -> str:
        """The question, and the state of the files that it names."""
        stamps = [(file.name, file.stamp) for file in files_of(question, list_folder(self._folder))]
        return content_hash([query_values(question), draft, stamps])

    async def _ask(self, key: str, question: Question, draft: bool) -> Answer:
        said = await self._workers.ask({"question": query_values(question), "draft": draft})
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
