"""The scripts that deploy a server: their syntax, and one real life of a server under them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.doubles.ports import free_port, free_ports
from tests.doubles.redis_server import running_redis
from tests.server.node_process import IPS, SECRET

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "deploy"
TIMEOUT_S = 120


def run(script: str, *arguments: str, run_dir: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | settings | {"RUN_DIR": str(run_dir), "FDSD_PYTHON": sys.executable}
    command = [str(FOLDER / script), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_posix_shell(path: Path) -> None:
    assert subprocess.run(["sh", "-n", str(path)], check=False).returncode == 0
    assert os.access(path, os.X_OK)


def test_a_server_is_started_once_answers_and_is_stopped(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = ["demo", "--port", "0", "--num-threads", "1"]
    try:
        started = run("start.sh", *flags, run_dir=run_dir)
        assert started.returncode == 0, started.stderr
        url = started.stdout.strip()
        assert url == (run_dir / "url").read_text().strip()
        assert httpx.get(f"{url}/v1/models", timeout=TIMEOUT_S).json()["data"][0]["id"] == "demo"
        assert run("wait_healthy.sh", url, "1", run_dir=run_dir).returncode == 0
        pid = run("pid.sh", run_dir=run_dir).stdout.strip()
        again = run("start.sh", *flags, run_dir=run_dir)
        assert (again.returncode, again.stderr) == (
            2,
            f"start.sh: a server runs already: process {pid} of {run_dir}\n",
        )
        assert "loaded " in (run_dir / "log" / "engine.log").read_text()
    finally:
        stopped = run("stop.sh", run_dir=run_dir)
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert run("pid.sh", run_dir=run_dir).returncode == 1
    assert run("wait_healthy.sh", url, "1", run_dir=run_dir).returncode == 1
    assert not (run_dir / "server.pid").exists()


def test_a_router_is_started_before_its_instances(tmp_path: Path) -> None:
    settings = {"SERVER_MODULE": "fastdeploy_sd.cluster.router.launch", "START_TIMEOUT_S": "60"}
    started = run("start.sh", "--port", "0", run_dir=tmp_path, **settings)
    pid = int(run("pid.sh", run_dir=tmp_path).stdout)
    try:
        assert started.returncode == 0, started.stderr
        assert httpx.get(f"{started.stdout.strip()}/version", timeout=TIMEOUT_S).status_code == 200
    finally:
        os.kill(pid, signal.SIGKILL)
    while run("pid.sh", run_dir=tmp_path).returncode == 0:  # until the system has taken it away
        pass
    stopped = run("stop.sh", run_dir=tmp_path)
    assert (stopped.returncode, stopped.stderr) == (0, f"stop.sh: no server runs in {tmp_path}\n")


def test_two_hosts_are_started_each_and_stopped_by_the_first(tmp_path: Path) -> None:
    flags = ["demo", "--port", "0", "--num-threads", "1", "-tp", "2", "--ips", ",".join(IPS), "--pd-secret", SECRET]
    flags += ["--node-port", str(free_port()), "--timeout-rank", "60"]
    run_dirs = [tmp_path / "first", tmp_path / "second"]
    with ThreadPoolExecutor(1) as pool:
        try:
            second = pool.submit(run, "start.sh", *flags, "--node-rank", "1", run_dir=run_dirs[1])
            first = run("start.sh", *flags, "--node-rank", "0", run_dir=run_dirs[0])
            assert first.returncode == 0, first.stderr
            assert (second.result().returncode, second.result().stdout) == (0, "node 1 runs rank 1\n")
            body = {"prompt": "def add(a, b):", "max_tokens": 4}
            assert httpx.post(f"{first.stdout.strip()}/v1/completions", json=body, timeout=TIMEOUT_S).status_code == 200
            pid = int(run("pid.sh", run_dir=run_dirs[1]).stdout)
            fd = os.pidfd_open(pid)
        finally:
            assert run("stop.sh", run_dir=run_dirs[0]).returncode == 0
            ended = bool(select.select([fd], [], [], TIMEOUT_S)[0])
            os.close(fd)
            assert run("stop.sh", run_dir=run_dirs[1]).returncode == 0
        assert ended, "the second host goes on without the first"


def test_a_wrong_option_is_told_and_leaves_nothing_running(tmp_path: Path) -> None:
    started = run("start.sh", "demo", "--prot", "1", run_dir=tmp_path)
    assert (started.returncode, started.stdout) == (2, "")
    assert started.stderr == "error: prot: unknown option (did you mean 'port'?) (command line)\n"
    assert not (tmp_path / "server.pid").exists()
    assert "no server runs" in run("stop.sh", run_dir=tmp_path).stderr


def test_a_number_that_belongs_to_another_program_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            (tmp_path / "server.pid").write_text(f"{other.pid}\n")
            assert run("stop.sh", run_dir=tmp_path).returncode == 0
            assert other.poll() is None
        finally:
            other.kill()


def test_the_unit_starts_what_exists() -> None:
    unit = (FOLDER / "fastdeploy-sd.service").read_text()
    assert "/bin/fastdeploy-sd serve " in unit
    assert "RestartPreventExitStatus=2" in unit


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def command_lines() -> str:
    """Those of all processes."""
    texts = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            texts.append(path.read_bytes().decode(errors="replace"))
    return "\n".join(texts)


def deployment_ports() -> dict[str, int]:
    """What start_1p1d.sh is told."""
    names = ("PORT", "PREFILL_PORT", "DECODE_PORT", "REDIS_PORT")
    return dict(zip(names, free_ports(4), strict=True))


def test_instances_that_share_the_work_are_started_answer_and_are_stopped(tmp_path: Path) -> None:
    ports = deployment_ports()
    settings = {name: str(port) for name, port in ports.items()} | {"XDG_STATE_HOME": str(tmp_path / "a state")}
    run_dir = tmp_path / "a run"
    body = {"prompt": "def add(a, b):\n    return a + b\n" * 20, "max_tokens": 8, "temperature": 0}
    try:
        started = run("start_1p1d.sh", "demo", "--num-threads", "1", run_dir=run_dir, **settings)
        assert started.returncode == 0, started.stderr
        url = started.stdout.strip()
        assert url == f"http://127.0.0.1:{ports['PORT']}"
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S).json()
        decode = f"http://127.0.0.1:{ports['DECODE_PORT']}"
        metrics = httpx.get(f"{decode}/metrics", timeout=TIMEOUT_S).text
        assert 'supplied_kv_tokens_total{origin="prefill"}' in metrics
        assert 'kv_transfers_total{direction="received",protocol="ipc"} 1.0' in metrics
        prefill = f"http://127.0.0.1:{ports['PREFILL_PORT']}"
        same = httpx.post(f"{prefill}/v1/completions", json=body, timeout=TIMEOUT_S).json()
        assert same["choices"][0]["text"] == answer["choices"][0]["text"]
        password = run_dir / "redis" / "password"
        assert password.stat().st_mode & 0o777 == 0o600
        assert password.read_text().strip() not in command_lines()
        again = run("start_1p1d.sh", "demo", run_dir=run_dir, **settings)
        assert (again.returncode, again.stderr.split(":")[0]) == (2, "start_1p1d.sh")
    finally:
        stopped = run("stop_1p1d.sh", run_dir=run_dir, **settings)
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert not any(map(listens, ports.values()))
    assert [path.name for path in (run_dir / "redis").iterdir()] == ["console.log"]


def test_what_was_started_ends_with_what_could_not_be(tmp_path: Path) -> None:
    [port] = free_ports(1)
    failed = run("start_1p1d.sh", "demo", "--prot", "1", run_dir=tmp_path, REDIS_PORT=str(port))
    assert failed.returncode == 2
    assert "error: prot: unknown option" in failed.stderr
    assert not listens(port)
    assert list(tmp_path.rglob("*.pid")) == []


def test_a_redis_of_others_is_left_alone(tmp_path: Path) -> None:
    """It has no password, so it answers every client: neither its answer nor its port makes it ours."""
    run_dir = tmp_path / "run"
    with running_redis(tmp_path, password="") as other:
        other.do("SET", "precious", "data")
        settings = {"REDIS_PORT": str(other.port)}
        started = run("start_redis.sh", run_dir=run_dir, **settings)
        assert (started.returncode, started.stdout) == (2, "")
        assert f"start_redis.sh: port {other.port} of 127.0.0.1 belongs to another program" in started.stderr
        assert run("stop_redis.sh", run_dir=run_dir).returncode == 0
        # A folder that names it, as after its number or its port went from ours to it.
        (run_dir / "redis.conf").write_text(f"port {other.port}\nrequirepass secret\n")
        (run_dir / "password").write_text("secret\n")
        (run_dir / "server.pid").write_text(f"{other.do('INFO', 'server')['process_id']}\n")
        stopped = run("stop_redis.sh", run_dir=run_dir)
        assert (stopped.returncode, stopped.stderr.split("; ")[-1]) == (1, "it is left alone\n")
        assert other.do("GET", "precious") == b"data"


def test_a_redis_that_runs_is_not_started_again(tmp_path: Path) -> None:
    settings = {"REDIS_PORT": str(free_port())}
    try:
        assert run("start_redis.sh", run_dir=tmp_path, **settings).returncode == 0
        again = run("start_redis.sh", run_dir=tmp_path, **settings)
        pid = run("redis_pid.sh", run_dir=tmp_path).stdout.strip()
        assert (again.returncode, again.stderr) == (
            2,
            f"start_redis.sh: a Redis runs already: process {pid} of {tmp_path}\n",
        )
    finally:
        assert run("stop_redis.sh", run_dir=tmp_path).returncode == 0
    assert not listens(int(settings["REDIS_PORT"]))


@pytest.mark.parametrize("name", ["PORT", "DECODE_PORT"])
def test_a_port_in_use_is_told_before_anything_starts(tmp_path: Path, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        settings = {name: str(port) for name, port in deployment_ports().items()} | {name: str(port)}
        failed = run("start_1p1d.sh", "demo", run_dir=tmp_path, **settings)
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.startswith(f"start_1p1d.sh: {name}: expected a free port of 127.0.0.1, got {port}: ")
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def running_1p1d(run_dir: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    """run_1p1d.sh with servers of two engines, in a process group of its own, and its ports; nothing of it is left."""
    ports = deployment_ports()
    env = os.environ | {name: str(port) for name, port in ports.items()}
    env |= {"RUN_DIR": str(run_dir), "FDSD_PYTHON": sys.executable, "XDG_STATE_HOME": str(run_dir / "state")}
    command = [str(FOLDER / "run_1p1d.sh"), "demo", "--num-threads", "1", "--data-parallel-size", "2"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            yield process, ports
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
    assert not any(map(listens, ports.values()))
    assert list(run_dir.rglob("server.pid")) == []


def test_a_part_that_dies_ends_the_deployment(tmp_path: Path) -> None:
    with running_1p1d(tmp_path) as (process, ports):
        assert process.stdout is not None
        assert process.stdout.readline().strip() == f"http://127.0.0.1:{ports['PORT']}"
        os.kill(int((tmp_path / "decode" / "server.pid").read_text()), signal.SIGKILL)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 1
        assert "run_1p1d.sh: error: decode has ended, so all parts are stopped" in errors


def test_a_closed_terminal_ends_the_deployment(tmp_path: Path) -> None:
    """Also while it starts."""
    with running_1p1d(tmp_path) as (process, ports):
        while not listens(ports["REDIS_PORT"]):
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGHUP)
        process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0
