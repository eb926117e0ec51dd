"""`bench predictions`: what a predicted output brings beside drafting without one, on code and on free text.

Each prompt is answered once plainly, which is the answer. Then it is answered with what its client might predict, in
turns that follow each other at once, so that all ways see the same machine; processor time counts. No run knows what
another one's output was.
"""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean

import numpy as np

from benchmarks.command import Command, show, table_of
from benchmarks.engines import running_engine
from benchmarks.progress import Progress
from benchmarks.prompts import code_edits, make_prompts
from fastdeploy_sd.config import DEMO_MODEL, load_config
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.tokenizer import load_tokenizer
from fastdeploy_sd.types import EMPTY_I32, I32, DraftCounts, Request, Speculation

COLUMNS = {
    "Text": "{0.workload}",
    "Prediction": "{0.prediction}",
    "Speed / plain": "{0.speed_up:.2f}",
    "Speed / without": "{0.gain:.2f}",
    "Tokens / step": "{0.tokens_per_step:.2f}",
    "Predicted": "{0.num_predicted}",
    "of them right": "{0.num_right}",
}
_NAIVE, _NONE, _SOURCE = "plain", "none", "the text to be edited"
_EDIT = "code-edit"
_WORKLOADS = (_EDIT, "completion", "free-text")
_WRONG_EVERY = 24
_WORD = re.compile(r"[A-Za-z_]\w{2,}")


@dataclass(frozen=True, slots=True)
class PredictionGain:
    """What one kind of prediction did for one kind of text, all prompts together.

    Attributes:
        prediction: its kind.
        speed_up, gain: plain decoding's and drafting's time without a prediction over the time with it; geometric means
            over prompts.
        tokens_per_step: output over steps that verified drafts or could have.
        num_predicted, num_right: drafts from the prediction that were verified and accepted.
    """

    workload: str
    prediction: str
    speed_up: float
    gain: float
    tokens_per_step: float
    num_predicted: int
    num_right: int


@dataclass(slots=True)
class _Way:
    """One prompt's best time with one kind of prediction."""

    seconds: float = float("inf")
    num_steps: int = 0
    num_tokens: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)


def main(argv: Sequence[str]) -> int:
    """Print a row per kind of text and prediction."""
    command = Command("predictions", (__doc__ or "").splitlines()[0], "the engine's (--num-threads, ...)")
    command.add_argument("--model", default=DEMO_MODEL, metavar="MODEL", help=f"(default: {DEMO_MODEL})")
    command.some("--workloads", _WORKLOADS, "(default: all)", _WORKLOADS)
    command.number("--num-prompts", 6, "of each kind of text")
    command.number("--output-len", 160, "tokens", least=2)
    command.number("--repeats", 3)
    command.json()
    args = command.read(argv)
    config = load_config(["--model", args.model, *args.others])
    encoder = PromptEncoder(load_tokenizer(config.model.tokenizer_path))
    rows: list[PredictionGain] = []
    progress = Progress(len(args.workloads) * args.num_prompts, "predictions")
    with running_engine(config) as engine:
        for workload in args.workloads:
            runs = []
            for prompt, source in _prompts(workload, args.num_prompts, encoder):
                runs.append(_measure(engine, encoder, prompt, source, args.output_len, args.repeats))
                progress.advance(workload)
            rows += [_gain(workload, kind, runs) for kind in runs[0]]
    show(args, rows, table_of(rows, COLUMNS))
    return 0


def _prompts(workload: str, count: int, encoder: PromptEncoder) -> list[tuple[I32, str]]:
    """Prompts, and what each asks to be edited; "" = nothing."""
    if workload != _EDIT:
        return [(prompt, "") for prompt in make_prompts(workload, count, encoder)]
    edits = itertools.islice(code_edits(encoder, random.Random(0)), count)
    return [(np.array(token_ids, np.int32), source) for token_ids, source in edits]


def predictions_of(encoder: PromptEncoder, answer: str, source: str, other: str) -> Mapping[str, I32]:
    """What a client might predict, by kind; none first.

    Args:
        answer: what comes.
        source: what the prompt asks to be edited, "" = nothing.
        other: a text that has nothing to do with it.
    """
    words, numbers = _WORD.findall(answer) or ["word"], itertools.count(1)
    rng = random.Random(0)

    def changed(match: re.Match[str]) -> str:
        return match[0] if next(numbers) % _WRONG_EVERY else rng.choice(words)

    texts = {
        **({_SOURCE: source} if source else {}),
        "the answer": answer,
        f"the answer, each {_WRONG_EVERY}th word another": _WORD.sub(changed, answer),
        "another text": other,
    }
    encoded = {kind: encoder.encode_prediction(text, 1 << 20) for kind, text in texts.items()}
    return {_NONE: EMPTY_I32} | {kind: np.array(token_ids, np.int32) for kind, token_ids in encoded.items()}


def _measure(
    engine: Engine, encoder: PromptEncoder, prompt: I32, source: str, output_len: int, repeats: int
) -> dict[str, _Way]:
    numbers = itertools.count()

    def request(prediction: I32, *, is_plain: bool = False) -> Request:
        number = f"{len(prompt)}-{next(numbers)}"
        return Request(
            number,
            prompt,
            SamplingParams(temperature=0.0),
            max_tokens=output_len,
            seed=0,
            eos_token_ids=engine.model_info.eos_token_ids,
            cache_salt=number,
            speculation=Speculation(enabled=not is_plain),
            prediction_token_ids=prediction,
        )

    answer = _run(engine, request(EMPTY_I32, is_plain=True), _Way())
    text = encoder.tokenizer.decode(answer, skip_hidden=True)
    other = encoder.tokenizer.decode(prompt[::-1].tolist(), skip_hidden=True)
    kinds = predictions_of(encoder, text, source, other)
    ways = {_NAIVE: _Way()} | {kind: _Way() for kind in kinds}
    for repeat in range(repeats):
        order = [*ways][repeat % len(ways) :] + [*ways][: repeat % len(ways)]
        for kind in order:
            made = request(kinds.get(kind, EMPTY_I32), is_plain=kind == _NAIVE)
            if _run(engine, made, ways[kind]) != answer:
                raise InternalError(f"prediction {kind}: expected the answer of plain decoding, got another")
    return ways


def _run(engine: Engine, request: Request, way: _Way) -> tuple[int, ...]:
    """Run a request; the prompt's step is not timed."""
    engine.submit(request)
    token_ids: list[int] = []
    num_steps, begin = 0, 0.0
    while engine.has_work():
        for output in engine.step():
            token_ids += output.token_ids
            if output.metrics is not None:
                drafts = output.metrics.drafts
        num_steps += begin > 0
        begin = begin or (time.process_time() if token_ids else 0.0)
    seconds = time.process_time() - begin
    if seconds < way.seconds:
        way.seconds, way.num_steps, way.num_tokens, way.drafts = seconds, num_steps, len(token_ids) - 1, drafts
    return tuple(token_ids)


def _gain(workload: str, kind: str, runs: Sequence[Mapping[str, _Way]]) -> PredictionGain:
    return PredictionGain(
        workload,
        kind,
        geometric_mean(run[_NAIVE].seconds / run[kind].seconds for run in runs),
        geometric_mean(run[_NONE].seconds / run[kind].seconds for run in runs),
        sum(run[kind].num_tokens for run in runs) / sum(run[kind].num_steps for run in runs),
        sum(run[kind].drafts.num_predicted for run in runs),
        sum(run[kind].drafts.num_predicted_accepted for run in runs),
    )
