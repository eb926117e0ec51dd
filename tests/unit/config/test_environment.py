"""FastDeploy's environment variables: not read, and not passed over in silence."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fastdeploy_sd.cluster.router import launch as router
from fastdeploy_sd.config import config_from_kwargs, verify_keys_are_known
from fastdeploy_sd.config.environment import LOG_DIR_VARIABLE, UNREAD_VARIABLES
from fastdeploy_sd.entrypoints.openai import api_server

TOPK = "SPECULATE_VERIFY_USE_TOPK"


def test_a_variable_that_is_set_gets_one_warning_and_has_no_effect(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {"method": "ngram", "num_speculative_tokens": 2}
    for name in UNREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    plain = config_from_kwargs(model=model, speculative_config=keys)
    assert caplog.messages == []
    monkeypatch.setenv(TOPK, "1")
    assert config_from_kwargs(model=model, speculative_config=keys) == plain
    assert caplog.messages == [
        f"{TOPK}: this variable of FastDeploy is not read; use speculative_config.verify_strategy: greedy"
    ]


@pytest.mark.parametrize("name", UNREAD_VARIABLES)
def test_every_variable_is_named(
    name: str, model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, "0")
    config_from_kwargs(model=model)
    assert [message.partition(":")[0] for message in caplog.messages] == [name]


def test_variables_nobody_has_heard_of_share_a_line(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("FD_ZEBRA", "FD_ATTENTION_BACKEND", LOG_DIR_VARIABLE):
        monkeypatch.setenv(name, "x")
    config_from_kwargs(model=model)
    assert caplog.messages == ["FD_ATTENTION_BACKEND, FD_ZEBRA: these variables of FastDeploy are not read"]


@pytest.mark.parametrize("main", [api_server.main, router.main], ids=["server", "router"])
def test_an_api_that_fastdeploy_would_have_closed_is_not_opened(
    main: Callable[[list[str]], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FD_API_KEY", "one,two")
    assert main(["--model", "demo"] if main is api_server.main else []) == 2
    assert capsys.readouterr().err.count("error: api_key: expected one, as the variable FD_API_KEY") == 1


def test_keys_by_the_option_or_none_asked_for_are_fine() -> None:
    verify_keys_are_known({"FD_API_KEY": "one"}, has_keys=True)
    verify_keys_are_known({"FD_API_KEY": ""}, has_keys=False)
    verify_keys_are_known({}, has_keys=False)
