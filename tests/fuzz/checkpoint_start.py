"""One start per line of standard input, in this process: a worker of tests/fuzz/checkpoints.py.

Reads seeds, writes one JSON line per start: {"seed", "what", "outcome", "detail"}. An outcome is "served" (a request
was answered, or refused or failed alone), "refused" (one clear line), or "broken" (anything else).
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastdeploy_sd import LLM, SamplingParams
from fastdeploy_sd.errors import ConfigError, FdsdError
from fastdeploy_sd.worker.autotune import speed_limits
from tests.fuzz.checkpoint_mutations import write_mutant

# Of the address space, in which Paddle's libraries take most; no small model needs more than a part of it.
MAX_MEMORY_BYTES = 8 << 30
MAX_LINE = 800
_PARAMS = SamplingParams(max_tokens=3, temperature=0.7, seed=1)


def start(folder: Path, options: Mapping[str, Any]) -> tuple[str, str]:
    """Load a checkpoint as a server does, send requests, and return (outcome, detail)."""
    try:
        llm = LLM(
            model=str(folder), kv_cache_memory_gb=0.02, max_num_seqs=2, packed_weights_cache=str(folder / "packed"),
            num_threads=1, **options,
        )  # fmt: skip
    except ConfigError as error:
        is_clear = "\n" not in error.message and 0 < len(error.message) <= MAX_LINE
        return ("refused" if is_clear else "broken"), error.message[: 2 * MAX_LINE]
    with llm:
        answers = [_answer(llm, is_chat) for is_chat in (False, True)]
    return "served", "; ".join(answers)


def _answer(llm: LLM, is_chat: bool) -> str:
    """A request may be refused or fail: that is its own business. The model may not."""
    try:
        if is_chat:
            output = llm.chat([{"role": "user", "content": "hello"}], _PARAMS, use_tqdm=False)[0]
        else:
            output = llm.generate("hello", _PARAMS, use_tqdm=False)[0]
    except FdsdError as error:
        return f"{type(error).__name__}: {error.message[:100]}"
    return str(output.outputs[0].finish_reason)


def _options(seed: str, folder: Path) -> dict[str, Any]:
    """Draft layers are used where there are some; weights are packed in every format."""
    formats: list[dict[str, Any]] = [{"quantization": "wint8"}, {"quantization": "wint4"}, {"dtype": "float32"}, {}, {}]
    drafts = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}} if (folder / "mtp").exists() else {}
    return random.Random(seed).choice(formats) | drafts


def run_seed(seed: str) -> dict[str, str]:
    """Make a mutant, start it, and return the line to write."""
    with tempfile.TemporaryDirectory(prefix="fdsd-mutant-") as name:
        folder = Path(name)
        os.environ["FDSD_CACHE_DIR"] = name  # where the JSON files of a GGUF file are written
        what = write_mutant(seed, folder)
        try:
            outcome, detail = start(folder, _options(seed, folder))
        except (Exception, RecursionError, MemoryError):
            outcome, detail = "broken", traceback.format_exc()[-3000:]
    return {"seed": seed, "what": what, "outcome": outcome, "detail": detail.replace(name, "MUTANT")}


def main() -> None:
    """Limit the memory, then run seeds until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    speed_limits.STREAM_BYTES = 1 << 20  # as in the other tests: for a line in the log
    for line in sys.stdin:
        print(json.dumps(run_seed(line.strip())), flush=True)


if __name__ == "__main__":
    main()
