"""Runs requests through an engine that is set up in one way for one method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from fastdeploy_sd.cli.verify.answers import Answer, AnswerCollector
from fastdeploy_sd.cli.verify.methods import PLAIN, Method
from fastdeploy_sd.cli.verify.requests import USUAL_LENGTHS, Lengths, make_requests, with_adapters, with_grammars
from fastdeploy_sd.cli.verify.variants import ALONE, EngineVariant
from fastdeploy_sd.config import Config
from fastdeploy_sd.device import library
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import BadRequest, CheckpointError, ConfigError, InternalError
from fastdeploy_sd.types import Request, RequestId

_MAX_STEPS = 1_000_000
_MAX_MODEL_LEN = 512
_KV_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Reference:
    """What a model must say.

    Attributes:
        base: its configuration, with a length that suits the requests.
        answers: of `requests`, each run alone with plain decoding.
        unguided: why none of them has a grammar although some should; "" = some have, or none should.
    """

    base: Config
    requests: tuple[Request, ...]
    answers: Mapping[RequestId, Answer]
    unguided: str = ""


def engine_config(base: Config, way: EngineVariant, method: Method) -> Config:
    """Return `base` with everything that a way and a method say; model, weights and their format stay."""
    needed = way.max_num_seqs * (method.num_speculative_tokens + 1)
    return replace(
        base,
        model=replace(base.model, enforce_eager=base.model.enforce_eager or way.enforce_eager),
        cache=replace(
            base.cache,
            block_size=way.block_size,
            num_blocks=way.num_blocks,
            enable_prefix_caching=way.enable_prefix_caching,
        ),
        scheduler=replace(
            base.scheduler,
            max_num_seqs=way.max_num_seqs,
            max_num_batched_tokens=max(way.max_num_batched_tokens, needed),
            enable_chunked_prefill=True,
            long_prefill_token_threshold=way.long_prefill_token_threshold,
        ),
        speculative=method.speculative,
        num_threads=base.num_threads if way.num_threads is None else way.num_threads,
    )


@contextmanager
def open_engine(base: Config, way: EngineVariant, method: Method) -> Iterator[Engine]:
    """Load the model for one cell of the matrix; it is freed, and the number of threads restored, at the end.

    Raises CheckpointError, ConfigError: the model or the method cannot be loaded.
    """
    from fastdeploy_sd.distributed.executor import create_executor  # brings in Paddle

    num_threads = library.num_threads()
    config = engine_config(base, way, method)
    executor = create_executor(config, method.make_proposer)
    try:
        yield Engine(config, executor)
    finally:
        executor.shutdown()
        library.set_num_threads(num_threads)


def run(engine: Engine, requests: Sequence[Request], arrivals_per_step: int = 1 << 20) -> dict[RequestId, Answer]:
    """Submit some requests before each step and run all to their end, checking the engine's invariants each time.

    Returns:
        An answer per request, in their order.

    Raises AssertionError: an invariant of the engine broke; InternalError: the engine does not come to an end.
    """
    collector, pending = AnswerCollector(), list(requests)
    for _ in range(_MAX_STEPS):
        for request in pending[:arrivals_per_step]:
            engine.submit(request)
        del pending[:arrivals_per_step]
        if not engine.has_work():
            return {r.request_id: collector.answer(r.request_id) for r in requests}
        for output in engine.step():
            collector.add(output)
        engine.wait_for_arrival(_KV_WAIT_S)
        engine.check_integrity()
    raise InternalError(f"engine: expected an end within {_MAX_STEPS} steps, got none")


def available_methods(base: Config, methods: Sequence[Method]) -> tuple[list[Method], dict[str, str]]:
    """Return the methods that can be loaded for this model, and why each of the others cannot."""
    found, reasons = [], {}
    for method in methods:
        # Only a method with weights of its own can fail to load.
        if not method.speculative.draft_models or (reason := _load_error(base, method)) is None:
            found.append(method)
        else:
            reasons[method.name] = reason
    return found, reasons


def runnable_variants(base: Config, ways: Sequence[EngineVariant]) -> tuple[list[EngineVariant], dict[str, str]]:
    """Return the ways in which this machine can run the model, and why it cannot in each of the others."""
    found, reasons = [], {}
    for way in ways:
        # Only eager execution needs something that may not be there: operators, or a compiler that makes them.
        if not way.enforce_eager or (reason := _load_error(base, PLAIN, way)) is None:
            found.append(way)
        else:
            reasons[way.name] = reason
    return found, reasons


def _load_error(base: Config, method: Method, way: EngineVariant = ALONE) -> str | None:
    try:
        with open_engine(base, way, method):
            return None
    except (CheckpointError, ConfigError) as error:
        return error.message


def run_alone(base: Config, requests: Sequence[Request]) -> dict[RequestId, Answer]:
    """Run each request by itself with plain decoding: what every other way must reproduce."""
    with open_engine(_in_order(base), ALONE, PLAIN) as engine:
        return _run_each(engine, requests)


def _in_order(base: Config) -> Config:
    """The configuration with which no step begins before the one before it is over."""
    return replace(base, scheduler=replace(base.scheduler, async_scheduling=False))


def make_reference(
    base: Config, seed: int, count: int, *, has_guided: bool = False, lengths: Lengths = USUAL_LENGTHS
) -> Reference:
    """Make requests that suit the model, and run them alone with plain decoding.

    Requests have the configured adapters in turn.

    `has_guided`: some requests get a grammar, if the model's vocabulary allows any. Raises CheckpointError,
    ConfigError: the model cannot be loaded, or takes too few tokens.
    """
    from fastdeploy_sd.worker.loading.forecast import longest_sequence  # brings in Paddle

    longest = longest_sequence(base)
    if longest < lengths.whole:
        raise ConfigError(f"max_model_len: expected at least {lengths.whole}, got {longest}")
    # Not more than needed: tables for every request are that long. It may decide what the model computes (longrope).
    base = replace(base, model=replace(base.model, max_model_len=min(longest, max(lengths.whole, _MAX_MODEL_LEN))))
    with open_engine(_in_order(base), ALONE, PLAIN) as engine:
        info = engine.model_info
        requests = make_requests(seed, count, info.vocab_size, info.eos_token_ids, lengths)
        requests = with_adapters(requests, [source.adapter for source in info.adapters])
        unguided = ""
        if has_guided:
            guided = with_grammars(requests, max(lengths.output))
            unguided = _refusal(engine, guided)
            requests = requests if unguided else guided
        answers = _run_each(engine, requests)
    return Reference(base, tuple(requests), answers, unguided)


def _refusal(engine: Engine, requests: Sequence[Request]) -> str:
    """Why the engine takes no request with a grammar; "" = it does."""
    request = next(r for r in requests if r.grammar)
    try:
        engine.submit(request)
    except BadRequest as error:
        return error.message
    engine.abort([request.request_id])
    return ""


def _run_each(engine: Engine, requests: Sequence[Request]) -> dict[RequestId, Answer]:
    return {i: answer for request in requests for i, answer in run(engine, [request]).items()}
