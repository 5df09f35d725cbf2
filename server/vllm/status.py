"""How the server stands: health, load, version and metrics, under the paths that vLLM has them.

In: a request without a body. Out: what load balancers, autoscalers and dashboards ask for.
"""

import importlib.metadata

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxpage.metrics import CONTENT_TYPE
from jaxpage.server.service import service_of


class Load(msgspec.Struct, kw_only=True):
    """Answer of /load."""

    server_load: int
    """Requests that are open."""


class Health(msgspec.Struct, kw_only=True):
    """Answer of /health."""

    status: str = "ok"


class Version(msgspec.Struct, kw_only=True):
    """Answer of /version."""

    version: str


async def health(request: Request) -> Response:
    """GET /health and /ping: 200 if and only if a request would be served now."""
    service_of(request).check_available()
    return _json(Health())


async def load(request: Request) -> Response:
    """GET /load: requests that are open, for those who spread load over several servers."""
    return _json(Load(server_load=len(service_of(request).open_generations)))


async def version(request: Request) -> Response:
    """GET /version: jaxpage's."""
    return _json(Version(version=importlib.metadata.version("jaxpage")))


async def metrics(request: Request) -> Response:
    """GET /metrics: Prometheus' text format; answered whatever state the engine is in."""
    service = service_of(request)
    text = service.engine.metrics.render(vllm_names=service.config.vllm_metric_names)
    return Response(text, media_type=CONTENT_TYPE)


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
