"""`fastdeploy-sd replay`: what a model-free drafting method would have gained on recorded texts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from tqdm import tqdm

from fastdeploy_sd.cli.arguments import Parser, read_names
from fastdeploy_sd.cli.replay.counts import ReplayCounts
from fastdeploy_sd.cli.replay.encoding import WORDS, load_encoder
from fastdeploy_sd.cli.replay.recording import Conversation, read_recording
from fastdeploy_sd.cli.replay.report import ReplayResult, replay_table
from fastdeploy_sd.cli.replay.simulation import Replay, max_len, vocab_size
from fastdeploy_sd.config import DEMO_MODEL, SpeculativeConfig
from fastdeploy_sd.config.speculative import SPECULATIVE_FIELDS
from fastdeploy_sd.config.speculative_map import read_speculative
from fastdeploy_sd.errors import ConfigError, suggest
from fastdeploy_sd.spec_decode.control.controller import MAX_DRAFT_LEN
from fastdeploy_sd.spec_decode.control.cost import CostModel, LinearCost, StepTimes
from fastdeploy_sd.spec_decode.control.profile import CostProfile
from fastdeploy_sd.spec_decode.control.proposer import AutoProposer
from fastdeploy_sd.spec_decode.dispatcher import create_method
from fastdeploy_sd.spec_decode.methods.native_texts import TextProposer
from fastdeploy_sd.spec_decode.proposer import Proposer, ProposerContext
from fastdeploy_sd.types.draft_methods import METHODS, NAIVE, DraftSource, methods_reading

_METHODS = {method.name: method for method in METHODS.values() if method.is_replayable}
AUTO = "auto"
_AUTO_DRAFTS = METHODS[AUTO].default_num_drafts
_CACHE_SIZE = "suffix_decoding_max_cached_requests"
# What changes the drafts of these methods and of nothing else. No cache file: one row must not warm the next.
_TUNING = [
    opt for opt in SPECULATIVE_FIELDS if any(opt.name in m.keys and opt.name != m.file_key for m in _METHODS.values())
]


def main(argv: Sequence[str]) -> int:
    """Replay a file with every method and draft length, and print one row for each.

    Raises ConfigError: an option is wrong, or a line of the file is (the text names line and field).
    """
    args = _parser().parse_args(argv)
    methods = _verified(args.methods)
    if args.concurrency < 1:
        raise ConfigError(f"concurrency: expected at least 1, got {args.concurrency}", param="concurrency")
    tuning = _tuning(args, methods)
    configs = _configs(methods, args.num_speculative_tokens, tuning)
    offering = _configs(methods, [args.policy_drafts], tuning) if args.policy == AUTO else []
    conversations = _read(args.file, args.tokenizer)
    bench = _Bench(conversations, args.concurrency, _cost(args))
    results = [bench.method(config) for config in configs]
    if offering:
        results.append(bench.auto(offering))
    if args.json:
        print(json.dumps([result.to_json() for result in results], indent=1))
    else:
        print(replay_table(results))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="fastdeploy-sd replay",
        description="Run drafting methods that need no model over recorded conversations and count what verification "
        "would have kept. tokens/step is output tokens after each first one over the steps that gave them: plain "
        "decoding is 1.00.",
    )
    text = (
        'JSON lines {"messages": [{"role", "content"}]}, with an "id" or without; every assistant message is a response'
    )
    parser.add_argument("file", type=Path, metavar="FILE", help=text)
    text = f"some of {','.join(_METHODS)} (default: all)"
    parser.add_argument("--methods", type=read_names, default=list(_METHODS), metavar="A,B", help=text)
    text = "drafts per step at most; several give a row each (default: 5)"
    parser.add_argument("--num-speculative-tokens", type=int, nargs="+", default=[5], metavar="K", help=text)
    text = f"directory with tokenizer.json, or '{WORDS}': words cut at six letters (default: %(default)s)"
    parser.add_argument("--tokenizer", default=DEMO_MODEL, metavar="PATH", help=text)
    text = "conversations side by side (default: %(default)s)"
    parser.add_argument("--concurrency", type=int, default=1, metavar="N", help=text)
    text = "suffix drafts from the request's own text only, not from earlier answers"
    parser.add_argument("--no-shared-cache", dest="shared_cache", action="store_false", help=text)
    text = "a row for the policy that chooses among the methods and their draft lengths in every step; needs a cost"
    parser.add_argument("--policy", choices=[AUTO], help=text)
    text = "drafts per step at most with --policy (default: %(default)s)"
    parser.add_argument("--policy-drafts", type=int, default=_AUTO_DRAFTS, metavar="K", help=text)
    cost = parser.add_mutually_exclusive_group()
    text = "what a draft costs: a step with d of them takes 1 + C*d; gives the column speed-up"
    cost.add_argument("--cost", type=float, metavar="C", help=text)
    text = "the same from a file of measured step times"
    cost.add_argument("--profile", type=Path, metavar="FILE", help=text)
    for opt in _TUNING:
        parser.add_argument(opt.flag, metavar="VALUE", help=f"as in speculative_config: {opt.spec.help}")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _cost(args: argparse.Namespace) -> StepTimes | None:
    """What steps take; None where neither --cost nor --profile says so."""
    if args.cost is not None:
        return LinearCost(args.cost)
    if args.profile is not None:
        return CostModel(_profile(args.profile), args.concurrency * (1 + MAX_DRAFT_LEN))
    if args.policy is not None:
        raise ConfigError("policy: expected with cost or profile, got neither", param="policy")
    return None


def _profile(path: Path) -> CostProfile:
    try:
        return CostProfile.load(path)
    except FileNotFoundError:
        raise ConfigError(f"profile: expected a readable file, got {path} (not found)", param="profile") from None


def _verified(methods: list[str]) -> list[str]:
    for name in methods:
        if name not in _METHODS:
            raise ConfigError(f"methods: expected some of {', '.join(_METHODS)}, got {name!r}{suggest(name, _METHODS)}")
    return methods


def _tuning(args: argparse.Namespace, methods: Sequence[str]) -> dict[str, Any]:
    """The keys of speculative_config that were given, each as text or converted."""
    given = {opt.name: getattr(args, opt.name) for opt in _TUNING if getattr(args, opt.name) is not None}
    if not args.shared_cache:
        _verify_used("no_shared_cache", _CACHE_SIZE, methods)
        if _CACHE_SIZE in given:
            raise ConfigError(f"no_shared_cache: expected without {_CACHE_SIZE}, got both", param="no_shared_cache")
        given[_CACHE_SIZE] = 0
    return given


def _configs(methods: Sequence[str], lengths: Sequence[int], tuning: dict[str, Any]) -> list[SpeculativeConfig]:
    """One for each method and length, with the keys that are the method's own; each key must belong to a method."""
    for key in tuning:
        _verify_used(key, key, methods)
    own = {method: {key: tuning[key] for key in tuning if key in _METHODS[method].keys} for method in methods}
    return [
        read_speculative({"method": method, "num_speculative_tokens": k} | own[method]).config
        for method in methods
        for k in lengths
    ]


def _verify_used(option: str, key: str, methods: Sequence[str]) -> None:
    """Refuse an option whose key none of the methods reads."""
    readers = [method.name for method in methods_reading(key)]
    if set(readers).isdisjoint(methods):
        raise ConfigError(f"{option}: expected {readers[0]} among the methods, got {', '.join(methods)}", param=option)


def _read(path: Path, tokenizer: str) -> list[Conversation]:
    size = path.stat().st_size if path.is_file() else None
    with tqdm(total=size, desc="reading", unit="B", unit_scale=True, disable=None, leave=False) as bar:
        return read_recording(path, load_encoder(tokenizer), bar.update)


class _Bench:
    """Runs proposers over one recording. `cost`: what steps take; None = not asked."""

    def __init__(self, conversations: Sequence[Conversation], concurrency: int, cost: StepTimes | None) -> None:
        self._conversations, self._concurrency, self._cost = conversations, concurrency, cost
        self._context = ProposerContext(concurrency, max_len(conversations), vocab_size(conversations))
        self._plain_rate = 1.0
        if cost is not None:
            self._plain_rate = _rate(self._run(create_method(NAIVE, SpeculativeConfig(), self._context), NAIVE, 0))

    def method(self, config: SpeculativeConfig) -> ReplayResult:
        """Replay one method with one draft length."""
        method, k = config.method, config.num_speculative_tokens
        counts = self._run(create_method(method, config, self._context), method, k)
        has_shared_cache = getattr(config, _CACHE_SIZE) != 0 if _CACHE_SIZE in _METHODS[method].keys else None
        return ReplayResult(method, k, counts, has_shared_cache, self._speed_up(counts))

    def auto(self, configs: Sequence[SpeculativeConfig]) -> ReplayResult:
        """Replay the policy over what these methods offer, of so many drafts at most."""
        assert self._cost is not None
        k = configs[0].num_speculative_tokens
        proposer = AutoProposer(
            [(_source(c.method), cast(TextProposer, create_method(c.method, c, self._context))) for c in configs],
            self._cost,
            self._concurrency,
            k,
        )
        counts = self._run(proposer, AUTO, k)
        return ReplayResult(AUTO, k, counts, None, self._speed_up(counts))

    def _run(self, proposer: Proposer, name: str, k: int) -> ReplayCounts:
        num_tokens = sum(end - begin for c in self._conversations for begin, end in c.responses)
        step_time = None if self._cost is None else self._step_time
        try:
            with tqdm(total=num_tokens, desc=f"{name} k={k}", unit="tok", disable=None, leave=False) as bar:
                replay = Replay(proposer, k, self._concurrency, _memory_of(proposer), bar.update, step_time)
                return replay.run(self._conversations)
        finally:
            proposer.close()

    def _step_time(self, num_rows: int, num_requests: int, num_kv_tokens: int) -> float:
        """All rows but one of each request are drafts, each of which reads its request's context as well."""
        assert self._cost is not None
        times = self._cost.times(num_rows, num_requests, num_kv_tokens)
        return times.array(0).item(0) + (num_rows - num_requests) * times.per_draft

    def _speed_up(self, counts: ReplayCounts) -> float | None:
        return None if self._cost is None else _rate(counts) / self._plain_rate


def _source(method: str) -> DraftSource:
    source = _METHODS[method].source
    assert source is not None
    return source


def _rate(counts: ReplayCounts) -> float:
    """Tokens of verify steps per time; 1.0 where there was none."""
    num_tokens = counts.num_output_tokens - counts.num_responses
    return num_tokens / counts.verify_time if counts.verify_time else 1.0


@runtime_checkable
class _Sized(Protocol):
    def num_bytes(self) -> int: ...


@runtime_checkable
class _Cache(Protocol):
    def stats(self) -> Any: ...


def _memory_of(proposer: Proposer) -> Callable[[], int] | None:
    """Return what asks a method for its bytes: all of its indexes, or its cache of other requests' outputs.

    None where the method does not tell.
    """
    if isinstance(proposer, _Sized):
        return proposer.num_bytes
    if isinstance(proposer, _Cache):
        cache = proposer
        return lambda: int(cache.stats().num_bytes)
    return None
