"""What goes between nodes: everything arrives as it was sent, and nothing else is taken."""

from __future__ import annotations

import pytest

from fastdeploy_sd.config import Config, ModelConfig
from fastdeploy_sd.distributed.node_identity import describe, mismatch
from fastdeploy_sd.distributed.node_messages import (
    Disconnect,
    Ended,
    FirstNodeHeartbeat,
    FromFirst,
    FromOther,
    Join,
    Kill,
    LinkBytes,
    NodeHeartbeat,
    NodeRefused,
    Start,
    decode_from_first,
    decode_from_other,
    encode,
)
from fastdeploy_sd.wire.codec import ProtocolError

pytestmark = pytest.mark.slow

OF_FIRST: list[FromFirst] = [
    NodeRefused("why"), Start("group"), FirstNodeHeartbeat(), Kill((2, 3)), Disconnect(""),
    LinkBytes(3, bytes(range(256))), LinkBytes(1, b""),
]  # fmt: skip
OF_OTHERS: list[FromOther] = [
    Join(1, {"version": "1"}),
    NodeHeartbeat(1.5, (2,)),
    Ended(1, "ended"),
    LinkBytes(255, b"\0"),
]


def test_messages_arrive_as_they_were_sent() -> None:
    assert [decode_from_first(encode(message)) for message in OF_FIRST] == OF_FIRST
    assert [decode_from_other(encode(message)) for message in OF_OTHERS] == OF_OTHERS


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (b"", "expected version 2, got an empty frame"),
        (b"\x01" + encode(FirstNodeHeartbeat())[1:], "expected version 2, got 01"),
        (b"\x02\x91\x63", r"a known message tag, got \[99\]"),
        (encode(Join(1, {})), "a known message tag, got"),
        (encode(Kill((1,)))[:-1], "not msgpack"),
        (b"\x02\x92\x04\xa1x", "Kill.ranks: expected a list, got 'x'"),
        (encode(LinkBytes(1, b""))[:-1], "not msgpack"),
        (b"\x80\x04\x95\x0d\x00", "expected version 2, got 80"),
    ],
)
def test_anything_else_is_refused(frame: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        decode_from_first(frame)


def test_what_differs_is_named() -> None:
    own = {"version": "1", "dtype": "bfloat16"}
    assert mismatch(own, dict(own)) is None
    assert mismatch(own, {**own, "dtype": "float32"}) == "dtype: expected bfloat16 as on node 0, got float32"
    assert mismatch(own, {"version": "1"}) == "dtype: expected bfloat16 as on node 0, got nothing"
    assert mismatch(own, {**own, "more": "1"}) == "more: expected nothing as on node 0, got 1"


def test_a_description_holds_what_ranks_compute_and_not_where_files_are() -> None:
    demo = describe(Config(ModelConfig("demo")))
    assert demo["dtype"] == '"bfloat16"'
    assert describe(Config(ModelConfig("demo", dtype="float32")))["dtype"] == '"float32"'
    assert demo == describe(Config(ModelConfig("demo", served_model_name=("other",), packed_weights_cache="folder")))
    assert not {"model", "node_rank", "pd_secret", "port"} & demo.keys()
