"""A router's command line: FastDeploy's flags and ours, each fault with its name."""

from __future__ import annotations

import pytest

from fastdeploy_sd.cluster.router import launch
from fastdeploy_sd.cluster.router.options import OPTIONS, read_router_options
from fastdeploy_sd.errors import ConfigError

PROG = "route"


def test_without_flags_it_listens_on_this_machine_at_fastdeploys_port() -> None:
    config = read_router_options([], PROG)
    assert (config.server.host, config.server.port, config.routing.splitwise) == ("127.0.0.1", 9000, False)


def test_flags_of_fastdeploy_and_ours() -> None:
    argv = ["--host", "0.0.0.0", "--port=8080", "--splitwise", "--request-timeout-secs", "60"]
    argv += ["--pd-secret", "0123456789abcdef"]
    config = read_router_options([*argv, "--api_key", "a", "--api-key", "b"], PROG)
    assert (config.server.host, config.server.port, config.routing.splitwise) == ("0.0.0.0", 8080, True)
    assert config.routing.request_timeout_s == 60
    assert config.server.api_key == ("a", "b")
    assert config.splitwise.pd_secret == "0123456789abcdef"
    assert not read_router_options(["--no-splitwise"], PROG).routing.splitwise


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--prot", "1"], "prot: unknown option (did you mean 'port'?)"),
        (["--port", "x"], "port: expected an integer in 0..65535, got 'x'"),
        (["--port"], "port: expected an integer in 0..65535, got nothing"),
        (["model"], "expected a router's flags only"),
        (["--port", "1", "2"], "expected a router's flags only, got '2'"),
        (["--max-num-seqs", "4"], "max_num_seqs: unknown option"),
        (["--pd-secret", "short"], "pd_secret: expected at least 16 characters, got fewer"),
        (["--timeout-lost", "2", "--timeout-silent", "3"], "timeout_lost: expected at least timeout_silent (3), got 2"),
        (["--max-attempts", "0"], "max_attempts: expected an integer of at least 1, got '0'"),
    ],
)
def test_faults_name_the_option(argv: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_router_options(argv, PROG)
    assert text in caught.value.message


def test_all_faults_are_told_at_once_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--prot", "1", "--max-attempts", "0"]) == 2
    text = capsys.readouterr().err
    assert "2 faults" in text
    assert "prot" in text
    assert "max_attempts" in text


def test_a_secret_is_never_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--pd-secret", "secret"]) == 2
    assert launch.main(["--instance-api-key", ""]) == 2
    assert "'secret'" not in capsys.readouterr().err
    assert "0123456789abcdef" not in repr(read_router_options(["--pd-secret", "0123456789abcdef"], PROG))


def test_help_tells_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read_router_options(["--help"], PROG)
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert all(opt.flag in text for opt in OPTIONS)
    assert "default: 9000" in " ".join(text.split())
