"""FastDeploy's routes about experts: who may ask, what they answer, and that they exist only where experts move."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from fastdeploy_sd.config.eplb import EplbConfig
from fastdeploy_sd.errors import BadRequest, Unavailable
from fastdeploy_sd.types.experts import ExpertReport
from tests.unit.entrypoints.scripted_app import BALANCED, ScriptedApp

KNOWN = {"user": "u", "passwd": "päss"}
EPLB = EplbConfig(redundant_expert_api_user="u", redundant_expert_api_password="päss")
REARRANGE, STATS, CHECK = "/rearrange_experts", "/get_per_expert_tokens_stats", "/check_redundant"
# Two layers, two ranks of two slots; the second rank still waits for an expert.
REPORT = ExpertReport(True, ((5, 6, 7), (1, 2, 3)), (((0, 1), (2, -1)), ((2, 0), (1, 0))), (True, False))


@pytest.fixture
def app() -> ScriptedApp:
    found = ScriptedApp(parallel=replace(BALANCED, eplb_config=EPLB))
    found.client.experts_found = REPORT
    return found


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    return error


def test_the_answers_are_fastdeploys(app: ScriptedApp) -> None:
    asked: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (REARRANGE, {"ips": ["127.0.0.1:8000"], "action": ""}, {}),
        (STATS, {}, {"data": [[[5, 6, 7], [1, 2, 3]]]}),
        (STATS, {"clear_stat": True}, {"data": [[[5, 6, 7], [1, 2, 3]]]}),
        (CHECK, {}, {"status": "DOING"}),
        (CHECK, {"action": "check_load_weight_result"}, {"data": [1, 0]}),
    ]
    for path, body, expected in asked:
        response = app.post(path, KNOWN | body)
        assert (response.status_code, response.json()) == (200, {"code": 0, "msg": "ok"} | expected)
    assert app.client.asked == [(True, False), (False, False), (False, True), (False, False), (False, False)]
    app.client.experts_found = replace(REPORT, is_moving=False)
    workloads = app.post(CHECK, KNOWN | {"check_get_workloads": True}).json()
    assert workloads["status"] == "FREE"
    assert workloads["data"] == {
        "tokens_per_expert_stats_list": [[5, 6, 7], [1, 2, 3]],
        "ep_rank_to_expert_id_list": [[0, 1, 2, -1], [2, 0, 1, 0]],
        "expert_in_rank_num_list": [[1, 1, 1], [2, 1, 1]],
    }


@pytest.mark.parametrize("path", [REARRANGE, STATS, CHECK])
@pytest.mark.parametrize("who", [{}, {"user": "u"}, {"user": "u", "passwd": "pass"}, {"user": "", "passwd": "päss"}])
def test_who_does_not_know_the_password_learns_nothing(app: ScriptedApp, path: str, who: dict[str, str]) -> None:
    response = app.post(path, who)
    assert response.status_code == 401
    error = error_of(response)
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_passwd")
    assert "ä" not in response.text
    assert app.client.asked == []


def test_without_a_password_whoever_may_use_the_server_may_ask() -> None:
    app = ScriptedApp(parallel=BALANCED)
    assert app.post(CHECK, {}).json()["status"] == "FREE"
    assert app.post(CHECK, KNOWN).status_code == 401


def test_what_cannot_be_is_refused(app: ScriptedApp) -> None:
    for path, body, text in (
        (REARRANGE, {"action": "recv_expert_weight"}, "action"),
        (CHECK, {"action": "x"}, "action"),
        (STATS, {"clear_stat": 1}, "clear_stat"),
        (STATS, {"clear": True}, "clear: unknown field (did you mean 'clear_stat'?)"),
    ):
        response = app.post(path, KNOWN | body)
        assert response.status_code == 400
        assert text in error_of(response)["message"]
    assert app.client.asked == []
    for error in (BadRequest("they move", code="rearranging"), Unavailable("the engine is down", code="engine_down")):
        app.client.experts_found = error
        response = app.post(REARRANGE, KNOWN)
        assert (response.status_code, error_of(response)["code"]) == (error.status, error.code)


def test_there_are_none_where_experts_stay() -> None:
    for parallel in (replace(BALANCED, enable_eplb=False), replace(BALANCED, data_parallel_size=1)):
        response = ScriptedApp(parallel=parallel).post(REARRANGE, {})
        assert (response.status_code, error_of(response)["code"]) == (404, "route_not_found")
