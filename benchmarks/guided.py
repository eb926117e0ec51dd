"""`bench guided`: what grammars cost by themselves and in a step, and what the tokens that they force save.

Masks are computed for an answer of long keys, token by token, over a vocabulary of the size that is asked for: the demo
model's tokens and pairs of them. Steps run the configured model with requests that follow a grammar, and in turn with
free ones. Answers are those of one request at a time, drafting as configured: the JSON one, and as long a free text,
both drawn at temperature 1.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from benchmarks.checkpoint import CHECKPOINT_DIR, ensure_checkpoint
from benchmarks.command import Command, show, table_of, with_default
from benchmarks.engines import running_engine, verify_room
from benchmarks.hardware import describe_hardware
from benchmarks.progress import Progress
from benchmarks.sampling import sampling_columns
from fastdeploy_sd.config import DEMO_MODEL, ModelConfig, SpeculativeConfig, load_config
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.ops.sampling import SAMPLE, settings_of
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.added_tokens import Segment
from fastdeploy_sd.text.guidance.output_matcher import OutputMatcher
from fastdeploy_sd.text.guidance.vocabulary import make_vocabulary
from fastdeploy_sd.text.tokenizer import load_tokenizer
from fastdeploy_sd.types import EMPTY_I32, Request

_KEYS = ("name_of_the_customer", "number_of_items_in_order", "is_delivered_by_courier", "address_of_the_warehouse")
_VALUES = ('"Alexandra"', "12", "true", '"Harbour Road"')
_SCHEMA = {
    "type": "object",
    "properties": {
        key: {"type": kind} | ({"maxLength": 12} if kind == "string" else {})
        for key, kind in zip(_KEYS, ("string", "integer", "boolean", "string"), strict=True)
    },
    "required": list(_KEYS),
    "additionalProperties": False,
}
# An array of these objects that may go on for ever, so that no request ends while steps are timed.
_GRAMMAR = json.dumps({"grammars": [{"json_schema": {**_SCHEMA, "x-guidance": {"whitespace_flexible": False}}}]})
_ENDLESS = f'start: "[" (item ",")+\nitem: %json {json.dumps(_SCHEMA | {"x-guidance": {"whitespace_flexible": False}})}'
_PROMPT_LEN, _MAX_ANSWER = 16, 160
_NUM_WARM_UP_STEPS = 16
_US_PER_S = 1e6


@dataclass(frozen=True, slots=True)
class MaskCost:
    """What one place of the answer costs, in processor microseconds; each the least of several tries.

    Attributes:
        place: "forced", where one token may follow; "few", up to a thirty-second of the vocabulary; or "many".
        places: how many of the answer's tokens are there.
        mask_us: the median over them of computing the bits; mask_most_us: the most.
        forced_us: of asking which tokens must follow, which drafting does once per step.
        draw_us: of drawing the token from a row with these bits; a free row's is `GuidedCost.free_draw_us`.
    """

    place: str
    places: int
    mask_us: float
    mask_most_us: float
    forced_us: float
    draw_us: float


@dataclass(frozen=True, slots=True)
class GuidedCost:
    """What is measured.

    Attributes:
        free_draw_us: of drawing a token from a free row.
        free_step_ms, guided_step_ms: medians of plain steps; step_ratio: the median over pairs of windows.
        free_tokens_per_s, plain_json_tokens_per_s, json_tokens_per_s: of one request: free text and JSON with drafts,
            and between them JSON without.
        acceptance_length: tokens per verified step of the JSON answers.
    """

    hardware: dict[str, object]
    vocab_size: int
    masks: list[MaskCost]
    free_draw_us: float
    batch: int
    free_step_ms: float
    guided_step_ms: float
    step_ratio: float
    free_tokens_per_s: float
    plain_json_tokens_per_s: float
    json_tokens_per_s: float
    acceptance_length: float


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    command = Command("guided", "Measure structured output.", "the engine's (--model, --speculative-config, ...)")
    command.number("--vocab-size", 151_936, "of the masks that are measured alone")
    command.number("--batch", 32, "requests of a step")
    command.number("--pairs", 10, "of windows, free and guided")
    command.number("--steps", 12, "of a window")
    command.number("--answers", 6, "of each kind")
    command.json()
    args = command.read(argv)
    options = with_default(args.others, "--model", CHECKPOINT_DIR / "qwen3-0.6b")
    ensure_checkpoint(options)
    config = load_config(options, command.prog)
    progress = Progress(2 + args.pairs + 2 * args.answers, "guided")
    masks, free_draw_us = measure_masks(args.vocab_size)
    progress.advance()
    plain = replace(config, speculative=SpeculativeConfig(method="naive"))
    with running_engine(plain) as engine:
        verify_room(engine, plain, args.batch, _PROMPT_LEN + _MAX_ANSWER)
        steps = measure_steps(engine, args.batch, args.pairs, args.steps, progress)
        _, plain_json = measure_answers(engine, args.answers, progress)
    with running_engine(config) as engine:
        free, guided = measure_answers(engine, args.answers, progress)
        counts = engine.stats()
    cost = GuidedCost(
        describe_hardware(), args.vocab_size, masks, free_draw_us, args.batch, *steps, free, plain_json, guided,
        counts.num_emitted_tokens / max(counts.num_verified_rows, 1),
    )  # fmt: skip
    progress.advance()
    show(args, cost, guided_table(cost))
    return 0


def measure_masks(vocab_size: int, tries: int = 5) -> tuple[list[MaskCost], float]:
    """Go through the answer; return what its places cost, and a free row's draw."""
    vocabulary = _vocabulary(vocab_size)
    library = LLMatcher(vocabulary, _GRAMMAR)
    matcher = OutputMatcher(library, tuple(vocabulary.eos_tokens), lambda: LLMatcher(vocabulary, _GRAMMAR))
    text = "{" + ",".join(f'"{key}":{value}' for key, value in zip(_KEYS, _VALUES, strict=True)) + "}"
    bits = np.zeros((1, -(-vocab_size // 32)), np.int32)
    logits = np.random.default_rng(0).standard_normal((1, vocab_size), np.float32)
    found: dict[str, list[tuple[float, float, float]]] = {}
    for token_id in vocabulary.tokenize_str(text):
        mask_us = _least_us(lambda: library.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes), tries)
        forced_us = _least_us(lambda: matcher.forced(8), tries)
        count = int(np.unpackbits(bits.view(np.uint8)).sum())
        place = "forced" if count == 1 else "few" if count <= vocab_size // 32 else "many"
        found.setdefault(place, []).append((mask_us, forced_us, _draw_us(logits, bits, tries)))
        matcher.consume([token_id])
    costs = []
    for place, rows in found.items():
        masks, forced, draws = zip(*rows, strict=True)
        costs.append(MaskCost(place, len(rows), median(masks), max(masks), median(forced), median(draws)))
    return costs, _draw_us(logits, None, 20 * tries)


def measure_steps(
    engine: Engine, batch: int, num_pairs: int, num_steps: int, progress: Progress
) -> tuple[float, float, float]:
    """Time plain steps of free and of guided requests in turn; return the medians in ms, and that of the ratios."""
    free, guided = list[float](), list[float]()
    for pair in range(num_pairs):
        for grammar, times in (("", free), (_ENDLESS, guided)):
            names = [f"{pair}-{bool(grammar)}-{i}" for i in range(batch)]
            for i, name in enumerate(names):
                engine.submit(_request(engine, name, grammar, i, _MAX_ANSWER))
            while engine.stats().num_running < batch:
                engine.step()
                engine.wait_for_arrival(1.0)
            for _ in range(_NUM_WARM_UP_STEPS):  # the prompts, and so many tokens that rows are at different places
                engine.step()
            begin = time.perf_counter()
            for _ in range(num_steps):
                engine.step()
            times.append((time.perf_counter() - begin) / num_steps * 1e3)
            engine.abort(names)
        progress.advance()
    return median(free), median(guided), median(g / f for f, g in zip(free, guided, strict=True))


def measure_answers(engine: Engine, count: int, progress: Progress) -> tuple[float, float]:
    """Generate answers one after the other; return tokens per second of free text and of JSON, without the prompt."""
    seconds, tokens = {"": 0.0, _GRAMMAR: 0.0}, {"": 0, _GRAMMAR: 0}
    for number in range(-1, count):  # the first ones warm up
        for grammar in (_GRAMMAR, ""):
            begin, length = _answer(engine, grammar, number, f"answer-{number}-{bool(grammar)}")
            if number >= 0:
                seconds[grammar] += time.perf_counter() - begin
                tokens[grammar] += length
        progress.advance()
    return tokens[""] / seconds[""], tokens[_GRAMMAR] / seconds[_GRAMMAR]


def _answer(engine: Engine, grammar: str, seed: int, name: str) -> tuple[float, int]:
    """Run a request; return when its first token was there, and how many came after that."""
    engine.submit(_request(engine, name, grammar, 100 + seed, _MAX_ANSWER))
    begin, length = 0.0, 0
    while engine.has_work():
        for output in engine.step():
            length += len(output.token_ids) if begin else 0
            begin = begin or time.perf_counter()
        engine.wait_for_arrival(1.0)
    return begin, length


def _request(engine: Engine, name: str, grammar: str, seed: int, max_tokens: int) -> Request:
    prompt = np.random.default_rng(seed).integers(3, min(4000, engine.model_info.vocab_size), _PROMPT_LEN, np.int32)
    sampling = SamplingParams(temperature=1.0, ignore_eos=not grammar)
    ends = engine.model_info.eos_token_ids
    return Request(name, prompt, sampling, max_tokens, seed, ends, arrival_time=time.time(), grammar=grammar)


class _Tokens:
    """The demo model's tokens, and pairs of them up to a size."""

    def __init__(self, vocab_size: int) -> None:
        self._demo = load_tokenizer(ModelConfig(model=DEMO_MODEL).path)
        self.hidden_ids, self.eos_token_ids = self._demo.hidden_ids, self._demo.eos_token_ids
        self.control_tokens = self._demo.control_tokens
        own = [self._demo.token_bytes(i) or b"" for i in range(4096)]
        visible = [token for i, token in enumerate(own) if i not in self.hidden_ids]
        pairs = (a + b for a, b in itertools.product(visible, visible))
        self._bytes = list(itertools.islice(itertools.chain(own, pairs), vocab_size))

    @property
    def num_ids(self) -> int:
        return len(self._bytes)

    def encode_segments(self, segments: Sequence[Segment]) -> list[int]:
        return self._demo.encode_segments(segments)

    def token_bytes(self, token_id: int) -> bytes | None:
        return self._bytes[token_id]


def _vocabulary(vocab_size: int) -> LLTokenizer:
    return make_vocabulary(_Tokens(vocab_size), vocab_size, ())


def _draw_us(logits: np.ndarray, bits: np.ndarray | None, tries: int) -> float:
    columns = sampling_columns(1, 1, logits.shape[1], {"temperature": 0.0})
    if bits is not None:
        columns = replace(columns, allowed_rows=np.zeros(1, np.int32), allowed_bits=bits)
    rows = {"logits": logits, "batch_id_per_output": np.zeros(1, np.int32), "positions": np.ones(1, np.int32)}
    call = SAMPLE.bind(
        **rows,
        **settings_of(columns),
        draft_token_ids=EMPTY_I32,
        stops_at_wrong_draft=False,
        token_ids=np.zeros(1, np.int32),
    )
    return _least_us(call.run, tries)


def _least_us(run: Callable[[], object], tries: int) -> float:
    times = []
    for _ in range(tries):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times) * _US_PER_S


def guided_table(cost: GuidedCost) -> str:
    """Return the costs as Markdown, and a line each about steps and answers."""
    columns = {
        "What may follow": "{0.place}",
        "Places": "{0.places}",
        "Mask us": "{0.mask_us:.1f}",
        "most": "{0.mask_most_us:.1f}",
        "Forced tokens us": "{0.forced_us:.1f}",
        "Draw us": "{0.draw_us:.1f}",
    }
    return "\n\n".join((
        f"One row of {cost.vocab_size} tokens; drawing from a free one takes {cost.free_draw_us:.1f} us.",
        table_of(cost.masks, columns),
        f"A plain step of {cost.batch} requests takes {cost.free_step_ms:.2f} ms free and {cost.guided_step_ms:.2f} ms"
        f" guided: {cost.step_ratio:.3f}x.",
        f"One answer: {cost.free_tokens_per_s:.1f} tokens/s of free text, {cost.json_tokens_per_s:.1f} of JSON"
        f" ({cost.json_tokens_per_s / cost.free_tokens_per_s:.2f}x, {cost.acceptance_length:.2f} tokens per verified"
        f" step), {cost.plain_json_tokens_per_s:.1f} of JSON without drafts.",
    ))  # fmt: skip
