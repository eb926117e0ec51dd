"""What the port for metrics answers: nothing but what monitoring asks for. Knows no metric."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from fastdeploy_sd.errors import NotFound, shown
from fastdeploy_sd.wire.http.error_format import error_response

PATHS = ("/metrics", "/config-info", "/health", "/ping")


class MonitoringOnly:
    """Passes requests for PATHS on to an application, and answers 404 to all others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 404 or pass the request on (ASGI)."""
        if scope["type"] != "http" or scope["path"] in PATHS:
            await self._app(scope, receive, send)
            return
        text = f"route: expected one of {', '.join(PATHS)} on metrics_port, got {shown(scope['path'])}"
        await error_response(NotFound(text, code="route_not_found"))(scope, receive, send)
