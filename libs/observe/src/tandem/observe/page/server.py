"""The page's program: a web server that only reads run folders, its main loop, and this host's GPUs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from tandem.common.errors import DataError, RunFolderError, SamplesError, TandemError
from tandem.common.web import SignalledServer, event_loop, settings
from tandem.observe.exporters.nvml import GpuUse, use_nvml
from tandem.observe.page import address, samples, series
from tandem.observe.page.reader import RecordMark, RunReader
from tandem.observe.page.security import PageGuard, error
from tandem.observe.page.thumbnails import RunThumbnails
from tandem.observe.run_folder.journal_file import JOURNAL_NAME
from tandem.observe.run_folder.live import LIVE_NAME
from tandem.observe.shown_rows import RowsRequest
from tandem.observe.timeline import flame, timeline

_LOOK_S = 0.5
"""Interval of the checks, and so the shortest interval of events about a run."""
_ALIVE_S = 15.0
"""Silence after which listeners get a comment, because proxies would close the connection."""


class RunsWatch:
    """A watch of the runs for all listeners."""

    def __init__(self, readers: Sequence[RunReader]) -> None:
        self._readers = readers
        self._has_ended = False

    def end(self) -> None:
        """End all streams, which otherwise only the listeners can."""
        self._has_ended = True

    async def changes(self, request: Request) -> AsyncIterator[bytes]:
        """Yield the extent of each run's record, and again whenever it grows, until the listener leaves.

        When the program is to end, it checks once more, because the run's end may be the reason.
        """
        seen: list[tuple[object, RecordMark | None]] = [(None, None)] * len(self._readers)
        silent_s = 0.0
        while not await request.is_disconnected():
            is_last = self._has_ended
            silent_s += _LOOK_S
            for index, reader in enumerate(self._readers):
                before, sent_mark = seen[index]
                now, mark = await run_in_threadpool(_look, reader, before, sent_mark)
                seen[index] = now, mark
                if mark is not None and mark != sent_mark:
                    silent_s = 0.0
                    yield _event(index, mark)
            if silent_s > _ALIVE_S:
                silent_s = 0.0
                yield b": nothing new\n\n"
            if is_last:
                return
            await asyncio.sleep(_LOOK_S)


def _look(reader: RunReader, before: object, sent_mark: RecordMark | None) -> tuple[object, RecordMark | None]:
    """Return the state of the files, and the extent of the record; the journal is opened only if files have changed."""
    now = _files(reader)
    if now == before:
        return before, sent_mark
    try:
        return now, reader.mark()
    except RunFolderError:  # the folder is being moved away, or created
        return None, sent_mark


def _files(reader: RunReader) -> object:
    states: list[tuple[int, int, int] | None] = []
    for name in (JOURNAL_NAME, LIVE_NAME):
        try:
            status = os.stat(reader.folder / name)
            states.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            states.append(None)
    return states


def _event(index: int, mark: RecordMark) -> bytes:
    content = {"run": index} | msgspec.to_builtins(mark)
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


STATIC = Path(__file__).parent / "static"
_MOST_POINTS = 10_000
_MOST_ROWS = 1000
_MOST_NAMES = 200
_MOST_STEPS = 200
_OF_THUMBNAIL = {
    "Content-Security-Policy": "default-src 'none'; sandbox",  # should a browser be sent there, nothing in it runs
    "Cache-Control": "private, max-age=3600, immutable",
}

_Choice = TypeVar("_Choice", bound=str)
_END_S = 5
"""Longest time for unfinished requests once the program is to end."""
_MOST_AT_ONCE = 200
"""Connections and requests beyond which requests are refused."""
_PAUSE_S = 2.0
"""Shortest interval between two readings, however many requests there are."""


class GpuState(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of one GPU."""

    host: str
    index: int
    name: str
    memory_gb: float
    """Total memory; 10^9 bytes, as everywhere."""
    used_gb: float
    utilisation: float | None
    """Share of the most recent moments in which it computed; None if the driver does not report it."""


class GpuReader:
    """Reader of GPUs, which asks the driver only on request."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._asked_at = -_PAUSE_S
        self._found: list[GpuState] = []

    def read(self) -> list[GpuState]:
        """Return the GPUs' state of at most two seconds ago; while the driver is being asked, the one before.

        So a driver that hangs blocks one request, and no other.
        """
        if self._asking.acquire(blocking=False):
            try:
                if time.monotonic() - self._asked_at >= _PAUSE_S:
                    with use_nvml() as nvml:
                        self._found = [] if nvml is None else [_gpu(use) for use in nvml.uses()]
                    self._asked_at = time.monotonic()
            finally:
                self._asking.release()
        return self._found


def _gpu(use: GpuUse) -> GpuState:
    return GpuState(
        host=socket.gethostname(),
        index=use.index,
        name=use.name,
        memory_gb=use.memory_gb or 0.0,
        used_gb=use.used_gb or 0.0,
        utilisation=use.utilisation,
    )


class _BadQuery(TandemError):
    """A malformed parameter."""


class PageRun:
    """A run, and its data cached between requests."""

    def __init__(self, folder: Path, gpus: GpuReader, rows: samples.PageRows) -> None:
        """Open the run. Raises `RunFolderError` if it cannot be read."""
        self.gpus = gpus
        self.rows = rows
        self.reader = RunReader(folder)
        self.curves = series.RunCurves(self.reader)


Answer = Callable[[PageRun, Request], Any]
"""A function that answers a request about a run; its errors are reported on one line."""


def make_app(folders: Sequence[Path], token: str | None, static: Path = STATIC) -> Starlette:
    """Return the program for these run folders; its state has the `RunsWatch` of its streams, its `RunThumbnails` and
    `PageRows` to close.

    Raises `RunFolderError` for a folder that cannot be read.
    """
    gpus = GpuReader()
    rows = samples.PageRows()
    runs = [PageRun(folder, gpus, rows) for folder in folders]
    watch = RunsWatch([run.reader for run in runs])
    thumbnails = RunThumbnails()

    def list_runs(request: Request) -> Response:
        return _json([run.reader.summary(index) for index, run in enumerate(runs)])

    async def stream(request: Request) -> Response:
        return StreamingResponse(watch.changes(request), media_type="text/event-stream")

    def csv_file(request: Request) -> Response:
        return _csv(runs, request)

    def thumbnail(request: Request) -> Response:
        index = request.path_params["run"]
        if not index < len(runs):
            return error(404, _no_run(runs, index))
        try:
            png = thumbnails.of(runs[index].reader.folder, request.path_params["digest"])
        except DataError as problem:
            return error(404, str(problem))
        return Response(png, media_type="image/png", headers=_OF_THUMBNAIL)

    of_run = [
        Route(f"/api/runs/{{run:int}}/{path}", functools.partial(_answer, runs, answer)) for path, answer in _ANSWERS
    ]
    app = Starlette(
        routes=[
            Route("/api/runs", _report_errors(list_runs)),
            *of_run,
            Route("/api/runs/{run:int}/images/{digest:str}", _report_errors(thumbnail)),
            Route("/api/csv", _report_errors(csv_file)),
            Route("/api/stream", stream),
            Mount("/", StaticFiles(directory=static, html=True, check_dir=False)),
        ],
        middleware=[Middleware(PageGuard, token=token)],
        exception_handlers={HTTPException: _report_http_error},
    )
    app.state.watch = watch
    app.state.thumbnails = thumbnails
    app.state.rows = rows
    return app


def _answer(runs: Sequence[PageRun], answer: Answer, request: Request) -> Response:
    index = request.path_params["run"]
    if not index < len(runs):
        return error(404, _no_run(runs, index))
    return _report_errors(lambda page_request: _json(answer(runs[index], page_request)))(request)


def _no_run(runs: Sequence[PageRun], index: int) -> str:
    return f"there is no run {index}: there are {len(runs)}, from 0 on"


def _report_errors(endpoint: Callable[[Request], Response]) -> Callable[[Request], Response]:
    """Wrap an endpoint so that its errors are reported on one line."""

    def answer(request: Request) -> Response:
        try:
            return endpoint(request)
        except _BadQuery as problem:
            return error(400, str(problem))
        except (RunFolderError, SamplesError) as problem:
            return error(404, str(problem))
        except TandemError as problem:
            return error(422, str(problem))

    return answer


def _json(answer: Any) -> Response:
    """Encode an answer; NaN becomes null."""
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _report_http_error(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException), "it is the handler of nothing else"
    return error(problem.status_code, f"{request.url.path[:200]}: {problem.detail}")


# --- answers about a run -------------------------------------------------------------------------------------------


def _metrics(run: PageRun, request: Request) -> Any:
    return {"names": run.curves.names()}


def _series(run: PageRun, request: Request) -> Any:
    names = [name for name in request.query_params.get("names", "").split(",") if name]
    if len(names) > _MOST_NAMES:
        raise _BadQuery(f"names: at most {_MOST_NAMES} at once, not {len(names)}")
    return _curves(run, request, names)


def _memory(run: PageRun, request: Request) -> Any:
    return _curves(run, request, [each.name for each in run.curves.names() if each.group == "memory"])


def _curves(run: PageRun, request: Request, names: Sequence[str]) -> Any:
    points = _read_whole_number(request, "points", 800, 1, _MOST_POINTS)
    return run.curves.series(names, points, *_range(request))


def _range(request: Request) -> tuple[int | None, int | None, series.Along]:
    """Return the steps and the axis that are asked for."""
    along = _read_choice(request, "along", get_args(series.Along))
    return _maybe_read_whole_number(request, "from"), _maybe_read_whole_number(request, "to"), along


def _read_whole_number(request: Request, name: str, default: int, least: int = 0, largest: int = 2**53) -> int:
    """Return a parameter that is a whole number."""
    number = _maybe_read_whole_number(request, name, least, largest)
    return default if number is None else number


def _maybe_read_whole_number(request: Request, name: str, least: int = 0, largest: int = 2**53) -> int | None:
    """Return a parameter that is a whole number; None if it is not given."""
    text = request.query_params.get(name, "")
    if not text:
        return None
    if text.isascii() and text.removeprefix("-").isdigit() and len(text) < 20 and least <= int(text) <= largest:
        return int(text)
    raise _BadQuery(f"{name}={text[:40]}: expected a whole number from {least} to {largest}")


def _maybe_read_number(request: Request, name: str) -> float | None:
    """Return a parameter that is a number; None if it is not given."""
    text = request.query_params.get(name, "")
    if not text:
        return None
    with contextlib.suppress(ValueError):
        number = float(text)
        if number == number:
            return number
    raise _BadQuery(f"{name}={text[:40]}: expected a number")


def _read_choice(request: Request, name: str, choices: Sequence[_Choice]) -> _Choice:
    """Return a parameter that is one of the choices; the first if it is not given."""
    text = request.query_params.get(name) or choices[0]
    for value in choices:
        if value == text:
            return value
    raise _BadQuery(f"{name}={text[:40]}: expected one of {', '.join(choices)}")


def _csv(runs: Sequence[PageRun], request: Request) -> Response:
    """Stream all values of some curves, each given by `run`, `name` and `label`, in this order."""
    indices, names, labels = (request.query_params.getlist(key) for key in ("run", "name", "label"))
    if not len(indices) == len(names) == len(labels) <= _MOST_NAMES:
        raise _BadQuery(f"run, name, label: expected as many of each, {_MOST_NAMES} at most")
    if strange := [index for index in indices if not (index.isdecimal() and int(index) < len(runs))]:
        raise _BadQuery(f"run: there is no run {strange[0][:40]}: there are {len(runs)}, from 0 on")
    first, last, along = _range(request)
    curves_of = {
        index: runs[int(index)].curves.read_all_points(
            [n for i, n in zip(indices, names, strict=True) if i == index], first, last, along
        )
        for index in dict.fromkeys(indices)
    }
    columns = [
        series.CurveColumn(label, *curves_of[index][name])
        for index, name, label in zip(indices, names, labels, strict=True)
        if name in curves_of[index]
    ]
    # Without a name: the link on the page says it.
    headers = {"Content-Disposition": "attachment"}
    return StreamingResponse(series.csv_parts(along, columns), media_type="text/csv", headers=headers)


def _live(run: PageRun, request: Request) -> Any:
    return run.reader.live()


def _timeline(run: PageRun, request: Request) -> Any:
    num_steps = _read_whole_number(request, "steps", 10, 1, _MOST_STEPS)
    view = timeline(run.reader.folder, num_steps, _maybe_read_whole_number(request, "to"))
    step = _maybe_read_whole_number(request, "flame")
    return (
        view
        if step is None
        else msgspec.structs.replace(view, flame=flame(run.reader.folder, step, run.reader.step_seconds))
    )


def _refits(run: PageRun, request: Request) -> Any:
    return run.reader.refits(_read_whole_number(request, "limit", 200, 1, _MOST_ROWS))


def _calls(run: PageRun, request: Request) -> Any:
    return run.reader.calls(_read_whole_number(request, "limit", 200, 1, _MOST_ROWS))


def _config(run: PageRun, request: Request) -> Any:
    return run.reader.configuration()


def _gpus(run: PageRun, request: Request) -> Any:
    """Return the GPUs of this machine, which may be one of several, while the run is live."""
    return run.gpus.read() if run.reader.live() is not None else []


def _events(run: PageRun, request: Request) -> Any:
    return run.reader.events(
        _read_whole_number(request, "after", 0), _read_whole_number(request, "limit", 500, 1, _MOST_ROWS)
    )


def _samples(run: PageRun, request: Request) -> Any:
    from tandem.observe.samples import SampleQuery  # Arrow takes a while to be imported

    least, highest = _maybe_read_number(request, "min_reward"), _maybe_read_number(request, "max_reward")
    query = SampleQuery(
        step=_maybe_read_whole_number(request, "step"),
        purpose=_read_choice(request, "purpose", samples.PURPOSES),
        sort=_read_choice(request, "sort", samples.SORTS),
        descending=_read_choice(request, "descending", ("0", "1")) == "1",
        contains=request.query_params.get("contains", ""),
        group=_maybe_read_whole_number(request, "group"),
        min_reward=-math.inf if least is None else least,
        max_reward=math.inf if highest is None else highest,
        offset=_read_whole_number(request, "offset", 0),
        limit=_read_whole_number(request, "limit", 50, 1, _MOST_ROWS),
        with_tokens=False,
    )
    return samples.query_samples(run.reader.folder, query, run.reader.run_id())


def _sample(run: PageRun, request: Request) -> Any:
    step, group, sample = (int(request.path_params[name]) for name in ("step", "group", "sample"))
    purpose = _read_choice(request, "purpose", samples.PURPOSES)
    reader = run.reader
    return samples.read_sample(reader.folder, (step, group, sample), purpose, reader.run_id(), reader.models())


def _rows(run: PageRun, request: Request) -> Any:
    limit = _read_whole_number(request, "limit", 8, 1, _MOST_ROWS)
    return run.rows.of(run.reader.folder, RowsRequest(step=_maybe_read_whole_number(request, "step"), limit=limit))


def _problem(run: PageRun, request: Request) -> Any:
    return samples.samples_of_problem(run.reader.folder, request.path_params["problem_id"], run.reader.run_id())


_ANSWERS: tuple[tuple[str, Answer], ...] = (
    ("metrics", _metrics),
    ("series", _series),
    ("memory", _memory),
    ("live", _live),
    ("timeline", _timeline),
    ("config", _config),
    ("refits", _refits),
    ("calls", _calls),
    ("gpus", _gpus),
    ("events", _events),
    ("samples", _samples),
    ("samples/{step:int}/{group:int}/{sample:int}", _sample),
    ("rows", _rows),
    ("problems/{problem_id:path}/samples", _problem),
)


def serve(
    folders: Sequence[Path], listener: socket.socket, token: str | None = None, *, heeds_signals: bool = True
) -> None:
    """Serve the page of these runs until SIGINT or SIGTERM, or only `END` without `heeds_signals`."""
    app = make_app(folders, token)
    config = settings(app, end_s=_END_S, limit_concurrency=_MOST_AT_ONCE)
    server = _Server(config, app.state.watch, heeds_signals=heeds_signals)
    try:
        with event_loop() as runner:
            runner.run(server.serve(sockets=[listener]))
    finally:
        app.state.thumbnails.close()
        app.state.rows.close()


class _Server(SignalledServer):
    """A server that also ends its streams."""

    def __init__(self, config: uvicorn.Config, watch: RunsWatch, *, heeds_signals: bool) -> None:
        super().__init__(config, heeds_signals=heeds_signals, end=address.END)
        self._watch = watch

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams first, because the shutdown waits for them."""
        self._watch.end()
        await super().shutdown(sockets)
