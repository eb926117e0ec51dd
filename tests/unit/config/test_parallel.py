"""The options of several ranks."""

from __future__ import annotations

import pytest

from fastdeploy_sd.config import from_json, load_config, to_json
from fastdeploy_sd.config.addresses import is_bindable
from fastdeploy_sd.engine.ipc.engine_process import engine_config
from fastdeploy_sd.errors import ConfigError


@pytest.mark.parametrize("flags", ["--tensor-parallel-size 4", "-tp 4", "--tp-size=4", "--tensor_parallel_size=4"])
def test_every_spelling_of_the_number_of_ranks(model: str, flags: str) -> None:
    config = load_config(["--model", model, *flags.split()])
    assert config.parallel.tensor_parallel_size == 4
    assert from_json(to_json(config)).parallel == config.parallel


@pytest.mark.parametrize("flags", ["--data-parallel-size 4", "-dp 4", "-dp=4", "--data_parallel_size=4"])
def test_every_spelling_of_the_number_of_engines(model: str, flags: str) -> None:
    config = load_config(["--model", model, *flags.split()])
    assert config.parallel.data_parallel_size == config.parallel.num_local_engines == 4
    assert from_json(to_json(config)).parallel == config.parallel


def test_a_command_that_starts_one_of_the_engines(model: str) -> None:
    config = load_config(["--model", model, "-dp", "4", "--local-data-parallel-id", "3"])
    assert config.parallel.num_local_engines == 1


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("-dp 0", "data_parallel_size: expected an integer in 1..64, got '0'"),
        ("-dp 65", "data_parallel_size: expected an integer in 1..64, got '65'"),
        (
            "-dp 2 --local-data-parallel-id 2",
            "local_data_parallel_id: expected a number up to 1, as data_parallel_size is 2, got 2",
        ),
        ("--local-data-parallel-id -1", "local_data_parallel_id: expected an integer of at least 0, or none, got '-1'"),
        (
            "-dp 2 -tp 2 --ips 127.0.0.1,127.0.0.2",
            "data_parallel_size: expected 1 together with ips, unless enable_expert_parallel, got 2",
        ),
        (
            "-dp 3 --ips 127.0.0.1,127.0.0.2 --enable-expert-parallel",
            "ips: expected as many as divide data_parallel_size (3), got 2",
        ),
        (
            "-tp 2 --ips 127.0.0.1,127.0.0.2 --enable-expert-parallel --node-port 65534",
            "node_port: expected at most 65533, as experts take the ports above it, got 65534",
        ),
        ("-tp 3", "tensor_parallel_size: expected one of 1, 2, 4, got '3'"),
        ("-tp two", "tensor_parallel_size: expected one of 1, 2, 4, got 'two'"),
        ("--timeout-rank 0", "timeout_rank: expected a number of at least 0.1, got '0'"),
        (
            "-tp 4 --ips 127.0.0.1,127.0.0.2,127.0.0.3",
            "ips: expected as many as divide tensor_parallel_size (4), got 3",
        ),
        ("--ips 127.0.0.1,127.0.0.2", "ips: expected as many as divide tensor_parallel_size (1), got 2"),
        ("-tp 2 --ips 127.0.0.1,127.0.0.1", "ips: expected every address once, got 127.0.0.1,127.0.0.1"),
        ("-tp 2 --ips ::1,0:0::1", "ips: expected every address once, got ::1,0:0::1"),
        ("-tp 2 --ips one,two", "ips: expected numeric addresses, got 'one'"),
        ("-tp 2 --ips 127.0.0.1,0.0.0.0", "ips: expected addresses of one host each, got '0.0.0.0'"),
        ("-tp 2 --ips 127.0.0.1,10.0.0.1", "ips: expected addresses that all hosts can reach, got 127.0.0.1,10.0.0.1"),
        ("-tp 2 --ips 10.0.0.1,10.0.0.2", "ips: expected loopback addresses when pd_secret is not set, got others"),
        ("--node-rank 1", "node_rank: expected a number up to 0, as ips has 0, got 1"),
        ("-tp 2 --ips 127.0.0.1,127.0.0.2 --node-rank 2", "node_rank: expected a number up to 1, as ips has 2, got 2"),
        (
            "-tp 2 --ips 127.0.0.1,127.0.0.2 --node-port 65535",
            "node_port: expected an integer in 1..65534, got",
        ),
        ("-tp 2 --ips 127.0.0.1,127.0.0.2 --swap-space 1", "ips: expected none with swap_space or splitwise_role"),
        ("-tp 2 --ips 127.0.0.1,127.0.0.2 --splitwise-role decode", "ips: expected none with swap_space or"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused(model: str, flags: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["--model", model, *flags.split()])
    assert caught.value.message.startswith(text)


def test_a_host_finds_its_place_by_its_addresses(model: str) -> None:
    """No machine has an address of 203.0.113.0/24."""

    def own_node(*flags: str) -> int:
        return load_config(["--model", model, "-tp", "2", "--pd-secret", "s" * 16, *flags]).parallel.own_node()

    assert own_node() == 0
    with pytest.raises(ConfigError, match=r"node_rank: expected one of .* to be this host's address, got none"):
        own_node("--ips", "203.0.113.1,203.0.113.2")
    assert own_node("--ips", "203.0.113.1,203.0.113.2", "--node-rank", "1") == 1
    with pytest.raises(ConfigError, match="got 2 of them: say which"):
        own_node("--ips", "127.0.0.1,127.0.0.2")


def test_engines_of_several_hosts_are_laid_over_them_in_order(model: str) -> None:
    """So are those of several commands, which have ports of their own."""
    flags = ["--model", model, "-dp", "4", "-tp", "2", "--enable-expert-parallel", "--node-port", "7000"]
    config = load_config([*flags, "--ips", "127.0.0.1,127.0.0.2", "--node-rank", "1"])
    parallel = config.parallel
    assert (parallel.num_nodes, parallel.ranks_per_node, parallel.own_node()) == (1, 2, 0)
    assert (parallel.first_engine, parallel.num_local_engines) == (2, 2)
    assert parallel.expert_places == (("127.0.0.1", 7002), ("127.0.0.2", 7002))
    assert parallel.own_expert_place() == 1
    [own, _] = [engine_config(config, number).parallel for number in range(2)]
    assert (own.local_data_parallel_id, own.first_rank) == (2, 4)
    parallel = load_config([*flags, "--ips", "127.0.0.1,127.0.0.2", "--local-data-parallel-id", "3"]).parallel
    assert parallel.expert_places == tuple((f"127.0.0.{i}", port) for i in (1, 2) for port in (7002, 7003))
    assert (parallel.own_expert_place(), parallel.num_local_engines, parallel.first_engine) == (3, 1, 3)
    assert len(load_config([*flags, "--local-data-parallel-id", "1"]).parallel.expert_places) == 4
    assert len(load_config(flags).parallel.expert_places) == 1


def test_is_bindable_knows_the_addresses_of_this_machine() -> None:
    assert is_bindable("127.0.0.2")
    assert not is_bindable("203.0.113.1")


def test_an_engine_of_several_ranks_has_time_to_tell_which_one_hangs(model: str) -> None:
    flags = ["--model", model, "--timeout-rank", "60"]
    assert load_config(flags).engine_timeout_s == 30
    assert load_config([*flags, "-tp", "2"]).engine_timeout_s == 120
