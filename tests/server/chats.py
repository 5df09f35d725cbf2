"""Chats with a fake engine, whole and streamed, and the message that a stream makes."""

from typing import Any

from conftest import asgi, events
from fake_engine import FakeEngine, Script

from jaxpage.server.app import build_app
from jaxpage.server_config import ServerConfig

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
QWEN3 = """\
{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools> For each call return <tool_call>{"name": <name>, "arguments": <object>}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt is not defined or add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
"""In the manner of Qwen 3's: tools, calls, reasoning, and a way to do without it."""


def function(name: str = "get_weather", **fields: Any) -> dict[str, Any]:
    """A tool."""
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "parameters": city, **fields}}


def engine(text: str, *, chat_template: str = QWEN3, **options: Any) -> FakeEngine:
    """One that answers everything with `text`."""
    made = FakeEngine(max_model_len=4000, chat_template=chat_template, **options)
    made.is_ready = True
    made.scripts[""] = Script(text)
    return made


def ask(one: FakeEngine, options: ServerConfig | None = None, **fields: Any) -> Any:
    """The response to a chat."""
    app = build_app(one, options or ServerConfig())  # type: ignore[arg-type]
    return asgi(one, "POST", CHAT, app=app, json={"messages": HELLO, **fields})


def prompt_of(one: FakeEngine) -> str:
    """What the model has read of the last chat."""
    return "".join(map(chr, one.seen_prompts[-1]))


def streamed(response: Any) -> dict[int, dict[str, Any]]:
    """Each choice as it would be whole, by index; checks what holds of every stream."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in events(response):
        [piece] = chunk["choices"]
        delta, is_first = piece["delta"], piece["index"] not in choices
        choice = choices.setdefault(
            piece["index"],
            {"index": piece["index"], "message": {"role": "assistant", "content": None}, "logprobs": None},
        )
        assert "finish_reason" not in choice, "nothing comes behind the end"
        assert ("role" in delta) == is_first
        message = choice["message"]
        for name in ("content", "reasoning_content", "reasoning"):
            if delta.get(name):
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                assert call["type"] == "function"
                calls.append({"id": call["id"], "type": "function", "function": call["function"]})
            else:
                assert call.keys() == {"index", "function"}
                assert call["function"].keys() == {"arguments"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if piece["logprobs"]:
            known = choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
            known["content"] += piece["logprobs"]["content"]
        if piece["finish_reason"] is not None:
            assert delta == {}
            choice |= {"finish_reason": piece["finish_reason"], "stop_reason": piece["stop_reason"]}
    return choices


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    """The same but for the ids of its calls, which are new each time."""
    for call in choice["message"].get("tool_calls", []):
        assert call.pop("id")
    return choice


def both(one: FakeEngine, options: ServerConfig | None = None, **fields: Any) -> dict[str, Any]:
    """The one choice of an answer, which is the same whole and streamed; ids are left out."""
    [whole] = ask(one, options, **fields).json()["choices"]
    stream = streamed(ask(one, options, stream=True, **fields))
    assert {0: without_ids(whole)} == {index: without_ids(choice) for index, choice in stream.items()}
    return whole
