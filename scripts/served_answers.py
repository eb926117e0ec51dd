"""Servers, one after the other, that must answer the same, for gpu_check.py; and the end of processes."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import json
import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
GRACE_S = 5  # for what was killed to end
_PROMPTS = ("def add(a, b):\n    return a + b\n\ndef add(a, b):\n", "one two three four one two three")
_NUM_TOKENS = 64
_NUM_TOGETHER = 8
_TAIL, _MAX_LINES = 2000, 400
_READY = re.compile(r" serving .*?(http://\S+:\d+)")
_IDLE = re.compile(r'step_time_seconds_total\{[^}]*phase="idle"[^}]*\} (\S+)')
_SERVER = (sys.executable, "-m", "fastdeploy_sd.entrypoints.openai.api_server")


def serve_all(
    servers: Sequence[tuple[str, Sequence[str]]], limit_s: float, num_tokens: int = _NUM_TOKENS
) -> Mapping[str, Mapping[str, float]]:
    """Start servers, name and options, one after the other, and return the figures of each.

    These are the tokens per second of one request, and with _NUM_TOGETHER at once the part of the time in which the
    GPU had nothing to do between two steps.

    Raises:
        AssertionError: one answered something else than the first one.
        ValueError, OSError, http.client.HTTPException, KeyError: it did not start, or not answer with a completion.
    """
    end, figures, wanted = time.monotonic() + limit_s, dict[str, Mapping[str, float]](), None
    for name, options in servers:
        with _server(options, end) as url:
            begin = time.monotonic()
            answers = [_completion(url, prompt, num_tokens, end) for prompt in _PROMPTS]
            rate = len(_PROMPTS) * num_tokens / (time.monotonic() - begin)
            share = _idle_share(url, num_tokens, end)
            figures[name] = {"tokens_per_s": round(rate, 1), f"idle_share_of_{_NUM_TOGETHER}": round(share, 4)}
        wanted = wanted or answers
        assert answers == wanted, f"{name}: expected {wanted}, got {answers}"
    return figures


def load_one(options: Sequence[str], load: Sequence[str], limit_s: float) -> Mapping[str, Any]:
    """Start a server and return the figures of `bench http` with these options against it.

    Raises:
        ValueError, OSError, subprocess.SubprocessError: it did not start, or a request failed.
    """
    end = time.monotonic() + limit_s
    with _server(options, end) as url:
        command = (sys.executable, "-m", "benchmarks", "http", "--url", url, "--json", *load)
        with child(command, end, stdout=subprocess.PIPE) as process:
            text, _ = process.communicate(timeout=max(end - time.monotonic(), 1) + GRACE_S)
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, command, output=text)
    metrics: Mapping[str, Any] = json.loads(text)["metrics"]
    return metrics


def _idle_share(url: str, num_tokens: int, end: float) -> float:
    """How much of the time in which requests run together the GPU waits for the host."""
    idle_s, begin = _idle_s(url, end), time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(_NUM_TOGETHER) as pool:
        for asked in [pool.submit(_completion, url, _PROMPTS[0], num_tokens, end) for _ in range(_NUM_TOGETHER)]:
            asked.result()
    return (_idle_s(url, end) - idle_s) / (time.monotonic() - begin)


def _idle_s(url: str, end: float) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=max(end - time.monotonic(), 1)) as response:
        found = _IDLE.search(response.read().decode())
    return float(found[1]) if found else 0.0


@contextlib.contextmanager
def _server(options: Sequence[str], end: float) -> Iterator[str]:
    said: collections.deque[str] = collections.deque(maxlen=_MAX_LINES)
    found: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    with child([*_SERVER, *options, "--port", "0"], end, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        threading.Thread(target=_drain, args=(process.stderr, said, found), daemon=True).start()
        try:
            url = _next(found, end)
            if url is None:
                raise ValueError("server: expected a line that says where it serves")
            yield url
        except Exception as error:
            error.add_note("".join(said)[-_TAIL:])
            raise
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)


def _drain(stream: IO[str], said: collections.deque[str], found: queue.SimpleQueue[str | None]) -> None:
    """Read all that a server says, or it would wait for a reader; put its address, and None at the end."""
    with stream:
        for line in stream:
            said.append(line)
            if match := _READY.search(line):
                found.put(match[1])
    found.put(None)


def _next(found: queue.SimpleQueue[str | None], end: float) -> str | None:
    try:
        return found.get(timeout=max(end - time.monotonic(), 0))
    except queue.Empty:
        return None


def _completion(url: str, prompt: str, num_tokens: int, end: float) -> str:
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=max(end - time.monotonic(), 1)) as response:
        return str(json.load(response)["choices"][0]["text"])


@contextlib.contextmanager
def child(
    command: Sequence[str], end: float, stdout: int | None = None, stderr: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A process that is killed, with all that it started, at the end of its stage and at that of the body."""
    options: dict[str, Any] = {"cwd": ROOT, "text": True, "errors": "replace", "start_new_session": True}
    process = subprocess.Popen(command, stdout=stdout, stderr=stderr, **options)
    timer = threading.Timer(max(end - time.monotonic(), 0), _kill_group, (process,))
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        _kill_group(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_S)


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
