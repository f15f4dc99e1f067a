"""The web application: a page, its assets, the plan of a question as JSON, and files to download."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from bapipe.costs.optimizers import OPTIMIZERS
from bapipe.errors import BaPipeError
from bapipe.hardware.catalog import catalog_aliases, load_catalog
from bapipe.hardware.precision import PRECISIONS
from bapipe.models.builtin import BUILTIN_NAMES
from bapipe.planner import STRATEGIES
from bapipe.planner.request import SCHEDULE_NAMES
from bapipe.reporting.drawing.action_styles import LOOKS
from bapipe.reporting.drawing.patterns import patterns
from bapipe.reporting.html.document import fill_template, page_script, page_style
from bapipe.serve.answers import Answer, Answers
from bapipe.serve.guard import Guard
from bapipe.serve.own_files import list_folder
from bapipe.serve.process_pool import BusyError, SlowError, Workers
from bapipe.serve.question import LARGEST_GLOBAL_BATCH, MOST_ACCELERATORS, Question, parse_question

__all__ = ["DOWNLOADS", "ServeSettings", "make_app"]

DOWNLOADS = {
    "plan.json": "application/json",
    "cluster.toml": "application/toml",
    "command.sh": "text/x-shellscript",
    "report.html": "text/html",
}
_LEFT = 499
"""status of an answer that nobody reads, as nginx logs it"""
_SCRIPT, _STYLE = "text/javascript", "text/css"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """How to serve."""

    host: str = "127.0.0.1"
    folder: Path | None = None
    """whose profiles and clusters may be named; None: built-in ones only"""
    workers: int = 2
    """planning processes; one plans while another drafts"""
    seconds: float = 60.0
    """per question"""
    waiting: int = 256
    """questions that may wait for a process"""
    memory: int = 6 * 2**30
    """bytes of address space of a process"""


def make_app(settings: ServeSettings) -> Starlette:
    """The application; its planning processes last as long as its lifespan."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        workers = Workers(
            count=settings.workers,
            seconds=settings.seconds,
            waiting=settings.waiting,
            memory=settings.memory,
            folder=settings.folder,
        )
        app.state.settings, app.state.answers = settings, Answers(workers, folder=settings.folder)
        await workers.start()
        try:
            yield
        finally:
            await workers.stop()

    return Starlette(
        routes=[
            Route("/", _page),
            Route("/assets/{name}", _asset),
            Route("/api/choices", _choices),
            Route("/api/plan", _plan, methods=["GET", "POST"]),
            Route("/api/draft", _draft),
            Route("/files/{name}", _download),
        ],
        middleware=[Middleware(Guard, serving=settings.host)],
        exception_handlers={HTTPException: _http_error},
        lifespan=lifespan,
    )


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(str(error.detail), error.status_code)


def _error(words: str, status: int) -> Response:
    return JSONResponse({"error": words}, status_code=status)


@cache
def _assets() -> dict[str, tuple[str, str]]:
    """name -> text and media type; nothing else can be asked for."""
    own = files("bapipe.serve").joinpath("page")
    template = own.joinpath("serve.html").read_text(encoding="utf-8")
    return {
        "serve.html": (fill_template(template, {"patterns": "".join(patterns(LOOKS))}), "text/html"),
        "serve.css": (own.joinpath("serve.css").read_text(encoding="utf-8"), _STYLE),
        "serve.js": (own.joinpath("serve.js").read_text(encoding="utf-8"), _SCRIPT),
        "compare.js": (own.joinpath("compare.js").read_text(encoding="utf-8"), _SCRIPT),
        "report.css": (page_style(), _STYLE),
        "report.js": (page_script(), _SCRIPT),
    }


async def _page(_: Request) -> Response:
    return HTMLResponse(_assets()["serve.html"][0])


async def _asset(request: Request) -> Response:
    found = _assets().get(request.path_params["name"])
    if found is None or found[1] == "text/html":
        return _error("there is no such file", 404)
    return Response(found[0], media_type=found[1])


async def _choices(request: Request) -> Response:
    """What can be chosen; read anew, since the folder may have changed."""
    settings: ServeSettings = request.app.state.settings
    try:
        listed = list_folder(settings.folder)
    except BaPipeError as error:
        return _error(str(error), 422)
    return JSONResponse(
        {
            "models": list(BUILTIN_NAMES),
            "own_models": [file.name for file in listed if file.kind == "model"],
            "own_clusters": [file.name for file in listed if file.kind == "cluster"],
            "has_folder": settings.folder is not None,
            "types": [{"name": name, "kind": kind.kind} for name, kind in load_catalog().items()],
            "aliases": catalog_aliases(),
            "schedules": list(SCHEDULE_NAMES),
            "strategies": list(STRATEGIES),
            "optimizers": list(OPTIMIZERS),
            "precisions": list(PRECISIONS),
            "most_accelerators": MOST_ACCELERATORS,
            "largest_global_batch": LARGEST_GLOBAL_BATCH,
        }
    )


async def _question(request: Request) -> Question:
    """From the query of a GET, or the JSON object of a POST."""
    if request.method != "POST":
        names = [name for name, _ in request.query_params.multi_items()]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise BaPipeError(f"'{twice[:60]}' is given twice; leave one out")
        return parse_question(dict(request.query_params))
    try:
        values: Any = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise BaPipeError('the body must be a JSON object such as {"model": "vgg16"}') from None
    if not isinstance(values, dict):
        raise BaPipeError('the body must be a JSON object such as {"model": "vgg16"}')
    return parse_question(values)


async def _answered(request: Request, *, draft: bool = False) -> Answer:
    """The answer, or what went wrong in one line."""
    answers: Answers = request.app.state.answers
    try:
        question = await _question(request)
        return await _while_connected(request, answers.get(question, draft=draft))
    except BusyError as error:
        return Answer(parts={}, error=str(error), status=503)
    except SlowError as error:
        return Answer(parts={}, error=str(error), status=422)
    except BaPipeError as error:
        return Answer(parts={}, error=" ".join(str(error).split()), status=422)


async def _while_connected(request: Request, asking: Coroutine[Any, Any, Answer]) -> Answer:
    """What is asked for, cancelled when the client has left: nobody would read it."""
    asked, left = asyncio.create_task(asking), asyncio.create_task(_left(request))
    try:
        await asyncio.wait({asked, left}, return_when=asyncio.FIRST_COMPLETED)
        return asked.result() if asked.done() else Answer(parts={}, error="the client has left", status=_LEFT)
    finally:
        for task in (asked, left):
            task.cancel()
        await asyncio.gather(asked, left, return_exceptions=True)


async def _left(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _plan(request: Request) -> Response:
    return _json(await _answered(request))


async def _draft(request: Request) -> Response:
    """A plan found fast, or null."""
    return _json(await _answered(request, draft=True))


def _json(answer: Answer) -> Response:
    if answer.error is not None:
        return _error(answer.error, answer.status)
    return Response(answer.parts["answer"], media_type="application/json")


async def _download(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in DOWNLOADS:
        return _error(f"there is no such file; there are {', '.join(DOWNLOADS)}", 404)
    answer = await _answered(request)
    if answer.error is not None:
        return _error(answer.error, answer.status)
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(answer.parts[name], media_type=DOWNLOADS[name], headers=headers)
