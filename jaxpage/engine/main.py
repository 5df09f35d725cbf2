"""The engine process: `python -m jaxpage.engine.main`, started by `engine.process`.

It loads, says `Ready`, and steps. It ends when its standard input closes (the client wants it gone, or is gone itself,
however it went), or when a step raises, which it reports as `Dead` first.
"""

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

import msgspec
import zmq

from jaxpage import wire
from jaxpage.config import EngineConfig
from jaxpage.engine.process import IDENTITY
from jaxpage.errors import JaxpageError

logger = logging.getLogger(__name__)

_QUIET_MILLISECONDS = 500
"""How often an idle engine looks for programs that have become ready."""


def main(requests: str, outputs: str, options: str) -> int:
    """The engine process, until it fails. Returns its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s engine: %(message)s")
    logging.getLogger("jax").setLevel(logging.WARNING)  # it tells of every platform that is not here
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the client decides what it means
    threading.Thread(target=_exit_with_client, name="client watch", daemon=True).start()
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    inbox.setsockopt(zmq.IDENTITY, IDENTITY)
    for socket, address in ((inbox, requests), (outbox, outputs)):
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.connect(address)
    try:
        _serve(msgspec.json.decode(options, type=EngineConfig), inbox, outbox)
    except JaxpageError as error:
        dead = wire.Dead(type(error).__name__, str(error))
    except Exception as error:
        logger.exception("the engine ends")
        dead = wire.Dead(type(error).__name__, f"the engine failed: {error!r}")
    outbox.send(wire.encode(dead))
    context.destroy(linger=1000)  # milliseconds for the last words
    return 1


def _serve(config: EngineConfig, inbox: "zmq.Socket[bytes]", outbox: "zmq.Socket[bytes]") -> NoReturn:
    """Load, say so, and step for ever."""
    gc.disable()  # there is next to no garbage before the first request, and half a second is spent on looking for it
    from jaxpage.engine.core import EngineCore
    from jaxpage.engine.loops import freeze_gc

    core = EngineCore(config, progress=_show_progress)
    freeze_gc()
    outbox.send(wire.encode(core.ready))
    while True:
        changed = False
        outputs: list[wire.SequenceOutput] = []
        if not core.has_work:
            while core.use_quiet_moment() and not inbox.poll(_QUIET_MILLISECONDS):
                pass
        for message in _received(inbox, wait=not core.has_work):
            match message:
                case wire.AddRequest():
                    outputs += core.try_add(message)
                case wire.AbortRequests():
                    for sequence_id in message.sequence_ids:
                        core.abort(sequence_id)
                    changed = True
                case wire.Call():
                    outbox.send(wire.encode(core.answer(message)))
                    changed = True
        outputs += core.step()
        if outputs or changed:
            outbox.send(wire.encode(core.report(outputs)))


def _received(inbox: "zmq.Socket[bytes]", wait: bool) -> Iterator[wire.ToEngine]:
    """Every message that has arrived; with `wait`, blocks for the first. Aborts overtake the requests they mean."""
    messages = [wire.decode_to_engine(inbox.recv())] if wait else []
    with contextlib.suppress(zmq.Again):
        while True:
            messages.append(wire.decode_to_engine(inbox.recv(zmq.NOBLOCK)))
    aborted = {i for message in messages if isinstance(message, wire.AbortRequests) for i in message.sequence_ids}
    for message in messages:
        if not (isinstance(message, wire.AddRequest) and message.request_id in aborted):
            yield message


def _show_progress(done: int, total: int) -> None:
    """One line on a terminal, redrawn."""
    if sys.stderr.isatty():
        bar = "█" * (30 * done // total)
        print(
            f"\rpreparing programs {bar:<30} {done}/{total}",
            end="\n" if done == total else "",
            file=sys.stderr,
            flush=True,
        )


def _exit_with_client() -> None:
    """The client holds the other end of standard input; when it closes, nobody is left to serve."""
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    exit_code = main(*sys.argv[1:])
    os._exit(exit_code)  # a program that is still being compiled would hold up an orderly end
