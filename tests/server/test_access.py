"""Who may use the server: API keys, and web pages of other origins. A23."""

from pathlib import Path

import httpx
import pytest
from conftest import asgi, ready_engine
from starlette.applications import Starlette
from starlette.routing import Route

from jaxpage.errors import ConfigError
from jaxpage.server.app import build_app
from jaxpage.server_config import ServerConfig

KEY = "sk-sésame"
OPEN = {"/health", "/ping", "/version", "/metrics", "/load", "/openapi.json", "/"}
PREFLIGHT = {
    "Origin": "https://app.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization",
}


def guarded_app(**options: object) -> Starlette:
    config = ServerConfig(api_key=(KEY, "second"), enable_debug_routes=True, **options)  # type: ignore[arg-type]
    return build_app(ready_engine(), config)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(method: str, path: str, headers: dict[str, str] | None = None, app: Starlette | None = None) -> httpx.Response:
    encoded = {name: value.encode() for name, value in (headers or {}).items()}
    return asgi(ready_engine(), method, path, app=app or guarded_app(), headers=encoded)  # type: ignore[arg-type]


def routes(app: Starlette) -> list[tuple[str, str]]:
    """Method and path of everything that is served."""
    found = [route for route in app.routes if isinstance(route, Route)]
    return [(method, route.path) for route in found for method in (route.methods or set()) - {"HEAD"}]


def test_a23_every_route_but_the_open_ones_needs_a_key() -> None:
    app = guarded_app()
    answers = {(method, path): ask(method, path, app=app) for method, path in routes(app)}
    assert {path for (_, path), answer in answers.items() if answer.status_code != 401} == OPEN
    for (_, path), answer in answers.items():
        if path not in OPEN:
            assert "API key" in answer.json()["error"]["message"]
            assert answer.headers["www-authenticate"] == "Bearer"
    assert answers["POST", "/v1/completions"].json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ["//v1/completions", "/v1/../v1/completions", "/V1/completions", "/nowhere", "/web"])
def test_a23_no_other_spelling_of_a_path_is_open(path: str) -> None:
    assert ask("POST", path).status_code == 401


@pytest.mark.parametrize("key", ["", "wrong", KEY + "x", KEY[:-1], "second,"])
def test_a23_a_wrong_key_is_refused(key: str) -> None:
    assert ask("GET", "/v1/models", bearer(key)).status_code == 401
    assert ask("GET", "/v1/models", {"x-api-key": key}).status_code == 401
    assert ask("GET", "/v1/models", {"Authorization": key}).status_code == 401


@pytest.mark.parametrize(
    "headers", [bearer(KEY), bearer("second"), {"x-api-key": KEY}, {"Authorization": "bearer second"}]
)
def test_a23_each_key_is_good_as_openais_and_as_anthropics_clients_send_it(headers: dict[str, str]) -> None:
    assert ask("GET", "/v1/models", headers).status_code == 200


def test_a_page_may_ask_whether_it_may_use_a_server_in_a_private_network() -> None:
    answer = ask("OPTIONS", "/v1/completions", {**PREFLIGHT, "Access-Control-Request-Private-Network": "true"})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-private-network"] == "true"


def test_keys_come_from_options_file_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# who has which: none of this is a key\none\n\n two \n  # two again\n")
    config = ServerConfig(api_key=("zero",), api_key_file=str(file))
    assert config.api_keys({"JAXPAGE_API_KEY": "three, four,"}) == {"zero", "one", "two", "three", "four"}
    assert ServerConfig().api_keys({}) == set()


@pytest.mark.parametrize("content", [None, "", "\n \n"])
def test_a_file_without_keys_is_refused_by_name(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=f"--api-key-file {file}"):
        ServerConfig(api_key_file=str(file)).api_keys({})


def test_a23_a_preflight_needs_no_key_and_is_told_what_is_allowed() -> None:
    answer = ask("OPTIONS", "/v1/chat/completions", PREFLIGHT)
    assert answer.status_code in (200, 204)
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "authorization" in answer.headers["access-control-allow-headers"]


def test_answers_and_refusals_can_be_read_by_pages_of_allowed_origins() -> None:
    for headers in (bearer(KEY), {}):
        answer = ask("GET", "/v1/models", headers | {"Origin": "https://app.example"})
        assert answer.headers["access-control-allow-origin"] == "*"
        assert answer.headers["access-control-expose-headers"] == "X-Request-Id"


def test_other_origins_are_not_allowed_when_some_are_named() -> None:
    app = guarded_app(allowed_origins=("https://app.example",), allow_credentials=True)
    allowed = ask("OPTIONS", "/v1/models", PREFLIGHT, app)
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    assert allowed.headers["access-control-allow-credentials"] == "true"
    refused = ask("OPTIONS", "/v1/models", PREFLIGHT | {"Origin": "https://other.example"}, app)
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers


def test_no_origin_is_allowed_when_none_is_named() -> None:
    answer = ask("GET", "/health", {"Origin": "https://app.example"}, guarded_app(allowed_origins=()))
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


def test_a_proxys_prefix_changes_neither_routes_nor_what_is_open() -> None:
    app = guarded_app()

    async def behind_proxy(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        await app(dict(scope, root_path="/llm", path="/llm" + scope["path"]), receive, send)

    for path, status in (("/health", 200), ("/v1/models", 401), ("/nowhere", 401)):
        assert ask("GET", path, app=behind_proxy).status_code == status  # type: ignore[arg-type]
    assert ask("GET", "/v1/models", bearer(KEY), behind_proxy).status_code == 200  # type: ignore[arg-type]
