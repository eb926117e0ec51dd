"""A server for each of several engines, from FastDeploy's command line: its faults, its ports, and how all end."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from fastdeploy_sd.device.engine_cores import divided
from fastdeploy_sd.device.processors import read_cores
from fastdeploy_sd.entrypoints.openai.multi_api_server import main, read_servers
from fastdeploy_sd.errors import ConfigError
from tests.doubles.weight_pages import weight_pages

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0
SERVER = "--model demo --max-num-seqs 2 --num-threads 1 --speculative-config naive"


def test_each_server_has_one_engine_and_ports_of_its_own() -> None:
    line = f'--num-servers 2 --ports "1811,1822" --metrics-ports "3101,3201" --args {SERVER} --data-parallel-size 2'
    line += ' --engine-worker-queue-port "25611,25621"'
    configs = read_servers(shlex.split(line))
    assert [config.server.port for config in configs] == [1811, 1822]
    assert [config.server.metrics_port for config in configs] == [3101, 3201]
    assert [config.parallel.local_data_parallel_id for config in configs] == [0, 1]
    assert {config.parallel.data_parallel_size for config in configs} == {2}


def test_ports_have_defaults_and_engines_are_as_many_as_servers() -> None:
    first, second = read_servers(["--args", *shlex.split(SERVER)])
    assert (first.server.port, second.server.port) == (8000, 8002)
    assert first.server.metrics_port is None
    assert first.parallel.data_parallel_size == 2


@pytest.mark.parametrize(
    ("line", "texts"),
    [
        (
            f"--num-servers 3 --ports 1,2 --metrics-ports 3,4,x --prots 1 --args {SERVER} --port 5 --max-num-seq 4",
            (
                "metrics_ports: expected",
                "prots: unknown option (did you mean 'ports'?)",
                "ports: expected 3 with commas, as num_servers says, got 2",
                "port: expected none after --args",
                "max_num_seq: unknown option",
            ),
        ),
        (f"--ports 1,1 --args {SERVER}", ("ports, metrics_ports: expected every port once, got 1,1",)),
        (f"--ports 1,2 --metrics-ports 3,2 --args {SERVER}", ("expected every port once, got 1,2,3,2",)),
        (f"--args {SERVER} -dp 4", ("data_parallel_size: expected 2, as num_servers says, or none, got 4",)),
        (f"--num-servers 0 --args {SERVER}", ("num_servers: expected an integer in 1..64",)),
        (f"--controller-ports 1,2 --args {SERVER}", ("controller_ports: expected",)),
        ("--ports 1,2", ("model: expected",)),
    ],
)
def test_faults_come_together(line: str, texts: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_servers(line.split())
    assert all(text in caught.value.message for text in texts), caught.value.message
    assert main(line.split()) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_help_shows_the_options_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "--metrics-ports" in capsys.readouterr().out


def answer(url: str) -> str:
    """What a server makes of a prompt."""
    body = {"prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}
    text: str = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S).json()["choices"][0]["text"]
    return text


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Servers:
    """The command in a process of its own, and the lines that it prints."""

    def __init__(self, *arguments: str) -> None:
        module = "fastdeploy_sd.entrypoints.openai.multi_api_server"
        self.process = subprocess.Popen([sys.executable, "-m", module, *arguments], stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []

    def read_urls(self, count: int) -> dict[int, str]:
        """Wait until so many servers listen; return number -> address."""
        found = dict[int, str]()
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if served := re.search(r"server (\d+).* serving .* on (http://\S+)", line):
                found[int(served[1])] = served[2]
                if len(found) == count:
                    return found
        raise AssertionError(f"ended with {self.process.wait()}:\n{''.join(self.log)}")

    def engines(self) -> list[int]:
        """Process ids of the servers' engines."""
        below = [pid for server in children(self.process.pid) for pid in children(server)]
        return [pid for pid in below if "engine_process" in Path(f"/proc/{pid}/cmdline").read_text()]

    def wait(self) -> int:
        _, rest = self.process.communicate(timeout=TIMEOUT_S)
        self.log.append(rest)
        return self.process.returncode


@contextmanager
def running(*arguments: str) -> Iterator[Servers]:
    servers = Servers(*arguments)
    try:
        yield servers
    finally:
        servers.process.kill()
        servers.process.wait()
        assert servers.process.stderr is not None
        servers.process.stderr.close()


@pytest.mark.slow
def test_servers_answer_alike_and_a_signal_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_ENABLE_MULTI_API_SERVER", "1")
    with running("--num-servers", "2", "--ports", "0,0", "--args", *shlex.split(SERVER)) as servers:
        urls = servers.read_urls(2)
        assert answer(urls[0]) == answer(urls[1])
        pages = [weight_pages(pid) for pid in servers.engines()]
        assert len(pages) == 2
        assert 0 < sum(each.own_share for each in pages) <= 1.1 * min(each.resident for each in pages)
        servers.process.send_signal(signal.SIGTERM)
        assert servers.wait() == 0
    log = "".join(servers.log)
    for number in (0, 1):
        cores = divided(read_cores(Path("/"), os.sched_getaffinity(0)), 2)[number]
        assert re.search(rf"\bengine {number}\b.*runs on {re.escape(cores.describe())}\n", log)
    assert "FD_ENABLE_MULTI_API_SERVER" not in log


@pytest.mark.slow
def test_when_one_fails_the_others_stop() -> None:
    with running("--ports", "0,0", "--args", *shlex.split(SERVER)) as servers:
        urls = servers.read_urls(2)
        [pid] = [int(found[1]) for line in servers.log if (found := re.search(r"server 1 .*process (\d+)", line))]
        os.kill(pid, signal.SIGKILL)
        assert servers.wait() == 1
    assert "server 1 has ended (killed by SIGKILL): the others stop" in "".join(servers.log)
    with pytest.raises(httpx.ConnectError):
        answer(urls[0])


@pytest.mark.slow
def test_a_server_that_is_stopped_alone_ends_those_that_need_its_experts(golden_dir: Path) -> None:
    """Its engine runs its experts for a while longer, so that they may finish what they have."""
    options = f"--model {golden_dir / 'ernie4_5_moe-tiny'} --enable-expert-parallel --timeout-graceful-shutdown 1"
    with running("--ports", "0,0", "--args", *shlex.split(f"{SERVER} {options}")) as servers:
        urls = servers.read_urls(2)
        text = answer(urls[0])
        [pid] = [int(found[1]) for line in servers.log if (found := re.search(r"server 1 .*process (\d+)", line))]
        os.kill(pid, signal.SIGTERM)
        assert answer(urls[0]) == text
        assert servers.wait() == 0
    assert "server 1 has ended (exit status 0): the others stop" in "".join(servers.log)


@pytest.mark.slow
def test_a_port_that_is_taken_ends_all_while_they_load() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running("--ports", f"0,{port}", "--args", *shlex.split(SERVER), "--host", "127.0.0.1") as servers:
            assert servers.wait() == 2
    assert f"port: expected a free address, got 127.0.0.1:{port}" in "".join(servers.log)
