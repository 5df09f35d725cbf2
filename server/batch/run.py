"""`jaxpage run-batch`: every line of an input file is a request, every line of the output file its result.

In: the files, and the options of engine and server. Out: results in the order in which they are ready, and an exit
code. Requests go through the server's own application, twice as many at once as sequences run at once, so that the
engine always has some waiting. What has a success in the output file already is not run again.
"""

import asyncio
import contextlib
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec
from starlette.applications import Starlette
from tqdm import tqdm

from jaxpage.config import EngineConfig
from jaxpage.errors import ConfigError, EngineDeadError
from jaxpage.server.batch.lines import (
    BatchRequest,
    BatchResponse,
    BatchResult,
    LineError,
    keep_successes,
    numbered,
    parse_request,
)
from jaxpage.server.in_process import loaded_app, opened
from jaxpage.server.request_log import REQUEST_ID_HEADER
from jaxpage.server_config import ServerConfig

if TYPE_CHECKING:
    from jaxpage.async_engine import AsyncEngine

STDIO = "-"
INTERRUPTED = 128 + signal.SIGINT


def run_batch(engine_config: EngineConfig, server_config: ServerConfig, input_file: str, output_file: str) -> int:
    """Run a batch; returns 0 if all requests succeeded, 1 if one failed, 130 if it was stopped.

    Files are paths, or - for standard input and output. Raises `ConfigError` for one that cannot be used, and
    `EngineDeadError` when the engine dies; what is in the output file by then is kept by the next run.
    """
    logging.basicConfig(level=logging.WARNING)
    with opened_files(input_file, output_file) as batch:
        from jaxpage.async_engine import AsyncEngine  # brings the tokenizer's libraries

        return asyncio.run(run(batch, lambda: AsyncEngine(engine_config), server_config))


@dataclass(slots=True)
class Batch:
    """A batch that is under way."""

    lines: BinaryIO
    num_lines: int
    """Lines that hold something."""
    results: int
    """Descriptor of the output file."""
    succeeded: set[str] = field(default_factory=set)
    """Ids that have a success in the output file already."""
    num_kept: int = 0
    num_succeeded: int = 0
    num_failed: int = 0

    def write(self, result: BatchResult) -> None:
        """One line, in the file when this returns. Raises `ConfigError` if it cannot be written."""
        line = memoryview(msgspec.json.encode(result) + b"\n")
        try:
            while line:
                line = line[os.write(self.results, line) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            raise ConfigError(f"the output file cannot be written: {error.strerror}: make room, then go on") from error
        if result.succeeded:
            self.num_succeeded += 1
        else:
            self.num_failed += 1

    def requests(self) -> Iterator[BatchRequest | LineError | None]:
        """What each line asks for, or why it is wrong; None if it has its success already."""
        seen: dict[str, int] = {}
        for number, line in numbered(self.lines):
            try:
                request = parse_request(number, line)
                if first := seen.get(request.custom_id):
                    message = (
                        f"line {number} has the custom_id {request.custom_id!r}, which line {first} has: change one"
                    )
                    raise LineError("duplicate_custom_id", message, request.custom_id)
            except LineError as error:
                yield error
                continue
            seen[request.custom_id] = number
            yield None if request.custom_id in self.succeeded else request


@contextlib.contextmanager
def opened_files(input_file: str, output_file: str) -> Iterator[Batch]:
    """A batch whose files are open. Raises `ConfigError` that names the one that cannot be used."""
    with contextlib.ExitStack() as files:
        try:
            if input_file == STDIO:
                lines: BinaryIO = io.BytesIO(sys.stdin.buffer.read())
            else:
                lines = files.enter_context(open(input_file, "rb"))
                if not lines.seekable():
                    lines = io.BytesIO(lines.read())
            num_lines = sum(1 for _ in numbered(lines))
            lines.seek(0)
        except OSError as error:
            raise ConfigError(f"--input-file {input_file} cannot be read: {error.strerror}") from error
        if output_file == STDIO:
            yield Batch(lines, num_lines, sys.stdout.fileno())
            return
        succeeded: set[str] = set()
        try:
            path = Path(output_file).resolve()  # behind a link, if it is one
            if path.is_file():
                if input_file != STDIO and path.samefile(input_file):
                    raise ConfigError(f"--output-file {output_file} is the input file: choose another")
                succeeded = keep_successes(path)
            results = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            files.callback(os.close, results)
        except OSError as error:
            raise ConfigError(f"--output-file {output_file} cannot be written: {error.strerror}") from error
        yield Batch(lines, num_lines, results, succeeded)


async def run(batch: Batch, make_engine: Callable[[], "AsyncEngine"], config: ServerConfig) -> int:
    """Load the engine and send it the batch; returns the exit code, and prints the numbers on standard error."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    engine = make_engine()
    try:
        async with loaded_app(engine, config) as app:
            try:
                await _send_all(batch, engine, app)
            finally:
                counts = (
                    f"{batch.num_succeeded} succeeded, {batch.num_failed} failed, {batch.num_kept} had succeeded before"
                )
                print(f"jaxpage: of {batch.num_lines} requests, {counts}", file=sys.stderr)
    except asyncio.CancelledError:
        print("jaxpage: stopped; the same command again goes on from here", file=sys.stderr)
        return INTERRUPTED
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return 1 if batch.num_failed else 0


async def _send_all(batch: Batch, engine: "AsyncEngine", app: Starlette) -> None:
    """Send all requests, as many at once as keep the engine busy. Raises `EngineDeadError` if it dies."""
    open_requests: set[asyncio.Task[BatchResult]] = set()
    most = 2 * engine.max_num_seqs
    with tqdm(total=batch.num_lines, desc="batch", unit="request", file=sys.stderr, disable=None) as bar:

        async def wait_until_open(count: int) -> None:
            """Write results until so many requests are open."""
            while len(open_requests) > count:
                done, _ = await asyncio.wait(open_requests, return_when=asyncio.FIRST_COMPLETED)
                open_requests.difference_update(done)
                for result in (task.result() for task in done):
                    if engine.is_dead and not result.succeeded:
                        raise EngineDeadError("the engine died: see its log above; the same command again goes on")
                    batch.write(result)
                    bar.update()

        try:
            for request in batch.requests():
                if isinstance(request, BatchRequest):
                    await wait_until_open(most - 1)
                    open_requests.add(asyncio.create_task(_answered(app, request)))
                    continue
                if request is None:
                    batch.num_kept += 1
                else:
                    batch.write(request.result())
                bar.update()
            await wait_until_open(0)
        finally:
            for task in open_requests:
                task.cancel()
            await asyncio.gather(*open_requests, return_exceptions=True)


async def _answered(app: Starlette, request: BatchRequest) -> BatchResult:
    async with opened(app, "POST", request.url, request.body) as answer:
        body = await answer.body()
    response = BatchResponse(answer.status, answer.headers.get(REQUEST_ID_HEADER, ""), msgspec.Raw(body))
    return BatchResult.of(request.custom_id, response=response)
