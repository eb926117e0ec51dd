"""The routes of operators: FastDeploy's about experts that `enable_eplb` moves, vLLM's about LoRA adapters."""

from __future__ import annotations

import hmac
from collections import Counter
from pathlib import Path
from typing import TypeVar

from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from fastdeploy_sd.config.eplb import EplbConfig
from fastdeploy_sd.engine.adapters import name_in_use
from fastdeploy_sd.entrypoints.openai.generation import Client
from fastdeploy_sd.entrypoints.openai.protocol import parse_body
from fastdeploy_sd.entrypoints.openai.protocol.adapters import LoadAdapterBody, UnloadAdapterBody
from fastdeploy_sd.entrypoints.openai.protocol.experts import (
    CheckRedundantBody,
    ExpertsBody,
    ExpertTokensBody,
    RearrangeBody,
)
from fastdeploy_sd.entrypoints.openai.served_models import ServedModel, ServedModels
from fastdeploy_sd.errors import BadRequest, Forbidden, Unauthorized, shown
from fastdeploy_sd.types.experts import ExpertReport
from fastdeploy_sd.wire.http.api_paths import LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH
from fastdeploy_sd.wire.http.error_format import JsonResponse
from fastdeploy_sd.wire.http.request_body import BodyReader

_MAX_BODY_BYTES = 1 << 16
_OK = {"code": 0, "msg": "ok"}
BodyType = TypeVar("BodyType", bound=ExpertsBody)


class ExpertRoutes:
    """Answers them.

    Raises (from every method):
        BadRequest: the body is wrong, or experts cannot be placed anew now. Unauthorized: user or password is wrong.
        Unavailable: the engine that places experts is down.
    """

    def __init__(self, client: Client, eplb: EplbConfig) -> None:
        self._client = client
        self._known = (eplb.redundant_expert_api_user, eplb.redundant_expert_api_password)
        self._bodies = BodyReader(_MAX_BODY_BYTES)

    def add_to(self, app: FastAPI) -> None:
        app.add_api_route("/rearrange_experts", self.rearrange, methods=["POST"])
        app.add_api_route("/get_per_expert_tokens_stats", self.token_stats, methods=["POST"])
        app.add_api_route("/check_redundant", self.check, methods=["POST"])

    async def rearrange(self, request: HttpRequest) -> Response:
        """Have experts placed anew now, by the rows since the last time; 400 while they move."""
        await self._read(request, RearrangeBody)
        await self._client.experts(rearranges=True)
        return JsonResponse(_OK)

    async def token_stats(self, request: HttpRequest) -> Response:
        """Rows of each expert of each layer, of all ranks: [[[rows of an expert, ...], ... a layer]]."""
        body = await self._read(request, ExpertTokensBody)
        report = await self._client.experts(clears=body.clear_stat)
        return JsonResponse(_OK | {"data": [report.num_rows]})

    async def check(self, request: HttpRequest) -> Response:
        """Whether experts move (DOING) or not (FREE); or, of each rank, whether it has what it shall have (1)."""
        body = await self._read(request, CheckRedundantBody)
        report = await self._client.experts()
        if body.action:
            return JsonResponse(_OK | {"data": [int(is_reached) for is_reached in report.is_reached]})
        found = _OK | {"status": "DOING" if report.is_moving else "FREE"}
        return JsonResponse(found | ({"data": _workloads(report)} if body.check_get_workloads else {}))

    async def _read(self, request: HttpRequest, body_type: type[BodyType]) -> BodyType:
        """Return the body of one who knows the password; every byte is compared, so the time tells nothing."""
        async with self._bodies.read(request) as content:
            body = parse_body(body_type, content)
        matches = [
            hmac.compare_digest(given.encode("utf-8", "surrogatepass"), known.encode())
            for given, known in zip((body.user, body.passwd), self._known, strict=True)
        ]
        if not all(matches):
            text = "user, passwd: expected those of the server's eplb_config, got others"
            raise Unauthorized(text, param="passwd", code="invalid_passwd")
        return body


def _workloads(report: ExpertReport) -> dict[str, object]:
    slots = [[expert for own in layer for expert in own] for layer in report.placement]
    copies = [Counter(experts) for experts in slots]
    return {
        "tokens_per_expert_stats_list": report.num_rows,
        "ep_rank_to_expert_id_list": slots,
        "expert_in_rank_num_list": [
            [found[expert] for expert in range(len(rows))] for found, rows in zip(copies, report.num_rows, strict=True)
        ],
    }


class AdapterRoutes:
    """vLLM's routes that load and unload LoRA adapters while a server runs.

    Raises (from every method):
        BadRequest: the body is wrong, or the folder holds no adapter of the model. Forbidden: the server has no
        `lora_root`, or the folder is not below it. NotFound: there is no such adapter. Unavailable: an engine is down.
    """

    def __init__(self, served: ServedModels) -> None:
        self._served, self._bodies = served, BodyReader(_MAX_BODY_BYTES)

    def add_to(self, app: FastAPI) -> None:
        app.add_api_route(LOAD_ADAPTER_PATH, self.load, methods=["POST"])
        app.add_api_route(UNLOAD_ADAPTER_PATH, self.unload, methods=["POST"])

    async def load(self, request: HttpRequest) -> Response:
        """Load a LoRA adapter, which requests may then name as their model."""
        async with self._bodies.read(request) as content:
            body = parse_body(LoadAdapterBody, content)
        model, root = self._model_for(body.base_model_name)
        folder = _below(root, body.lora_path)
        if body.lora_name in self._served.names:
            raise name_in_use(body.lora_name)
        await model.client.change_adapter(body.lora_name, str(folder))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: HttpRequest) -> Response:
        """Unload a LoRA adapter; requests that run with it go on."""
        async with self._bodies.read(request) as content:
            body = parse_body(UnloadAdapterBody, content)
        with_it = (model for model in self._served.models if model.is_loaded and model.adapter(body.lora_name))
        model, _ = self._model_for(next((model.names[0] for model in with_it), None))
        await model.client.change_adapter(body.lora_name, None)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _model_for(self, name: str | None) -> tuple[ServedModel, Path]:
        """Return the model with a name, or the only one that adapters may be loaded for, and its `lora_root`."""
        models = self._served.models if name is None else [self._served.named(name)[1]]
        able = [(model, Path(root)) for model in models if (root := model.config.lora.lora_root) is not None]
        if not able:
            text = (
                "lora_root: expected a folder of adapters that may be loaded, got none: the server has no such option"
            )
            raise Forbidden(text, code="not_allowed")
        if len(able) > 1:
            wanted = ", ".join(repr(model.names[0]) for model, _ in able)
            raise BadRequest(f"base_model_name: expected one of {wanted}, got null", param="base_model_name")
        return able[0]


def _below(root: Path, path: str) -> Path:
    """Return the folder that a path names, with links followed; Forbidden: it is not below `root`."""
    try:
        folder, top = (root / path).resolve(), root.resolve()
    except (OSError, ValueError, RuntimeError):  # a loop of links, or a NUL
        folder, top = Path(), root
    if not folder.is_relative_to(top) or folder == top:
        raise Forbidden(
            f"lora_path: expected a folder below lora_root, got {shown(path)}", param="lora_path", code="not_allowed"
        )
    return folder
