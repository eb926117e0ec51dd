"""The options of sharing requests through Redis."""

from __future__ import annotations

import pytest

from fastdeploy_sd.config import RedisConfig, config_from_kwargs, from_json, load_config, to_json
from fastdeploy_sd.errors import ConfigError

FASTDEPLOYS = (
    "--scheduler-name splitwise --scheduler-host 10.0.0.7 --scheduler-port 6380 --scheduler-db 3 --scheduler-ttl 9000"
    " --scheduler-topic mtp --scheduler-password scheduler_mtp"
)


def test_fastdeploys_options_have_their_names_and_defaults(model: str, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(["--model", model, *FASTDEPLOYS.split()]).redis
    assert config == RedisConfig("splitwise", "10.0.0.7", 6380, 3, "scheduler_mtp", "mtp", 9000)
    assert config.is_shared
    want = RedisConfig("local", "127.0.0.1", 6379, 0, None, "default", 900, 5, 3000, 200, 200)
    assert RedisConfig() == want == load_config(["--model", model]).redis
    assert not want.is_shared
    assert not caplog.messages


def test_without_effect_is_said(model: str, caplog: pytest.LogCaptureFixture) -> None:
    load_config(["--model", model, "--scheduler-host", "redis", "--scheduler-port", "1", "--scheduler-name", "local"])
    assert caplog.messages == [
        "scheduler_host, scheduler_port: accepted without effect: it belongs to scheduler_name splitwise"
    ]
    caplog.clear()
    load_config(["--model", model, *FASTDEPLOYS.split(), "--scheduler-reader-parallel", "8"])
    assert [line.partition(":")[0] for line in caplog.messages] == ["scheduler_reader_parallel"]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("scheduler_name", "global", "expected one of local, splitwise, got 'global': splitwise shares the requests"),
        ("scheduler_name", "dp", "expected one of local, splitwise, got 'dp': there is no data parallelism within a"),
        ("scheduler_port", 0, "expected an integer in 1..65535, got 0"),
        ("scheduler_port", "x", "expected an integer in 1..65535, got 'x'"),
        ("scheduler_db", -1, "expected an integer of at least 0, got -1"),
        ("scheduler_expire_period", 10, "expected an integer in 300..600000, got 10"),
        ("scheduler_topic", "a b", "expected 1 to 64 letters, digits and . _ : -, got 'a b'"),
        ("scheduler_topic", "a" * 65, "expected 1 to 64 letters"),
    ],
)
def test_a_wrong_value_is_an_error(model: str, name: str, value: object, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_kwargs(model=model, **{name: value})
    assert caught.value.message.startswith(f"{name}: {text}")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"password": "a", "password_file": "b"}, "scheduler_password_file: expected none with scheduler_password"),
        ({"tls_ca_file": "a"}, "scheduler_tls_ca_file: expected none without scheduler_tls, got one"),
        ({"tls": True, "tls_key_file": "a"}, "scheduler_tls_key_file: expected one with scheduler_tls_cert_file only"),
    ],
)
def test_what_belongs_together(model: str, options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_kwargs(model=model, **{f"scheduler_{name}": value for name, value in options.items()})
    assert caught.value.message.startswith(text)


def test_a_password_is_not_repeated(model: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_kwargs(model=model, scheduler_password={"hush": 1})
    config = config_from_kwargs(model=model, scheduler_password="hush")
    assert "hush" not in caught.value.message + str(caplog.messages) + repr(config) + to_json(config)
    assert from_json(to_json(config, with_secrets=True)).redis.password == "hush"
