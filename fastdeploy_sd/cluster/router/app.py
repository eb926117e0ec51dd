"""The routes of a router: those of a server, which it relays, and those by which instances register."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from fastdeploy_sd import __version__
from fastdeploy_sd.cluster import messages as m
from fastdeploy_sd.cluster.route import NOT_AUTHENTIC, ROUTE_HEADER
from fastdeploy_sd.cluster.router.adapter_relay import AdapterRelay
from fastdeploy_sd.cluster.router.delivery import Delivery
from fastdeploy_sd.cluster.router.instance import Instance
from fastdeploy_sd.cluster.router.options import RouterConfig
from fastdeploy_sd.cluster.router.paused_instances import PausedInstances
from fastdeploy_sd.cluster.router.registry import Registry
from fastdeploy_sd.cluster.router.relay import Relay, UpstreamClient
from fastdeploy_sd.cluster.router.scraping import scrape
from fastdeploy_sd.errors import FdsdError, Forbidden, NoInstance, NotFound, Unavailable, paused, shown
from fastdeploy_sd.metrics import HttpStats, InstanceGauges, render_instance_metrics, render_router_metrics
from fastdeploy_sd.wire.http.api_paths import GENERATION_PATHS, LOAD_ADAPTER_PATH, TEXT_PATHS, UNLOAD_ADAPTER_PATH
from fastdeploy_sd.wire.http.error_format import JsonResponse
from fastdeploy_sd.wire.http.event_stream import until_disconnected
from fastdeploy_sd.wire.http.middleware import (
    add_middleware,
    add_refused_routes,
    answer_live,
    routes_of,
)
from fastdeploy_sd.wire.http.ollama_models import (
    OllamaModel,
    add_model_lists,
)
from fastdeploy_sd.wire.http.pause_routes import PauseRoutes
from fastdeploy_sd.wire.http.request_body import BodyReader
from fastdeploy_sd.wire.http_client import Ask, Headers

_MAX_LARGEST_BODIES = 16  # they are held until their answers are complete
# What an instance gets of a client's headers.
_PASSED = ("accept", "content-type", "user-agent", "x-request-id", "traceparent", "tracestate")


class RouterApp:
    """The application of a router (ASGI), and whether it takes requests."""

    def __init__(self, config: RouterConfig, registry: Registry, upstream: UpstreamClient, stats: HttpStats) -> None:
        self._config = config
        self._registry = registry
        self._upstream = upstream
        self._http_stats = stats
        self._is_draining = False
        self._paused = PausedInstances(lambda: registry.instances, lambda: self.num_open)
        self._adapters = AdapterRelay(lambda: registry.instances, upstream.http)
        self._bodies = BodyReader(config.server.max_body_bytes, _MAX_LARGEST_BODIES)
        self._messages = BodyReader(m.MAX_MESSAGE_BYTES)
        self.num_open = 0
        self.app = FastAPI(
            title="fastdeploy_sd", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
        )
        self._add_routes()
        add_middleware(self.app, config.server, stats, open_paths=(m.CHALLENGE, m.REGISTER, m.HEARTBEAT, m.DEREGISTER))

    def _add_routes(self) -> None:
        for path in (*GENERATION_PATHS, *TEXT_PATHS):
            self.app.add_api_route(path, self.relay, methods=["POST"])
        add_refused_routes(self.app)
        PauseRoutes(self._paused).add_to(self.app)
        self.app.add_api_route(LOAD_ADAPTER_PATH, self.load_adapter, methods=["POST"])
        self.app.add_api_route(UNLOAD_ADAPTER_PATH, self.unload_adapter, methods=["POST"])
        self.app.add_api_route("/", self.root, methods=["GET"])
        self.app.add_api_route("/version", self.version, methods=["GET"])
        self.app.add_api_route("/v1/models", self.models, methods=["GET"])
        self.app.add_api_route("/v1/models/{name:path}", self.model, methods=["GET"])
        add_model_lists(self.app, self._ollama_models)
        self.app.add_api_route("/health", self.health, methods=["GET"])
        self.app.add_api_route("/ping", self.health, methods=["GET", "POST"])
        self.app.add_api_route("/ready", self.health, methods=["GET"])
        self.app.add_api_route("/live", answer_live, methods=["GET"])
        self.app.add_api_route("/metrics", self.metrics, methods=["GET"])
        self.app.add_api_route("/instances", self.instances, methods=["GET"])
        self.app.add_api_route("/instances/metrics", self.instance_metrics, methods=["GET"])
        self.app.add_api_route(m.CHALLENGE, self.challenge, methods=["GET"])
        self.app.add_api_route(m.REGISTER, self.register, methods=["POST"])
        self.app.add_api_route(m.HEARTBEAT, self.heartbeat, methods=["POST"])
        self.app.add_api_route(m.DEREGISTER, self.deregister, methods=["POST"])

    def begin_drain(self) -> None:
        """Take no new requests from now on; those that are being relayed go on."""
        self._is_draining = True

    async def relay(self, request: HttpRequest) -> Response:
        """Give a request to an instance, and its answer to the client."""
        if ROUTE_HEADER in request.headers:
            text = f"{ROUTE_HEADER}: expected no such header from a client, as only routers write it"
            raise Forbidden(text, code=NOT_AUTHENTIC)
        self._verify_takes_requests()
        return _Relayed(self)

    async def relay_to(self, request: HttpRequest, send: Send) -> None:
        """Answer a request over `send`; ends at once when the client leaves."""
        self.num_open += 1
        try:
            async with self._bodies.read(request) as content:
                path = request.url.path
                ask = Ask("POST", path, self._passed(request), content)
                relay = Relay(self._upstream, ask, path in GENERATION_PATHS, Delivery(request, send))
                await until_disconnected(request.receive, relay.run())
        finally:
            self.num_open -= 1

    async def load_adapter(self, request: HttpRequest) -> Response:
        """Load a LoRA adapter at all instances of its model."""
        return await self._change_adapter(request, self._adapters.load)

    async def unload_adapter(self, request: HttpRequest) -> Response:
        """Unload a LoRA adapter at all instances that have it."""
        return await self._change_adapter(request, self._adapters.unload)

    async def _change_adapter(
        self, request: HttpRequest, change: Callable[[bytes, Headers], Awaitable[tuple[int, bytes]]]
    ) -> Response:
        async with self._messages.read(request) as content:
            status, body = await change(content, self._passed(request))
        media_type = PlainTextResponse.media_type if status == 200 else JsonResponse.media_type  # noqa: PLR2004 (OK)
        return Response(body, status, media_type=media_type)

    def _passed(self, request: HttpRequest) -> list[tuple[bytes, bytes]]:
        names = {name.encode("ascii") for name in _PASSED}
        key = self._config.routing.instance_api_key
        if key is None:
            names |= {b"authorization", b"x-api-key"}
        own = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        return [*own, *((name, value) for name, value in request.headers.raw if name in names)]

    def _verify_takes_requests(self) -> None:
        if self._is_draining:
            raise Unavailable("the router is draining", code="draining")
        if self._paused.is_router_paused:
            raise paused("the router")

    async def root(self, request: HttpRequest) -> Response:
        return JsonResponse({"name": "fastdeploy_sd router", "version": __version__, "routes": routes_of(request.app)})

    async def version(self) -> Response:
        return JsonResponse({"version": __version__})

    async def health(self) -> Response:
        """200 while requests are taken: when it does not drain, and an instance is there that takes them."""
        self._verify_takes_requests()
        if not any(i.member.generates for i in self._registry.available()):
            raise NoInstance("expected an instance that takes requests, got none", code="no_instance")
        return Response(status_code=200)

    async def models(self) -> Response:
        """The models of all instances under each of their names, as OpenAI's list."""
        return JsonResponse({"object": "list", "data": list(self._cards().values())})

    async def model(self, name: str) -> Response:
        cards = self._cards()
        if name not in cards:
            known = ", ".join(map(repr, cards)) or "none, as no instance is there"
            raise NotFound(f"model: expected one of {known}, got {shown(name)}", param="model", code="model_not_found")
        return JsonResponse(cards[name])

    def _ollama_models(self) -> list[OllamaModel]:
        serving = [i.said for i in self._registry.available() if i.member.generates]
        models = {
            name: OllamaModel(name, said.created, said.member.max_model_len, said.member.fingerprint)
            for said in serving
            for name in said.served_names
        }
        return list(models.values())

    def _cards(self) -> dict[str, dict[str, object]]:
        serving = [i.said for i in self._registry.available() if i.member.generates]
        return {
            name: {
                "id": name,
                "object": "model",
                "created": said.created,
                "owned_by": "fastdeploy_sd",
                "max_model_len": said.member.max_model_len,
                **({"parent": said.served_names[0]} if name in {a.name for a in said.member.adapters} else {}),
            }
            for said in serving
            for name in said.served_names
        }

    async def instances(self) -> Response:
        return JsonResponse({"instances": [self._described(instance) for instance in self._registry.instances]})

    def _described(self, instance: Instance) -> dict[str, object]:
        load = instance.load
        return {
            "id": instance.instance_id,
            "role": instance.member.role,
            "address": str(instance.target),
            "engine": instance.member.engine,
            "models": list(instance.said.served_names),
            "state": self._state(instance),
            "kv_partners": [name for name, reason in self._registry.partners(instance).items() if reason is None],
            "silence_s": round(instance.silence_s, 3),
            "num_requests_running": load.num_running,
            "num_requests_waiting": load.num_waiting,
            "max_num_seqs": load.max_num_seqs,
            "num_blocks": load.num_blocks,
            "num_available_blocks": load.num_available_blocks,
        }

    def _state(self, instance: Instance) -> str:
        if instance.silence_s >= self._config.routing.silent_s:
            return "silent"
        if instance.is_paused:
            return "paused"
        if not instance.load.takes_requests:
            return "refusing"
        return "resting" if instance.circuit.is_open else "available"

    async def metrics(self) -> Response:
        gauges = []
        for instance in self._registry.instances:
            load = instance.candidate().load
            num_requests = load.num_running + load.num_waiting
            gauges.append(InstanceGauges(instance.label, instance.member.role, self._state(instance), num_requests))
        body, content_type = render_router_metrics(self._upstream.stats, gauges, self._http_stats)
        return Response(body, media_type=content_type)

    async def instance_metrics(self, request: HttpRequest) -> Response:
        """The metrics of all instances, with an instance's address in the label `instance`."""
        targets = [instance.target for instance in self._registry.instances]
        bodies = await scrape(self._upstream.http, targets, self._passed(request))
        body, content_type = await asyncio.to_thread(render_instance_metrics, bodies)
        return Response(body, media_type=content_type)

    async def challenge(self) -> Response:
        return JsonResponse({"challenge": self._registry.challenge()})

    async def register(self, request: HttpRequest) -> Response:
        host = request.client.host if request.client is not None else ""
        outcomes = self._upstream.stats.registrations
        try:
            session = await self._hear(request, lambda content: self._registry.register(content, host))
        except FdsdError as error:
            outcomes[error.code or error.type] += 1
            raise
        outcomes["taken"] += 1
        return JsonResponse({"session": session, "time": time.time()})

    async def heartbeat(self, request: HttpRequest) -> Response:
        await self._hear(request, self._registry.heartbeat)
        return JsonResponse({})

    async def deregister(self, request: HttpRequest) -> Response:
        await self._hear(request, self._registry.deregister)
        return JsonResponse({})

    async def _hear(self, request: HttpRequest, take: Callable[[bytes], object]) -> object:
        async with self._messages.read(request) as content:
            return take(content)


class _Relayed(Response):
    """A response that is written as the instance's comes."""

    def __init__(self, router: RouterApp) -> None:
        super().__init__()
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._router.relay_to(HttpRequest(scope, receive), send)
