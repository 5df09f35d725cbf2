"""/v1/models: the one model that is served, under each of its names.

In: a name, or none. Out: what a client may ask for.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxpage.server.service import service_of


class ModelCard(msgspec.Struct, kw_only=True):
    """The model under one of its names."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "jaxpage"
    root: str
    """The model as the server was given it."""
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """Answer of /v1/models."""

    object: str = "list"
    data: list[ModelCard]


async def models(request: Request) -> Response:
    """GET /v1/models: the one model under each of its names, once it can be asked."""
    service = service_of(request)
    service.check_available()
    return _json(ModelList(data=[_model_card(request, name) for name in service.model_names]))


async def model(request: Request) -> Response:
    """GET /v1/models/{id}; the id may hold slashes, as a path does."""
    service = service_of(request)
    service.check_available()
    name = request.path_params["model_id"]
    service.check_model(name)
    return _json(_model_card(request, name if name in service.model_names else service.model_name))


def _model_card(request: Request, name: str) -> ModelCard:
    engine = service_of(request).engine
    return ModelCard(
        id=name, created=request.app.state.created, root=engine.model_name, max_model_len=engine.max_model_len
    )


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
