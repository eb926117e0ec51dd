"""The middleware of our applications, the one form of their errors, and the routes that all refuse."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from fastdeploy_sd.config import ServerConfig
from fastdeploy_sd.errors import MAX_SHOWN_CHARS, BadRequest, FdsdError, MethodNotAllowed, NotFound, shown
from fastdeploy_sd.metrics import HttpStats
from fastdeploy_sd.wire.http.auth import BearerAuth
from fastdeploy_sd.wire.http.error_format import RESPONSES_PATH, error_response, to_fdsd_error
from fastdeploy_sd.wire.http.origins import OriginGate
from fastdeploy_sd.wire.http.request_middleware import RequestMiddleware
from fastdeploy_sd.wire.http.tracing import make_tracer
from fastdeploy_sd.wire.http.web_page import WebPage

LOSSY_HEADER = "X-Speculation-Lossy"
REQUEST_ID_HEADER = "request-id"
_MIN_LIKENESS = 0.9
# Routes of other servers' own APIs -> whose they are, and the end of the one that does the same here.
_FOREIGN = {
    "/completion": ("llama.cpp", "/completions"),
    "/generate": ("SGLang", "/completions"),
    "/server_info": ("SGLang", "/config-info"),
}


def add_middleware(app: FastAPI, server: ServerConfig, stats: HttpStats, open_paths: Collection[str] = ()) -> None:
    """Have every error answered in our form, and put in front of the routes what every request passes."""
    app.add_exception_handler(FdsdError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    # The last one added is the first one passed.
    app.add_middleware(BearerAuth, api_keys=server.api_key, open_paths=open_paths)
    if server.web_page:  # it asks for the key itself
        app.add_middleware(WebPage)
    if server.allowed_origins:  # a preflight request carries no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=server.allowed_origins,
            allow_methods=server.allowed_methods,
            allow_headers=server.allowed_headers,
            allow_credentials=server.allow_credentials,
            expose_headers=["Retry-After", REQUEST_ID_HEADER, LOSSY_HEADER],
        )
    app.add_middleware(OriginGate, allowed=server.allowed_origins, is_open=not server.api_key, host=server.host)
    tracer = None if server.otlp_traces_endpoint is None else make_tracer(server.otlp_traces_endpoint)
    app.add_middleware(RequestMiddleware, stats=stats, has_log=server.access_log, tracer=tracer)


async def _answer_error(request: HttpRequest, error: Exception) -> Response:
    return error_response(to_fdsd_error(error, request))


async def _answer_http_exception(request: HttpRequest, error: Exception) -> Response:
    """Starlette's own errors: unknown route (404), wrong method (405), malformed request (400)."""
    assert isinstance(error, HTTPException), "registered for HTTPException only"
    where = f"{request.method} {request.url.path}"[:MAX_SHOWN_CHARS]
    routes = routes_of(request.app)
    allowed = [route for route in routes if route.partition(" ")[2] == request.url.path]
    if error.status_code == MethodNotAllowed.status and allowed:
        text = f"method: expected {' or '.join(allowed)}, got {where}"
        response = error_response(MethodNotAllowed(text, code="method_not_allowed"))
        response.headers.update(error.headers or {})
        return response
    if error.status_code in (NotFound.status, MethodNotAllowed.status):  # a path with a name in it has other methods
        text = f"route: expected one of those that GET / lists, got {where}{_nearest(request.url.path, routes)}"
        return error_response(NotFound(text, code="route_not_found"))
    return error_response(BadRequest(f"request: {error.detail}"))


def _nearest(path: str, routes: Sequence[str]) -> str:
    """Return a question about the route that was meant, "" where none is near.

    The commonest mistakes are a base URL without its /v1, with two of them or with another prefix.
    """
    ends = {route.partition(" ")[2].removeprefix("/v1"): route for route in routes}
    path = path[:MAX_SHOWN_CHARS].rstrip("/")
    program, meant = _FOREIGN.get(path, ("", ""))
    if meant in ends:
        return f" (of {program}; here: {ends[meant]})"
    path = path.removeprefix("/v1")
    same = [end for end in ends if len(end) > 1 and path.endswith(end)]
    near = max(same, key=len, default=None) or next(iter(get_close_matches(path, ends, 1, _MIN_LIKENESS)), None)
    return "" if near is None else f": did you mean {ends[near]}?"


def routes_of(app: FastAPI) -> list[str]:
    """Method and path of every route, in the order they were added."""
    return [f"{method} {r.path}" for r in app.routes if isinstance(r, APIRoute) for method in sorted(r.methods or ())]


async def answer_live() -> Response:
    """200 while the process answers, also while it drains: for probes whose failure restarts it."""
    return Response(status_code=200)


def add_refused_routes(app: FastAPI) -> None:
    """Add them: each is a 404, which no client tries again, and says why."""
    stored = f"{RESPONSES_PATH}/{{response_id}}"
    app.add_api_route(stored, _stored, methods=["GET", "DELETE"], name="stored_response")
    app.add_api_route(f"{stored}/input_items", _stored, methods=["GET"], name="input_items")
    app.add_api_route(f"{stored}/cancel", _stored, methods=["POST"], name="cancel_response")


async def _stored(response_id: str) -> Response:
    """Refused: no Response is stored."""
    raise NotFound(
        f"response: expected none by its id, as none is stored, got {shown(response_id)}",
        param="response_id",
        code="response_not_found",
    )
