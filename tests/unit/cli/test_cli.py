"""The fastdeploy-sd command against a small HTTP server that records what it is asked."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_sd import __version__
from fastdeploy_sd.cli import COMMANDS, inspection, main
from fastdeploy_sd.cli.inspection import environment, isa_level, machine_speed
from fastdeploy_sd.device import library
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.ops.roofline import Roofline

pytestmark = pytest.mark.slow


@dataclass
class Peer:
    """A server that answers every POST with `events` as SSE, or with `error`."""

    url: str = ""
    events: list[str] = field(default_factory=list)
    error: tuple[int, str] | None = None
    requests: list[tuple[str, str | None, dict[str, Any]]] = field(default_factory=list)


@pytest.fixture
def peer() -> Iterator[Peer]:
    state = Peer()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._reply(200, json.dumps({"data": [{"id": "first"}, {"id": "second"}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.requests.append((self.path, self.headers["Authorization"], body))
            if state.error is not None:
                self._reply(*state.error)
            else:
                self._reply(200, "".join(f"data: {event}\n\n" for event in state.events))

        def _reply(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()


def deltas(*texts: str) -> list[str]:
    head = json.dumps({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
    usage = json.dumps({"choices": [], "usage": {"total_tokens": 1}})
    pieces = [json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}) for text in texts]
    return [head, *pieces, usage, "[DONE]"]


def test_a_message_is_answered_by_the_first_model(peer: Peer, capsys: pytest.CaptureFixture[str]) -> None:
    peer.events = deltas("Hel", "lo")
    code = main(["chat", "Hi", "--url", peer.url, "--api-key", "k", "--system", "Be brief", "--temperature", "0"])
    assert (code, capsys.readouterr().out) == (0, "Hello\n")
    (path, authorization, body) = peer.requests[0]
    assert (path, authorization) == ("/v1/chat/completions", "Bearer k")
    assert body == {
        "model": "first",
        "stream": True,
        "temperature": 0.0,
        "messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}],
    }


def test_a_conversation_keeps_its_history(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    peer.events = deltas("yes")
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    assert main(["chat", "--url", peer.url, "--model", "m"]) == 0
    said = [(m["role"], m["content"]) for m in peer.requests[-1][2]["messages"]]
    assert said == [("user", "one"), ("assistant", "yes"), ("user", "two")]


def test_complete_reads_standard_input(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.events = [json.dumps({"choices": [{"index": 0, "text": "b c"}]}), "[DONE]"]
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
    assert main(["complete", "-", "--url", peer.url, "--model", "m", "--max-tokens", "3", "--seed", "7"]) == 0
    assert capsys.readouterr().out == "b c\n"
    assert peer.requests == [
        ("/v1/completions", None, {"model": "m", "prompt": "a\n", "max_tokens": 3, "seed": 7, "stream": True})
    ]


@pytest.mark.parametrize(
    ("error", "events", "text"),
    [
        ((400, '{"error": {"message": "top_p: expected less"}}'), [], "server: 400: top_p: expected less"),
        ((502, "<html>bad gateway"), [], "server: 502: <html>bad gateway"),
        (None, ['{"error": {"message": "the engine is down"}}', "[DONE]"], "server: the engine is down"),
        (None, deltas("cut")[:-1], "server: expected the answer's end, got a closed connection"),
    ],
)
def test_a_failed_answer_is_one_line_and_exit_code_1(
    peer: Peer, capsys: pytest.CaptureFixture[str], error: tuple[int, str] | None, events: list[str], text: str
) -> None:
    peer.error, peer.events = error, events
    assert main(["chat", "Hi", "--url", peer.url, "--model", "m"]) == 1
    assert capsys.readouterr().err == f"error: {text}\n"


@pytest.mark.parametrize("parts", [["--port", "{port}"], ["--host", "127.0.0.1", "--port", "{port}"]])
def test_host_and_port_are_those_of_serve(peer: Peer, capsys: pytest.CaptureFixture[str], parts: list[str]) -> None:
    peer.events = deltas("yes")
    port = peer.url.rpartition(":")[2]
    assert main(["chat", "Hi", *(part.format(port=port) for part in parts)]) == 0
    assert capsys.readouterr().out == "yes\n"
    assert main(["chat", "Hi", "--url", peer.url, "--port", port]) == 2
    assert capsys.readouterr().err == "error: url: expected without host and port, got both\n"


def test_a_terminal_is_told_the_speed(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = json.dumps({"choices": [], "usage": {"completion_tokens": 7}})
    peer.events = [*deltas("a", "b")[:-1], usage, "[DONE]"]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["chat", "Hi", "--url", peer.url]) == 0
    shown = capsys.readouterr()
    assert shown.out == "ab\n"
    assert re.fullmatch(r"\[7 tokens, [\d.]+ tokens/s, first text after [\d.]+ s\]\n", shown.err)
    assert peer.requests[0][2]["stream_options"] == {"include_usage": True}


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.events = deltas("one", "two")
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
    real, num_written = sys.stdout.write, 0

    def write(text: str) -> int:
        nonlocal num_written
        num_written += text == "two"
        if text == "two" and num_written == 1:
            raise KeyboardInterrupt
        return real(text)

    monkeypatch.setattr(sys.stdout, "write", write)
    assert main(["chat", "--url", peer.url, "--model", "m"]) == 0
    said = [(m["role"], m["content"]) for m in peer.requests[-1][2]["messages"]]
    assert said == [("user", "a"), ("assistant", "one"), ("user", "b")]
    assert capsys.readouterr().err == "\n[stopped]\n"


def test_ctrl_c_in_a_single_answer_ends_the_command(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.events = deltas("one")

    def interrupt(_: str) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.stdout, "write", interrupt)
    assert main(["complete", "x", "--url", peer.url, "--model", "m"]) == 130
    assert capsys.readouterr().err == "\n[stopped]\n"


def test_no_server_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "x", "--url", "http://127.0.0.1:1"]) == 1
    assert "url: expected a running server, got " in capsys.readouterr().err


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "nonsense", "ftp://host"])
def test_a_url_that_is_none_is_an_error(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert main(["complete", "x", "--url", url]) == 2
    assert f"url: expected an http:// or https:// URL, got {url!r}" in capsys.readouterr().err


def test_unknown_command_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serv"]) == 2
    assert capsys.readouterr().err.endswith("got 'serv' (did you mean 'serve'?)\n")


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
    for name in ("--version", "version"):
        assert main([name]) == 0
        assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("command", ["serve", "chat", "complete", "replay", "verify", "explain-config", "collect-env"])
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: fastdeploy-sd {command}" in capsys.readouterr().out


@pytest.mark.parametrize("argument", ["--help", "--no-such-option"])
def test_a_server_that_does_not_start_loads_nothing_for_it(argument: str) -> None:
    code = "import sys; from fastdeploy_sd.cli import main\ntry: main(sys.argv[1:])\n"
    code += "finally: print(*sys.modules.keys() & {'fastapi', 'uvicorn', 'llguidance', 'paddle'})"
    done = subprocess.run(
        [sys.executable, "-c", code, "serve", argument], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.splitlines()[-1] == ""
    assert "usage: fastdeploy-sd serve" in done.stdout or "no_such_option: unknown option" in done.stderr


def test_help_of_a_checkout_builds_and_installs_nothing(tmp_path: Path) -> None:
    script = tmp_path / "scripts" / "dev"
    script.parent.mkdir()
    shutil.copy(Path(__file__).resolve().parents[3] / "scripts" / "dev", script)
    for arguments in (["--help"], ["--port", "8001", "-h"]):
        done = subprocess.run([script, "serve", *arguments], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.startswith("usage: scripts/dev serve ")
    assert [path.name for path in tmp_path.iterdir()] == ["scripts"]


def test_code_of_a_checkpoint_is_refused_with_what_is_served(
    tmp_path: Path, golden_dir: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(golden_dir / "qwen3-tiny", tmp_path / "m")
    values = json.loads((folder / "config.json").read_text())
    values |= {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "modeling_own.py").write_text("raise SystemExit('this code has run')")
    assert main(["explain-config", str(folder), "--trust-remote-code"]) == 2
    assert "architectures: expected one of " in capsys.readouterr().err
    assert caplog.messages == [
        "trust_remote_code: accepted without effect: code of a checkpoint is never run; a model that needs its own is"
        " refused"
    ]


def test_explain_config_names_values_and_origins(
    tmp_path: Path, golden_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text("port: 1\nmax_num_seqs: 2\napi_key: hush\n")
    model = str(golden_dir / "qwen3-tiny")
    assert main(["explain-config", "--config", str(tmp_path / "c.yaml"), "--port", "9", "--model", model]) == 0
    text = capsys.readouterr().out
    rows = dict(line.split(maxsplit=1) for line in text.splitlines() if line)
    assert re.search(
        r"\n\nweights +\S.*\nKV cache +\d+ tokens in .*\nlongest request +\d+ tokens.*\ndrafting +up to \d+ by auto\n$",
        text,
    )
    assert rows["port"].split(maxsplit=1) == ["9", "command line"]
    assert rows["max_num_seqs"].split(maxsplit=1) == ["2", f"{tmp_path / 'c.yaml'}, line 2"]
    assert rows["block_size"].split() == ["64", "default"]
    assert rows["api_key"].startswith('"(hidden)"')


def test_a_bad_option_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain-config", "--model", "demo", "--prot", "1"]) == 2
    assert capsys.readouterr().err == "error: prot: unknown option (did you mean 'port'?) (command line)\n"


def test_every_fault_of_a_configuration_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain-config", "--modle", "demo", "--port", "x"]) == 2
    assert capsys.readouterr().err == (
        "error: 3 faults in the configuration\n"
        "  modle: unknown option (did you mean 'model'?) (command line)\n"
        "  port: expected an integer in 0..65535, got 'x' (command line)\n"
        "  model: expected a non-empty string, got nothing (--model)\n"
    )


@pytest.mark.parametrize("command", ["chat", "complete x", "replay x", "verify", "collect-env", "explain-config"])
def test_errors_of_every_command_start_alike(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([*command.split(), "--max-tokens", "x", "--seed"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_collect_env_prints_the_facts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "STREAM_BYTES", 4 << 20)
    assert main(["collect-env"]) == 0
    text = capsys.readouterr().out
    assert f"fastdeploy_sd:    {__version__}" in text
    assert all(f"{name}:" in text for name in environment())
    assert re.search(rf"^measured with: +{library.num_threads()} threads, level {library.isa()}$", text, re.MULTILINE)
    assert re.search(r"^memory read: +[\d.]+ GB/s$", text, re.MULTILINE)
    if library.isa() != "scalar":
        assert re.search(r"^peak: +\d+ bfloat16, \d+ wint8, \d+ wint4 GOP/s$", text, re.MULTILINE)
        assert re.search(r"^limits: +memory for steps of up to \d+ rows of bfloat16, .*prompts$", text, re.MULTILINE)


def test_a_speed_that_cannot_be_measured_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("kernel library: none")

    monkeypatch.setattr(inspection, "measure_roofline", refuse)
    assert set(machine_speed().values()) == {"not measured: kernel library: none"}
    monkeypatch.setattr(inspection, "measure_roofline", lambda *_: Roofline(0.0, {"wint8": 0.0}))
    speed = machine_speed()
    assert (speed["memory read"], speed["limits"]) == ("unknown", "unknown")


def test_isa_level_needs_every_flag() -> None:
    avx2 = {"avx2", "fma", "f16c"}
    avx512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16"}
    assert isa_level(avx2 | avx512 | {"amx_tile", "amx_int8", "amx_bf16"}) == "amx"
    assert isa_level(avx2 | avx512 | {"amx_tile", "amx_int8"}) == "avx512"
    assert isa_level(avx2 | avx512) == "avx512"
    assert isa_level(avx2 | avx512 - {"avx512_bf16"}) == "avx2"
    assert isa_level({"avx2", "fma"}) == "scalar"
