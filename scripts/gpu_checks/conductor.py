"""Starts a process for each group of parts, kills what hangs, and writes down what was found after every part.

It loads no JAX: whatever becomes of a GPU, the table comes out.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_checks.parts import Part
from gpu_checks.verdicts import Found, judge, show

Row = dict[str, Any]
POLL_SECONDS = 0.1
LEAST_SECONDS = 5.0
"""With less time left, no further part begins."""
LOG_BYTES = 20_000
"""Kept of what a process prints."""


class Child:
    """A process that runs parts, and what it has told so far."""

    def __init__(self, parts: list[Part], arguments: list[str], out: Path, seconds: float) -> None:
        self.parts = parts
        self.began = time.monotonic()
        self._ends = self.began + seconds
        self._number = sum(1 for _ in out.glob("events-*"))
        self._events = out / f"events-{self._number}.jsonl"
        self._events.touch()
        self.log = out / f"log-{self._number}.txt"
        self._read = 0
        self._running: Part | None = None
        self._running_since = self.began
        self.reported: list[Row] = []
        environment = os.environ | {"JAX_TRACEBACK_FILTERING": "off"}  # or an error's last lines say that it is on
        for name, value in parts[0].environment.items():
            value = value.format(out=out)
            environment[name] = f"{environment.get(name, '')} {value}".strip() if name == "XLA_FLAGS" else value
        command = [
            *(sys.executable, "-m", "gpu_checks", *arguments, "--out", str(out), "--events", str(self._events)),
            *("--seconds", str(seconds), "--child", ",".join(part.name for part in parts)),
        ]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def poll(self) -> str | None:
        """Take in what it has told. Returns how it ended, None while it runs."""
        status = self._process.poll()
        with self._events.open("rb") as file:
            file.seek(self._read)
            for line in file.read().splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                self._take(json.loads(line))
        if status is not None:
            self.kill()  # what it may have left behind
            return "" if status == 0 else f"the process ended with {_name_of(status)}"
        now = time.monotonic()
        limit = self.parts[0].seconds if self._running is None else self._running.seconds
        if now > self._ends or now > self._running_since + limit:
            self.kill()
            return f"killed after {now - self._running_since:.0f} s"
        return None

    def kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    @property
    def tail(self) -> str:
        """The end of what it printed."""
        lines = self.log.read_text("utf-8", errors="replace").strip().splitlines()
        return "\n".join(line[:300] for line in lines[-12:])

    def _take(self, row: Row) -> None:
        self.reported.append(row)
        if row["event"] == "start":
            self._running = next(part for part in self.parts if part.name == row["part"])
        elif row["event"] == "end":
            self._running = None
        if row["event"] != "row":
            self._running_since = time.monotonic()


def _name_of(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"status {status}"


@dataclass
class Conductor:
    """Runs parts and keeps what they find."""

    out: Path
    arguments: list[str]
    """What children are told besides."""
    seconds: float
    found: dict[str, Found] = field(default_factory=dict)
    _alongside: dict[str, Child] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)

    def run(self, parts: tuple[Part, ...]) -> None:
        """All parts, in their order. Whatever ends it, what runs is killed and all that was found is written."""
        self.found = {part.name: Found() for part in parts}
        waiting = list(parts)
        try:
            while waiting:
                if waiting[0].is_alongside:
                    self._start_alongside(waiting.pop(0))
                    continue
                group = [waiting[0]]
                for part in waiting[1:]:
                    if part.group != group[0].group or part.is_alongside:
                        break
                    group.append(part)
                if (needed := group[0].needs) in self._alongside and needed is not None:
                    self._join(needed)
                self._run_group(group)
                waiting = [part for part in waiting if self.found[part.name].status == "waiting"]
            for name in list(self._alongside):
                self._join(name)
        finally:
            for child in self._alongside.values():
                child.kill()
            self._write()

    @property
    def _left(self) -> float:
        return self.seconds - (time.monotonic() - self._began)

    def _run_group(self, group: list[Part]) -> None:
        """One process for as many of the group as it lives to run; the first of them, at least, is done with."""
        if self._left < LEAST_SECONDS:
            for part in group:
                self._end(part.name, "skipped", "no time is left")
            return
        child = Child(group, self.arguments, self.out, self._left)
        try:
            while (how := child.poll()) is None:
                self._take(child)
                time.sleep(POLL_SECONDS)
        finally:
            child.kill()
        self._take(child)
        for part in group:
            found = self.found[part.name]
            if found.status == "running" or (part is group[0] and found.status == "waiting"):
                no_time = self._left < LEAST_SECONDS and how.startswith("killed")
                self._end(part.name, "error", f"{how or 'it ended early'}\n{child.tail}", found.rows and no_time)

    def _start_alongside(self, part: Part) -> None:
        self._alongside[part.name] = Child([part], self.arguments, self.out, max(self._left, LEAST_SECONDS))

    def _join(self, name: str) -> None:
        child = self._alongside.pop(name)
        while (how := child.poll()) is None:
            time.sleep(POLL_SECONDS)
        self._take(child)
        if self.found[name].status in ("waiting", "running"):
            self._end(name, "error", f"{how or 'it ended early'}\n{child.tail}")

    def _take(self, child: Child) -> None:
        """Show and keep what a child has told."""
        reported, child.reported = child.reported, []
        for each in reported:
            name, found = each["part"], self.found[each["part"]]
            match each["event"]:
                case "start":
                    found.status = "running"
                case "row":
                    found.rows.append(each["row"])
                    print(f"{name:18} " + "  ".join(f"{key} {shown(value)}" for key, value in each["row"].items()))
                    sys.stdout.flush()
                case "end":
                    found.seconds = each["seconds"]
                    self._end(name, "error" if each["error"] else "done", each["error"] or "")

    def _end(self, name: str, status: str, why: str, is_partial: Any = False) -> None:
        found = self.found[name]
        found.status, found.why = status, why
        if is_partial:
            found.why = f"no time is left for the rest of it\n{why}"
        first = found.why.splitlines()[0] if found.why else ""
        print(f"{name:18} {status} after {found.seconds:.1f} s {first}", flush=True)
        self._write()

    def _write(self) -> None:
        """Results and verdicts so far, each file whole at any time."""
        verdicts = judge(self.found)
        content = {
            "seconds": time.monotonic() - self._began,
            "parts": {name: vars(found) for name, found in self.found.items()},
            "verdicts": [vars(verdict) for verdict in verdicts],
        }
        _replace(self.out / "results.json", json.dumps(content, indent=1))
        _replace(self.out / "verdicts.txt", show(verdicts))


def _replace(file: Path, text: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(text, "utf-8")
    new.replace(file)


def shown(value: Any) -> str:
    """A number or text, short."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
