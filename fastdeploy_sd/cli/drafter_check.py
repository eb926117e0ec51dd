"""`fastdeploy-sd drafter check`: what a drafter is, which reading of its files is right, and what it brings."""

from __future__ import annotations

import argparse
import logging
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from fastdeploy_sd.cli.arguments import Parser
from fastdeploy_sd.cli.new_folder import new_folder, verify_new
from fastdeploy_sd.cli.verify.methods import Method, standard_methods
from fastdeploy_sd.cli.verify.runs import open_engine, run
from fastdeploy_sd.cli.verify.variants import EngineVariant
from fastdeploy_sd.config import Config, demo_drafter, load_config, verify_offline
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.hub import located
from fastdeploy_sd.process.log_files import show_lines, worker_lines_from
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.chat_template import Message
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.tokenizer import load_tokenizer
from fastdeploy_sd.types import DraftCounts, Request, Speculation
from fastdeploy_sd.types.draft_methods import METHODS
from fastdeploy_sd.worker.loading.drafter_readings import DrafterReadings, Reading

_PROG = "fastdeploy-sd drafter check"
_QUESTIONS = (
    "Write a Python function that returns the n-th Fibonacci number, and explain its complexity.",
    "What causes the seasons on Earth? Answer in two paragraphs.",
    "List five ways to make a small kitchen feel larger.",
    "Translate into French: The library opens at nine, and it closes at six on weekdays.",
)
_PROMPT_TOKENS, _NUM_PROMPTS = 128, 4  # of a text
# A first draft that is right less often is no better than a guess.
_LEAST_ACCEPTANCE = 0.1
# Another reading is better if it leads by more than this many standard errors of the difference.
_CLEAR_ERRORS = 2.0


@dataclass(frozen=True, slots=True)
class _Result:
    """What a reading brought.

    Attributes:
        acceptance: by position, of drafts verified after right ones.
        tokens_per_step, error: of steps with drafts, and the standard error of it.
        speed, plain_speed: tokens per second with and without drafts, in turns.
    """

    reading: Reading
    acceptance: tuple[float, ...]
    tokens_per_step: float
    error: float
    speed: float
    plain_speed: float

    def line(self) -> str:
        """Return a row of the table."""
        acceptance = " ".join(f"{share:4.2f}" for share in self.acceptance)
        speed = f"{self.speed:.1f} ({self.speed / self.plain_speed:.2f}x)"
        per_step = f"{self.tokens_per_step:.2f} \u00b1 {self.error:.2f}"
        return f"| {self.reading.text} | {acceptance} | {per_step} | {speed} |"

    def is_clearly_better(self, other: _Result) -> bool:
        """Return whether the lead over another result is more than chance."""
        margin = _CLEAR_ERRORS * math.hypot(self.error, other.error)
        return self.tokens_per_step - other.tokens_per_step > margin


def main(argv: Sequence[str]) -> int:
    """Check a drafter and print what was found.

    Raises:
        ConfigError: an option is wrong, or no method runs the drafter.
        CheckpointError: a model or the drafter cannot be loaded.
    """
    args, engine_argv = _parser().parse_known_args(argv)
    given = load_config(engine_argv, _PROG)
    verify_offline(given)
    if args.output is not None:
        verify_new(args.output)
    show_lines("drafter")
    with worker_lines_from(logging.ERROR):
        base = located(given)
        readings = DrafterReadings(demo_drafter(str(args.folder)) or args.folder, base.model.path)
        methods = [method.name for method in METHODS.values() if method.needs_model]
        if readings.method not in methods:
            wanted = " or ".join(methods)
            raise ConfigError(f"folder: expected a drafter of {wanted}, got {readings.kind_text}", param="folder")
        print(f"{args.folder}: {readings.kind_text}, method {readings.method}\n")
        print("| Reading | Accepted, by position | Tokens per step | Tokens/s (to plain decoding) |\n|---|---|---|---|")
        checker = _Checker(base, readings, _requests(base, args.text, args.max_tokens), args.num_speculative_tokens)
        best = _search(checker, readings)
    _conclude(best, readings, args.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=_PROG,
        description="Say what a drafter's folder holds, run it with a model, and print how many drafts are accepted "
        "and what that brings. The same is done for other readings of its config.json where programs differ, one key "
        "after the other: rows of the layer before or after, norms, rotary base, what MTP layers read.",
        epilog="Every engine option is accepted too (--model, --quantization, --num-threads, ...). Requests run one at "
        "a time and greedily, in turns with and without drafts.",
    )
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="the drafter; the model's own folder for MTP layers in it"
    )
    text = "a file with UTF-8 text that is continued at several places (default: questions are answered)"
    parser.add_argument("--text", type=Path, metavar="FILE", help=text)
    text = "drafts per step (default: %(default)s)"
    parser.add_argument("--num-speculative-tokens", type=int, default=4, metavar="N", help=text)
    text = "tokens of each answer (default: %(default)s)"
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help=text)
    text = "write a copy of the drafter whose config.json says the reading that fits best"
    parser.add_argument("--output", type=Path, metavar="DIR", help=text)
    return parser


def _requests(config: Config, text: Path | None, max_tokens: int) -> list[Request]:
    if max_tokens < 1:
        raise ConfigError(f"max_tokens: expected at least 1, got {max_tokens}", param="max_tokens")
    encoder = PromptEncoder(load_tokenizer(*config.model.tokenizer_source))
    if text is not None:
        prompts = _cuts(encoder, text)
    elif encoder.tokenizer.files.chat_template is None:
        prompts = [encoder.encode_text(question) for question in _QUESTIONS]
    else:
        prompts = [encoder.encode_chat([Message("user", question)], {}) for question in _QUESTIONS]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return [Request(f"r{i}", np.array(prompt, np.int32), params, max_tokens, 0) for i, prompt in enumerate(prompts)]


def _cuts(encoder: PromptEncoder, path: Path) -> list[list[int]]:
    """Return parts of a text from all over it."""
    try:
        ids = encoder.encode_text(path.read_bytes().decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"text: expected a file with UTF-8 text, got {path}: {error}", param="text") from None
    if len(ids) < _PROMPT_TOKENS:
        raise ConfigError(f"text: expected at least {_PROMPT_TOKENS} tokens, got {len(ids)}", param="text")
    starts = np.linspace(0, len(ids) - _PROMPT_TOKENS, _NUM_PROMPTS, dtype=int).tolist()
    return [ids[start : start + _PROMPT_TOKENS] for start in dict.fromkeys(starts)]


class _Checker:
    """Runs requests with a reading and without drafts; prints a line of the table."""

    def __init__(self, base: Config, readings: DrafterReadings, requests: Sequence[Request], num_drafts: int) -> None:
        self._base, self._readings, self._requests = base, readings, requests
        self._num_drafts = num_drafts

    def check(self, reading: Reading) -> _Result:
        with tempfile.TemporaryDirectory() as folder:
            self._readings.write(reading, Path(folder))
            weights = replace(self._base.speculative, model=folder)
            [method] = standard_methods([self._readings.method], [self._num_drafts], weights)
            result = self._run(reading, method)
        print(result.line(), flush=True)
        return result

    def _run(self, reading: Reading, method: Method) -> _Result:
        way = EngineVariant("one request", max_num_seqs=1)
        seconds, num_tokens = {True: 0.0, False: 0.0}, {True: 0, False: 0}
        with open_engine(self._base, way, method) as engine:
            for request in tqdm(self._requests, desc=reading.text, unit="answer", leave=False, disable=None):
                for drafts in (True, False):
                    asked = replace(
                        request,
                        request_id=f"{request.request_id}{drafts}",
                        eos_token_ids=engine.model_info.eos_token_ids,
                        speculation=Speculation(drafts),
                    )
                    start = time.perf_counter()
                    [answer] = run(engine, [asked]).values()
                    seconds[drafts] += time.perf_counter() - start
                    num_tokens[drafts] += len(answer.token_ids)
            stats = engine.stats()
        counts = stats.verifications.get(self._readings.method, DraftCounts())
        acceptance = tuple(a / r for a, r in zip(counts.accepted, counts.reached, strict=True) if r)
        speed, plain = (num_tokens[drafts] / seconds[drafts] for drafts in (True, False))
        per_step = counts.num_emitted / counts.num_verifications if counts.num_verifications else 1.0
        return _Result(reading, acceptance, per_step, _standard_error(counts), speed, plain)


def _standard_error(counts: DraftCounts) -> float:
    """Return that of the tokens per step: steps of one text count as independent."""
    steps = counts.num_verifications
    if steps == 0:
        return 0.0
    mean = sum(counts.accepted) / steps
    square = sum((2 * i + 1) * count for i, count in enumerate(counts.accepted)) / steps
    return math.sqrt(max(square - mean * mean, 0.0) / steps)


def _search(checker: _Checker, readings: DrafterReadings) -> _Result:
    """Return the best reading: of each key in turn, the one that drafts best with those found before."""
    best = checker.check(readings.as_is)
    for key in readings.as_is.values:
        for other in [*readings.others(key, best.reading.values)]:
            result = checker.check(other)
            if result.is_clearly_better(best):
                best = result
    return best


def _conclude(best: _Result, readings: DrafterReadings, output: Path | None) -> None:
    print()
    changed = {k: v for k, v in best.reading.values.items() if v != readings.as_is.values[k]}
    if max(best.acceptance[:1], default=0.0) < _LEAST_ACCEPTANCE:
        print("No reading drafts better than guesses would: is the drafter for another model?")
    elif changed:
        print(f"Best: {', '.join(f'{key} = {value}' for key, value in changed.items())}, and not as config.json says.")
    else:
        print("No other reading is clearly better than that of config.json.")
    print(
        f"Clearly better is what has more tokens per step by over {_CLEAR_ERRORS:g} standard errors of the difference;"
        " more text (--max-tokens) tells smaller ones."
    )
    if output is not None:
        with new_folder(output, readings.num_bytes):
            readings.write(best.reading, output, copies=True)
        print(f"{output}: the drafter with this reading in its config.json")
