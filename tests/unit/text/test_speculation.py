"""What callers say about drafting: granted as it is, or refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.text.speculation import may_change_tokens, resolve_speculation
from fastdeploy_sd.types import Speculation, SpeculationInfo
from fastdeploy_sd.types.draft_methods import METHODS

SERVER = SpeculationInfo("mtp", ("naive", "ngram", "mtp"), 4, 1, has_draft_logprobs=True)
PLAIN = SpeculationInfo()
OFF = Speculation(enabled=False)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, Speculation()),
        ({}, Speculation()),
        ({"enabled": None, "method": None}, Speculation()),
        (Speculation(), Speculation()),
        ({"enabled": True}, Speculation()),
        ({"enabled": False}, OFF),
        ({"method": "naive"}, OFF),
        ({"enabled": True, "method": "ngram", "num_speculative_tokens": 4}, Speculation(True, "ngram", 4)),
        (Speculation(True, "mtp", 1, 20), Speculation(True, "mtp", 1, 20)),
        ({"method": "NGram"}, Speculation(method="ngram")),
        ({"method": "ngram_match"}, Speculation(method="ngram")),
        (Speculation(method=" MTP "), Speculation(method="mtp")),
        ({"method": "NAIVE"}, OFF),
        ({"num_draft_logprobs": 0}, Speculation(num_draft_logprobs=0)),
    ],
)
def test_what_can_be_granted_is(asked: Any, expected: Speculation) -> None:
    assert resolve_speculation(asked, SERVER) == expected


@pytest.mark.parametrize("info", [SERVER, PLAIN])
def test_no_drafts_can_be_had_everywhere_whatever_else_is_asked(info: SpeculationInfo) -> None:
    for asked in (
        {"enabled": False, "method": "suffix", "num_speculative_tokens": 99},
        {"enabled": False, "method": "MTP"},
        {"method": "naive"},
    ):
        resolved = resolve_speculation(asked, info)
        assert resolved == OFF
        assert info.method_of(resolved) == "naive"


@pytest.mark.parametrize("info", [SERVER, PLAIN])
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"method": "ngrm"},
            f"speculation.method: expected one of {', '.join(METHODS)}, got 'ngrm'",
        ),
        ({"num_speculative_tokens": 0}, "speculation.num_speculative_tokens: expected an integer >= 1, got 0"),
    ],
)
def test_what_no_server_could_honour_is_refused_beside_no_drafts_too(
    info: SpeculationInfo, other: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        resolve_speculation({"enabled": False, **other}, info)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("strategy", "policy", "temperature", "drafting", "plain"),
    [
        ("target_match", "accept_all", 1.0, True, False),
        ("target_match", "accept_all", 0.0, True, False),
        ("greedy", "normal", 1.0, True, True),
        ("greedy", "normal", 0.0, False, False),
        ("greedy", "normal", 1e-50, False, False),  # 0 as the kernels see it
        ("greedy", "accept_all", 0.0, True, False),
        ("greedy", "reject_all", 1.0, True, True),
        ("topp", "normal", 0.5, True, True),
        ("topp", "normal", 0.0, False, False),
    ],
)
def test_a_strategy_draws_every_token_and_a_policy_judges_drafts(
    strategy: Any, policy: Any, temperature: float, drafting: bool, plain: bool
) -> None:
    lossy, rule = replace(SERVER, lossy=True), SpeculativeConfig(verify_strategy=strategy, accept_policy=policy)
    assert may_change_tokens(Speculation(), temperature, lossy, rule) is drafting
    assert may_change_tokens(OFF, temperature, lossy, rule) is plain
    assert not may_change_tokens(Speculation(), 1.0, SERVER, SpeculativeConfig())


def test_nothing_asked_is_fine_on_a_plain_server() -> None:
    nothing: list[Any] = [None, {}, Speculation()]
    for asked in nothing:
        assert resolve_speculation(asked, PLAIN) == Speculation()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("mtp", "speculation: expected a map, got 'mtp'"),
        ({"metod": "mtp"}, "speculation.metod: unknown field (did you mean 'method'?)"),
        ({"enabled": 1}, "speculation.enabled: expected true or false, got 1"),
        ({"method": 5}, "speculation.method: expected the name of a method, got 5"),
        ({"enabled": False, "method": 5}, "speculation.method: expected the name of a method, got 5"),
        (
            {"method": "ngrm"},
            "expected one of naive, ngram, mtp (what this server has loaded), got 'ngrm' (did you mean",
        ),
        ({"num_speculative_tokens": 0}, "speculation.num_speculative_tokens: expected an integer >= 1, got 0"),
        ({"num_speculative_tokens": True}, "speculation.num_speculative_tokens: expected an integer >= 1, got True"),
        ({"num_speculative_tokens": 2.0}, "expected an integer >= 1, got 2.0"),
        ({"num_speculative_tokens": 5}, "an integer in 1..4 (this server's limit), got 5"),
        (Speculation(num_speculative_tokens=5), "an integer in 1..4 (this server's limit), got 5"),
        ({"num_draft_logprobs": 21}, "speculation.num_draft_logprobs: expected an integer in 0..20, got 21"),
    ],
)
def test_what_makes_no_sense_is_named(asked: Any, message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        resolve_speculation(asked, SERVER)
    assert message in caught.value.message
    assert caught.value.param == "speculation"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"enabled": True}, "speculation.enabled: expected false (this server was started without speculation), got"),
        ({"method": "ngram"}, "speculation.method: expected 'naive' (this server was started without speculation)"),
        (Speculation(method="ngram"), "speculation.method: expected 'naive' (this server was started without"),
        ({"num_speculative_tokens": 1}, "speculation.num_speculative_tokens: expected none (this server was started"),
    ],
)
def test_a_plain_server_says_that_it_is_one(asked: Any, message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        resolve_speculation(asked, PLAIN)
    assert message in caught.value.message


def test_draft_logprobs_need_a_server_that_has_them() -> None:
    with pytest.raises(BadRequest, match=r"speculation.num_draft_logprobs: .* enable_draft_logprob"):
        resolve_speculation({"num_draft_logprobs": 0}, replace(SERVER, has_draft_logprobs=False))
