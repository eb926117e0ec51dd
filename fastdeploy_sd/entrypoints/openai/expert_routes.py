"""FastDeploy's routes about experts that are spread over ranks, where `enable_eplb` moves them."""

from __future__ import annotations

import hmac
from collections import Counter
from typing import TypeVar

from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from fastdeploy_sd.config.eplb import EplbConfig
from fastdeploy_sd.entrypoints.openai.generation import Client
from fastdeploy_sd.entrypoints.openai.protocol import parse_body
from fastdeploy_sd.entrypoints.openai.protocol.experts import (
    CheckRedundantBody,
    ExpertsBody,
    ExpertTokensBody,
    RearrangeBody,
)
from fastdeploy_sd.errors import Unauthorized
from fastdeploy_sd.types.experts import ExpertReport
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
