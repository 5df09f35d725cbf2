"""Scheduling policies: who waits first, and who gives way when blocks run out. Nothing else knows them."""

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

from jaxpage.errors import ConfigError
from jaxpage.requests.request import Request


class Policy(Protocol):
    """Made without arguments. A user's own is named by its import path, as "package.module:Class"."""

    def key(self, request: Request) -> Any:
        """Where a request stands in the waiting queue: the smallest goes first. Read whenever it enters the queue."""

    def victim(self, running: Sequence[Request]) -> Request:
        """Which of the running requests, in order of admission, to preempt. There is at least one."""


class FirstComeFirstServed:
    """In order of arrival; the one that was admitted last gives way."""

    def key(self, request: Request) -> tuple[int, int]:
        return request.arrival, request.index

    def victim(self, running: Sequence[Request]) -> Request:
        return running[-1]


class Priority:
    """Lower values of `priority` first, then in order of arrival; the last of that order gives way."""

    def key(self, request: Request) -> tuple[int, int, int]:
        return request.priority, request.arrival, request.index

    def victim(self, running: Sequence[Request]) -> Request:
        return max(running, key=self.key)


_POLICIES: dict[str, type[Policy]] = {"fcfs": FirstComeFirstServed, "priority": Priority}


def load_policy(name: str) -> Policy:
    """The policy of this name, or the class at this import path. Raises `ConfigError` that says what is wrong."""
    if name in _POLICIES:
        return _POLICIES[name]()
    module_name, _, class_name = name.partition(":")
    if not class_name:
        raise ConfigError(
            f"--scheduling-policy is {name!r}: it must be one of {', '.join(_POLICIES)}, or the import path of your "
            "own, as package.module:Class"
        )
    try:
        policy = getattr(importlib.import_module(module_name), class_name)()
    except Exception as error:  # a user's module may fail in any way
        raise ConfigError(f"--scheduling-policy {name!r} cannot be loaded: {error}") from error
    for method in ("key", "victim"):
        if not callable(getattr(policy, method, None)):
            raise ConfigError(
                f"--scheduling-policy {name!r} has no method {method}(): see jaxpage.scheduler.policies.Policy"
            )
    return policy
