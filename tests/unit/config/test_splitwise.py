"""The options of prefill and decode on different instances."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fastdeploy_sd.config import SplitwiseConfig, config_from_kwargs, from_json, load_config, to_json
from fastdeploy_sd.disaggregation.transfer.settings import ConnectorSettings
from fastdeploy_sd.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "ports"),
    [
        ("7671,7672", (7671, 7672)),
        ("7671, 7672", (7671, 7672)),
        ([7671, "7672"], (7671, 7672)),
        (["7671,7672", "7673"], (7671, 7672, 7673)),
        (7671, (7671,)),
        ("none", ()),
        (None, ()),
    ],
)
def test_ports_are_a_number_a_text_or_a_list(model: str, written: object, ports: tuple[int, ...]) -> None:
    assert config_from_kwargs(model=model, rdma_comm_ports=written).splitwise.rdma_comm_ports == ports


@pytest.mark.parametrize(
    "flags", ["--cache-transfer-protocol rdma,ipc", "--cache-transfer-protocol rdma --cache-transfer-protocol ipc"]
)
def test_flags_may_be_repeated_or_have_commas(model: str, flags: str) -> None:
    config = load_config(["--model", model, *flags.split(), "--pd-comm-port", "2334"])
    assert config.splitwise.cache_transfer_protocol == ("rdma", "ipc")
    assert config.splitwise.pd_comm_port == (2334,)


def test_the_forms_of_fastdeploys_yaml_files(model: str, yaml_file: Callable[[str], str]) -> None:
    text = 'cache_transfer_protocol: "rdma,ipc"\nrdma_comm_ports: "7671,7672"\npd_comm_port: "2334"\n'
    config = load_config(["--model", model, "--config", yaml_file(text)])
    assert config.splitwise == SplitwiseConfig(
        cache_transfer_protocol=("rdma", "ipc"), rdma_comm_ports=(7671, 7672), pd_comm_port=(2334,)
    )


@pytest.mark.parametrize(
    ("written", "ports", "of_rdma"),
    [
        ("2334", [2334, 2335], [(2334,), (2335,)]),
        ("2334,2400", [2334, 2400], [(2334,), (2400,)]),
        ("none", [0, 0], [(), ()]),
    ],
)
def test_each_engine_has_ports_of_its_own(model: str, written: str, ports: list[int], of_rdma: object) -> None:
    options = {"pd_comm_port": written, "rdma_comm_ports": written, "pd_secret": "s" * 16, "data_parallel_size": 2}
    engines = [config_from_kwargs(model=model, local_data_parallel_id=number, **options) for number in range(2)]
    settings = [ConnectorSettings.of(config) for config in engines]
    assert [found.port for found in settings] == ports
    assert [found.rdma_ports for found in settings] == of_rdma


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"splitwise_role": "both"}, "splitwise_role: expected one of mixed, prefill, decode, got 'both'"),
        (
            {"cache_transfer_protocol": "ipc,rmda"},
            "cache_transfer_protocol: expected ipc, tcp, rdma, or a list of them, got 'ipc,rmda'",
        ),
        ({"cache_transfer_protocol": "none"}, "cache_transfer_protocol: expected at least one of ipc, tcp, rdma"),
        ({"cache_transfer_protocol": "ipc,ipc"}, "cache_transfer_protocol: expected everything once, got ipc,ipc"),
        (
            {"rdma_comm_ports": "0"},
            "rdma_comm_ports: expected an integer in 1..65535, or a list of them, or none, got '0'",
        ),
        ({"rdma_comm_ports": "7671,"}, "rdma_comm_ports: expected an integer in 1..65535, or a list of them, or none"),
        ({"rdma_comm_ports": [True]}, "rdma_comm_ports: expected an integer in 1..65535"),
        ({"pd_comm_port": "1,2"}, "pd_comm_port: expected one port for data_parallel_size 1, got 2"),
        (
            {"pd_comm_port": "1,2,3", "data_parallel_size": 2},
            "pd_comm_port: expected one port, or 2 for data_parallel_size 2, got 3",
        ),
        ({"pd_comm_port": "1,1", "data_parallel_size": 2}, "pd_comm_port: expected everything once, got 1,1"),
        (
            {"pd_comm_port": 65535, "data_parallel_size": 2},
            "pd_comm_port: expected at most 65534, as 2 engines take as many in a row, got 65535",
        ),
        (
            {"rdma_comm_ports": "1,2,3", "data_parallel_size": 2},
            "rdma_comm_ports: expected one port, or a multiple of 2 for data_parallel_size 2, got 3",
        ),
        ({"pd_timeout": 0}, "pd_timeout: expected a number in 0.1..3600, got 0"),
        ({"pd_secret": "hush-hush"}, "pd_secret: expected at least 16 characters, got fewer"),
    ],
)
def test_what_is_refused(model: str, options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_kwargs(model=model, **options)
    assert caught.value.message.startswith(text)
    assert "hush" not in caught.value.message


def test_what_nothing_reads_in_a_role_is_said(model: str, caplog: pytest.LogCaptureFixture) -> None:
    config_from_kwargs(model=model, pd_comm_port=2334, pd_timeout=5)
    assert caplog.messages == [
        "pd_comm_port: accepted without effect: it belongs to splitwise_role prefill",
        "pd_timeout: accepted without effect: it belongs to splitwise_role decode",
    ]


def test_a_process_hands_them_to_another(model: str) -> None:
    config = config_from_kwargs(model=model, rdma_comm_ports="1,2", pd_secret="s" * 16, pd_timeout=7)
    assert from_json(to_json(config, with_secrets=True)) == config
    assert "s" * 16 not in to_json(config) + repr(config)
