"""What an LLM script writes to the terminal: our lines in our form, and nothing of the framework's."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
from fastdeploy_sd import LLM, SamplingParams
llm = LLM("demo", num_gpu_blocks_override=64, speculative_config={"method": "ngram", "num_speculative_tokens": 2})
print("loaded", flush=True)
while len(sys.argv) > 1:
    llm.generate("x", SamplingParams(max_tokens=50, ignore_eos=True))
"""


def run(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_lines_are_those_of_a_server_and_tell_what_was_loaded() -> None:
    with run() as process:
        _, text = process.communicate(timeout=120)
    assert process.returncode == 0
    lines = text.splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO llm: ", line) for line in lines), text
    assert re.search(
        r"loaded .*demo_model in \d+\.\d s: weights of \d\.\d\d GB, 4096 tokens of bfloat16 KV cache,"
        r" requests of up to 4096 tokens, 2 drafts by ngram, \w+ kernels on \d+ threads$",
        lines[-2],
    )
    assert lines[-1].endswith("defaults of requests: OpenAI's")
    assert re.search(r"memory reads [\d.]+ GB/s, at most \d+ steps/s if no cache holds the weights; bfloat16 ", text)


def test_sigterm_just_ends_the_program() -> None:
    with run("generate") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loaded\n"
        process.send_signal(signal.SIGTERM)
        _, text = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGTERM
    assert "Traceback" not in text
    assert "FatalError" not in text


def test_a_programs_own_logging_and_handlers_stay() -> None:
    code = """
import logging, signal
logging.basicConfig(format="mine: %(message)s", level=logging.INFO)
signal.signal(signal.SIGTERM, lambda *_: print("ended by my handler"))
import fastdeploy_sd.worker.executor
logging.getLogger("fastdeploy_sd").info("a line")
assert logging.getLogger().level == logging.INFO
signal.raise_signal(signal.SIGTERM)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("ended by my handler\n", "mine: a line\n")
