"""What `eplb_config` may say."""

from __future__ import annotations

import pytest

from fastdeploy_sd.config import config_from_kwargs, explain, from_json, to_json
from fastdeploy_sd.config.eplb import EplbConfig
from fastdeploy_sd.errors import ConfigError

SPREAD = {"model": "demo", "enable_expert_parallel": True, "data_parallel_size": 2}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, EplbConfig()),
        ({"redundant_experts_num": 4, "redundant_expert_dump_workload_interval": 60}, EplbConfig(4, 60)),
        ('{"num_redundant_experts": 4}', EplbConfig(4)),
        ({"moe_quant_type": "w4a8", "redundant_expert_api_user": ""}, EplbConfig()),
        ({"redundant_expert_api_user": "u"}, EplbConfig(redundant_expert_api_user="u")),
    ],
)
def test_keys_of_others_are_read(value: object, expected: EplbConfig) -> None:
    config = config_from_kwargs(**SPREAD, enable_eplb=True, eplb_config=value)
    assert config.parallel.eplb == expected
    assert from_json(to_json(config)).parallel == config.parallel


def test_a_password_is_told_only_where_it_is_needed() -> None:
    eplb = {"redundant_expert_api_user": "u", "redundant_expert_api_password": "hush"}
    config = config_from_kwargs(**SPREAD, enable_eplb=True, eplb_config=eplb)
    assert from_json(to_json(config, with_secrets=True)).parallel == config.parallel
    for text in (to_json(config), repr(config), repr(explain(config))):
        assert "'u'" in text.replace('"', "'")
        assert "hush" not in text
    assert "(hidden)" in repr(explain(config))


def test_one_rank_has_nothing_to_balance() -> None:
    assert config_from_kwargs(model="demo", enable_expert_parallel=True, enable_eplb=True).parallel.eplb is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"enable_eplb": True}, "enable_eplb: expected false without enable_expert_parallel, got true"),
        (SPREAD | {"eplb_config": {}}, "eplb_config: expected none without enable_eplb, got a map"),
        (SPREAD | {"enable_eplb": True, "eplb_config": "x"}, "eplb_config: expected a map, or none, got 'x'"),
        (
            SPREAD | {"enable_eplb": True, "eplb_config": {"redundant_experts_num": -1}},
            r"eplb_config.redundant_experts_num: expected an integer in 0..4096, got -1",
        ),
        (
            SPREAD | {"enable_eplb": True, "eplb_config": {"redundant_expert_num": 1}},
            r"eplb_config.redundant_expert_num: unknown key \(did you mean 'redundant_experts_num'\?\)",
        ),
        (
            SPREAD | {"enable_eplb": True, "eplb_config": {"step_interval": 3000}},
            "eplb_config.step_interval: 3000 is not supported yet .*redundant_expert_dump_workload_interval",
        ),
        (
            SPREAD | {"enable_eplb": True, "eplb_config": {"redundant_experts_num": 1, "num_redundant_experts": 1}},
            "num_redundant_experts: expected one of its names, got both",
        ),
        (
            SPREAD | {"enable_eplb": True, "eplb_config": {"redundant_expert_api_password": 4711}},
            "eplb_config.redundant_expert_api_password: expected a text, got int",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config_from_kwargs(**{"model": "demo"} | options)
