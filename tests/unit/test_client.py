"""The client's side of the wire, without an engine: who is told what, and how requests and calls end."""

from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
from frontends import LIMITS, TOKENIZER, opened

from jaxpage import EngineDeadError, ModelLoadError, RequestError, SamplingParams, wire
from jaxpage.client import Client
from jaxpage.errors import JaxpageError
from jaxpage.metrics import Metrics
from jaxpage.outputs import RequestDelta


class Reader:
    def __init__(self) -> None:
        self.deltas: list[RequestDelta] = []
        self.error: JaxpageError | None = None

    def push(self, delta: RequestDelta) -> None:
        self.deltas.append(delta)

    def fail(self, error: JaxpageError) -> None:
        self.error = error

    @property
    def text(self) -> str:
        return "".join(output.text for delta in self.deltas for output in delta.outputs)


def serving() -> tuple[Client, list[wire.ToEngine]]:
    """A client whose engine is ready, and what it has sent to it."""
    sent: list[wire.ToEngine] = []
    client = Client(sent.append)
    client.take(LIMITS)
    return client, sent


def reading(client: Client, params: SamplingParams | None = None) -> Reader:
    reader = Reader()
    client.open(opened(params=params).request, reader)
    return reader


def tokens(text: str, finish_reason: str | None = None, name: str = "r") -> wire.Outputs:
    return wire.Outputs([wire.TokenOutput(name, TOKENIZER.encode(text), finish_reason)], {"num_steps": 1})


def test_a_reader_gets_what_is_new_and_nothing_twice() -> None:
    client, sent = serving()
    reader = reading(client)
    assert [type(message) for message in sent] == [wire.AddRequest]
    for message in (tokens("ab"), tokens("c"), tokens("d", "length"), tokens("late")):
        client.take(message)
    assert [[output.text for output in delta.outputs] for delta in reader.deltas] == [["ab"], ["c"], ["d"]]
    assert [delta.finished for delta in reader.deltas] == [False, False, True]
    assert client.open_ids == set()
    assert client.stats == {"num_steps": 1}


def test_the_engine_is_told_of_a_stop_string_that_it_does_not_know_of() -> None:
    client, sent = serving()
    reader = reading(client, SamplingParams(n=2, stop=("b",)))
    client.take(tokens("ab"))
    assert sent[1:] == [wire.AbortRequests(["r"])]
    client.take(tokens("x", "length", "r#1"))
    assert sent[2:] == []
    assert reader.text == "ax"
    assert reader.deltas[-1].finished


def test_a_request_that_is_ended_shows_what_was_held_back_and_hears_no_more() -> None:
    client, sent = serving()
    reader = reading(client, SamplingParams(n=2, stop=("END",)))
    client.take(tokens("one E"))
    client.end("r", "abort")
    client.end("r", "abort")
    client.take(tokens("ND"))
    assert reader.text == "one E"
    assert [output.finish_reason for output in reader.deltas[-1].outputs] == ["abort", "abort"]
    assert sent[1:] == [wire.AbortRequests(["r", "r#1"])]


def test_each_call_gets_its_own_answer_and_one_that_is_given_up_none() -> None:
    client, sent = serving()
    answers: list[Future[Any]] = [Future() for _ in range(3)]
    for number, answer in enumerate(answers):
        client.call(answer, "pause", number)
    ids = [message.call_id for message in sent if isinstance(message, wire.Call)]
    answers[1].cancel()
    client.take(wire.Returned(ids[2], None, "not now"))
    client.take(wire.Returned(ids[1], 1))
    client.take(wire.Returned(ids[0], 0))
    assert answers[0].result() == 0
    with pytest.raises(RequestError, match="not now"):
        answers[2].result()


def test_the_engines_death_ends_all_that_is_open_and_lets_nothing_in() -> None:
    client, sent = serving()
    reader, answer = reading(client), Future[Any]()
    client.call(answer, "resume")
    client.take(wire.Dead("ValueError", "the engine failed"))
    for late in (wire.Dead("ValueError", "a second word"), tokens("ab"), wire.Returned(0, True)):
        client.take(late)
    assert reader.deltas == []
    assert isinstance(reader.error, EngineDeadError)
    with pytest.raises(EngineDeadError, match="the engine failed"):
        answer.result()
    num_sent = len(sent)
    with pytest.raises(EngineDeadError, match="the engine failed"):
        reading(client)
    client.end("r", "abort")
    assert len(sent) == num_sent


def test_what_keeps_the_engine_from_starting_keeps_its_kind() -> None:
    client = Client(lambda message: None)
    client.take(wire.Dead("ModelLoadError", "no such folder"))
    assert isinstance(client.death, ModelLoadError)
    assert not client.is_ready


def test_how_the_engine_stands_is_counted_before_its_first_request() -> None:
    metrics = Metrics("m")
    client = Client(lambda message: None, metrics)
    client.take(msgspec.structs.replace(LIMITS, stats={"num_programs": 7.0}))
    assert b'jaxpage:num_programs{model_name="m"} 7.0' in metrics.render()
