"""Frames: what goes in comes out, and whatever else comes in is a ProtocolError."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import TypeAliasType, TypeVar

from fastdeploy_sd import errors
from fastdeploy_sd.engine.ipc import messages as m
from fastdeploy_sd.rules.requests import (
    MAX_EOS_TOKEN_IDS,
    MAX_GRAMMAR_CHARS,
    MAX_ID_CHARS,
    MAX_SALT_CHARS,
    RequestRules,
)
from fastdeploy_sd.rules.sampling import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SEED_LIMIT,
)
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import (
    Adapter,
    AdapterSource,
    DraftCounts,
    DraftLogprob,
    FinishReason,
    ModelInfo,
    Request,
    RequestMetrics,
    RequestOutput,
    Speculation,
    SpeculationInfo,
    TokenLogprob,
)
from fastdeploy_sd.types.experts import ExpertReport, ExpertStats
from fastdeploy_sd.types.stats import EngineStats, SourceCounts
from fastdeploy_sd.wire.codec import ProtocolError, codec_of

REQUEST = Request(
    "chat-1",
    np.array([1, 2, 70000], np.int32),
    SamplingParams(temperature=0.5, logit_bias={3: 1.5}, stop=("\n", "é"), bad_words=("x",), seed=3, logprobs=2),
    max_tokens=12,
    seed=(1 << 64) - 1,
    eos_token_ids=(1, 2),
    bad_words_token_ids=((4, 5), (6,)),
    priority=-3,
    arrival_time=1.25,
    cache_salt="tenant",
    speculation=Speculation(method="ngram", num_speculative_tokens=3, num_draft_logprobs=0),
)
OUTPUT = RequestOutput(
    "chat-1",
    (4, 5),
    (TokenLogprob(4, -0.5, 1, (4, 9), (-0.5, -1.0)), TokenLogprob(5, -2.0, 7)),
    FinishReason.STOP,
    stop_reason=5,
    num_cached_tokens=64,
    metrics=RequestMetrics(1.0, 2.0, 3.0, 4.0, 5, DraftCounts(4, 10, (4, 3), (4, 2), (2, 1))),
    draft_logprobs=(
        DraftLogprob(TokenLogprob(4, -0.25, 1, (4, 9), (-0.25, -1.5)), 0, True),
        DraftLogprob(TokenLogprob(8, -2.0, 3), 1, False),
    ),
)
FAILED = RequestOutput("b", (), finish_reason=FinishReason.ERROR, error=("InternalError", "why"))
MESSAGES: tuple[m.Message, ...] = (
    m.ClientHello(123),
    m.Submit(7, REQUEST),
    m.Abort((7, 8)),
    m.StatsRequest(3),
    m.StatsRequest(4, True),
    m.ExpertsRequest(4, rearranges=True),
    m.AdapterRequest(5, "tuned", "/adapters/tuned"),
    m.ClientDisconnect(),
    m.EngineReady(
        ModelInfo("m", 100, 4096, (1, 2), 64, 10, SpeculationInfo("mtp", ("naive", "mtp"), 4, 1, True, True)),
        124,
    ),
    m.Outputs((7, 8), (OUTPUT, FAILED)),
    m.Rejected(7, m.WireError.of(errors.Overloaded("full", retry_after_s=9))),
    m.StatsReply(
        3,
        EngineStats(
            num_requests=5,
            timings_ms={"forward": 1.5},
            drafts={"ngram": SourceCounts((3, 1), (3, 1), (1, 0))},
            verifications={"mtp": DraftCounts(3, 4, (3, 1), (3, 1), (1, 0))},
            speculation=SpeculationInfo("mtp", ("naive", "mtp"), 4, 1),
            experts=ExpertStats({1: (5, 6)}, {0: 0.5}, 3, 1),
        ),
    ),
    m.ExpertsReply(4, ExpertReport(True, ((5, 6),), (((0, -1), (1, 0)),), (True, False))),
    m.AdapterReply(5, AdapterSource(Adapter("tuned", "ab" * 16), "/adapters/tuned")),
    m.AdaptersChanged((AdapterSource(Adapter("tuned", "ab" * 16), "/adapters/tuned"),)),
    m.Notice(True, False),
    m.Fault("what"),
    m.EngineDead("why", has_failed=True),
)
FRAMES = [m.encode(message) for message in MESSAGES]


def _plain(value: Any) -> Any:
    """A value that == compares deeply, arrays with their type included."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    if dataclasses.is_dataclass(value):
        return (type(value), [_plain(getattr(value, f.name)) for f in dataclasses.fields(value)])
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_trip(message: m.Message) -> None:
    assert _plain(m.decode(m.encode(message))) == _plain(message)


def test_all_kinds_of_messages_are_tried() -> None:
    assert {type(message) for message in MESSAGES} == set(m.Message.__args__)


def _refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        m.decode(frame)


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error(garbage: bytes) -> None:
    _decode_or_refuse(garbage)
    _decode_or_refuse(FRAMES[0][:1] + garbage)


@settings(max_examples=300)
@given(st.sampled_from(FRAMES), st.data())
def test_a_damaged_frame_is_refused_or_another_valid_message(frame: bytes, data: st.DataObject) -> None:
    damaged = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    _decode_or_refuse(bytes(damaged))
    _decode_or_refuse(frame[: data.draw(st.integers(0, len(frame) - 1))])


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.integers(0, 9) | st.text(), inner, max_size=3),
    max_leaves=20,
)


@given(st.integers(0, 30), st.lists(JSON_LIKE, max_size=4))
def test_wrong_values_are_a_protocol_error(tag: int, values: list[object]) -> None:
    _decode_or_refuse(FRAMES[0][:1] + msgpack.packb([tag, *values]))


def _decode_or_refuse(frame: bytes) -> None:
    """Any exception but ProtocolError fails the test; what is accepted must be encodable again."""
    try:
        message = m.decode(frame)
    except ProtocolError:
        return
    m.encode(message)


def _with_body(body: object) -> bytes:
    return FRAMES[0][:1] + msgpack.packb(body)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x01" + FRAMES[0][1:],  # another version
        FRAMES[0] + b"\x00",  # trailing bytes
        _with_body([99]),  # unknown tag
        _with_body([True, 1]),  # a bool is no tag
        _with_body([1]),  # a field is missing
        _with_body([1, 5, 6]),  # one too many
        _with_body([1, "5"]),  # wrong type
        _with_body([1, True]),  # a bool is no number
        _with_body([7, [1], []]),  # handles without outputs
        _with_body({"tag": 1}),
        _with_body([1, [[[[]]]] * 3]),
        FRAMES[0][:1] + b"\x91" * 5000 + b"\x01",  # deeper than any parser should follow
    ],
    ids=repr,
)
def test_malformed_frames_are_refused(frame: bytes) -> None:
    _refused(frame)


def test_the_error_names_the_field() -> None:
    values = codec_of(m.Submit).encode(m.Submit(1, REQUEST))  # type: ignore[misc]
    values[1][1] = b"123"  # not a whole number of i32
    with pytest.raises(ProtocolError, match=r"Submit\.request: Request\.prompt_token_ids: expected the bytes of int32"):
        m.decode(_with_body([2, *values]))


def test_a_value_its_own_constructor_refuses_is_refused() -> None:
    values = codec_of(m.Submit).encode(m.Submit(1, REQUEST))  # type: ignore[misc]
    values[1][2][1] = -1.0
    with pytest.raises(ProtocolError, match="temperature"):
        m.decode(_with_body([2, *values]))


@pytest.mark.parametrize(
    "request_",
    [
        dataclasses.replace(REQUEST, max_tokens=1 << 70),
        dataclasses.replace(REQUEST, max_tokens=np.int64(3)),  # type: ignore[arg-type]
        dataclasses.replace(REQUEST, prompt_token_ids=np.array([1, 2])),
        dataclasses.replace(REQUEST, prompt_token_ids=np.zeros((2, 2), np.int32)),
        dataclasses.replace(REQUEST, cache_salt="\ud800"),
    ],
    ids=["beyond 64 bits", "numpy scalar", "int64 array", "two dimensions", "lone surrogate"],
)
def test_what_has_no_wire_form_is_refused_by_the_sender(request_: Request) -> None:
    with pytest.raises(ProtocolError):
        m.encode(m.Submit(1, request_))


@pytest.mark.parametrize(
    "error",
    [
        errors.BadRequest("max_tokens: no", param="max_tokens", code="c"),
        errors.Overloaded("full", retry_after_s=9),
        errors.Unavailable("down"),
        errors.InternalError("ours"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_keep_class_text_and_field(error: errors.FdsdError) -> None:
    message = m.decode(m.encode(m.Rejected(1, m.WireError.of(error))))
    assert isinstance(message, m.Rejected)
    back = message.error.to_exception()
    assert type(back) is type(error)
    assert (back.message, back.param, back.code) == (error.message, error.param, error.code)
    assert getattr(back, "retry_after_s", None) == getattr(error, "retry_after_s", None)


def test_an_error_class_without_a_wire_name_travels_as_its_base() -> None:
    assert m.WireError.of(errors.CheckpointError("x")).kind == "ConfigError"
    assert m.WireError.of(ProtocolError("x")).kind == "InternalError"
    assert type(m.WireError("Unheard", "x").to_exception()) is errors.InternalError


def test_arrays_are_known_where_numpy_writes_their_type_as_an_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NumPy 2.5 does, which Python 3.11 has not."""
    scalar = TypeVar("scalar", bound=np.generic)
    alias: Any = TypeAliasType("alias", np.ndarray[Any, np.dtype[scalar]], type_params=(scalar,))  # type: ignore[arg-type]
    monkeypatch.setattr(npt, "NDArray", alias)
    codec = codec_of(alias[np.int32])
    assert codec.encode is not None
    np.testing.assert_array_equal(codec.decode(codec.encode(np.arange(3, dtype=np.int32))), [0, 1, 2])
    with pytest.raises(ProtocolError):
        codec.decode(b"123")


def test_a_hint_without_a_wire_form_is_found_when_the_codec_is_made() -> None:
    with pytest.raises(TypeError, match="no wire form"):
        codec_of(complex)


def test_a_request_at_every_limit_fits_into_a_frame() -> None:
    info = ModelInfo("m", 200_000, 5000, (), 16, 512)
    text = "\U0001f600"  # four bytes
    sampling = SamplingParams(
        stop=tuple([text * MAX_STOP_CHARS] * MAX_STOP_STRINGS),
        bad_words=tuple([text * MAX_BAD_WORD_CHARS] * MAX_BAD_WORDS),
        stop_token_ids=tuple(range(199_000, 199_000 + MAX_STOP_TOKEN_IDS)),
        logit_bias={199_999 - i: 99.9 for i in range(MAX_LOGIT_BIAS)},
        logprobs=MAX_LOGPROBS,
    )
    request = Request(
        text * MAX_ID_CHARS,
        np.full(4000, 199_999, np.int32),
        sampling,
        max_tokens=1000,
        seed=SEED_LIMIT - 1,
        eos_token_ids=tuple(range(199_999 - MAX_EOS_TOKEN_IDS, 199_999)),
        bad_words_token_ids=tuple([(199_999,)] * MAX_BAD_WORD_TOKENS),
        priority=-(1 << 31),
        arrival_time=1e9 + 0.1,
        cache_salt=text * MAX_SALT_CHARS,
        speculation=Speculation(True, "x" * 10, 1 << 20, MAX_LOGPROBS),
        grammar=text * MAX_GRAMMAR_CHARS,
        prediction_token_ids=np.full(info.max_model_len, info.vocab_size - 1, np.int32),
    )
    RequestRules(info.vocab_size, info.max_model_len).verify(request)
    limit = m.max_frame_bytes(info)
    assert 0.9 * limit < len(m.encode(m.Submit((1 << 63) - 1, request))) <= limit
    assert m.max_frame_bytes(dataclasses.replace(info, max_model_len=50_000)) - limit == 45_000 * 2 * 5


@pytest.mark.parametrize("handle", [0, 1, 127, 128, 255, 1 << 20, (1 << 63) - 1])
def test_the_handle_of_a_submission_is_read_alone(handle: int) -> None:
    assert m.handle_of_submit(m.encode(m.Submit(handle, REQUEST))) == handle


@pytest.mark.parametrize("message", [m.Abort((1, 2)), m.ClientHello(7), m.ClientDisconnect(), m.StatsRequest(3)])
def test_other_frames_are_no_submissions(message: m.Message) -> None:
    assert m.handle_of_submit(m.encode(message)) is None


def test_broken_submissions_have_no_handle_or_are_refused_when_read() -> None:
    whole = m.encode(m.Submit(300, REQUEST))
    for length in range(len(whole)):
        frame = whole[:length]
        assert m.handle_of_submit(frame) in (None, 300)
        with pytest.raises(ProtocolError):
            m.decode(frame)


@pytest.mark.parametrize("pid", [0, -1, 1 << 31, (1 << 63) - 1])
def test_a_process_id_that_no_process_has_is_refused(pid: int) -> None:
    with pytest.raises(ProtocolError, match="process id"):
        m.decode(_with_body([1, pid]))


@pytest.mark.parametrize("reason", ["length", "error", "no"])
def test_a_request_cannot_be_aborted_for_any_reason(reason: str) -> None:
    assert m.decode(_with_body([3, [1], "stop"])) == m.Abort((1,), FinishReason.STOP)
    with pytest.raises(ProtocolError):
        m.decode(_with_body([3, [1], reason]))
