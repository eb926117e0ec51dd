"""Errors -> OpenAI's JSON, status and headers. The one shape of every error this server sends."""

from __future__ import annotations

import json
import logging
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from fastdeploy_sd.errors import FdsdError, InternalError, Overloaded, Unauthorized

logger = logging.getLogger(__name__)


def error_json(error: FdsdError) -> dict[str, Any]:
    """Return {"error": {message, type, param, code}}."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_response(error: FdsdError) -> Response:
    """Return the HTTP response for an error, with Retry-After or WWW-Authenticate where they belong."""
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return JsonResponse(error_json(error), error.status, headers)


def to_fdsd_error(error: Exception, request: HttpRequest) -> FdsdError:
    """Return an error a user may see. Any that is not one of ours is our fault: logged, and told without detail."""
    if isinstance(error, FdsdError):
        return error
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return InternalError("the server failed on this request; its log says why")


def to_json(value: object) -> str:
    """Return compact JSON; characters beyond ASCII as they are."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class JsonResponse(Response):
    """A JSON body."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """Return the body."""
        return to_json(content).encode("utf-8")
