"""Times that only go on."""

import time

import pytest

from jaxpage import clock


def test_time_goes_on_whatever_the_systems_clock_does(monkeypatch: pytest.MonkeyPatch) -> None:
    before = clock.now()
    assert before == pytest.approx(time.time(), abs=60)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert clock.now() >= before
    assert clock.at(clock.monotonic()) >= before
