"""What one engine computed of a prompt, put into another one as pages: outputs and drafts are those of one engine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_sd.cli.verify import EngineVariant, Reference, compare, standard_methods
from fastdeploy_sd.cli.verify.methods import Method
from fastdeploy_sd.cli.verify.runs import engine_config, run
from fastdeploy_sd.config import Config
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.engine.interfaces.kv_connector import KvArrival
from fastdeploy_sd.types import I32, Request, RequestId, SchedulerOutput, StepResult
from fastdeploy_sd.worker.executor import LocalExecutor, create_executor
from fastdeploy_sd.worker.kv.kv_access import AnyPages
from tests.engine.models import References

pytestmark = pytest.mark.slow

WAY = EngineVariant("roomy", max_num_seqs=9, enable_prefix_caching=True)


@dataclass
class Prefill:
    """Pages of a prompt by (layer, number in the table), and what followed it: the first token and the drafts."""

    pages: dict[tuple[int, int], bytes]
    token_ids: list[int]


@dataclass
class PrefilledConnector:
    """Brings pages as soon as they are asked for."""

    prefills: dict[RequestId, Prefill] = field(default_factory=dict)
    pages: AnyPages | None = None
    block_size: int = 0
    fd: int | None = None
    _arrived: list[KvArrival] = field(default_factory=list)

    def begin(self, request: Request, token_ids: I32, num_cached_tokens: int, block_ids: Sequence[int]) -> bool:
        found, pages = self.prefills.get(request.request_id), self.pages
        if found is None or pages is None or len(token_ids) > len(request.prompt_token_ids):
            return False
        first_block, num_tokens = num_cached_tokens // self.block_size, len(token_ids) - 1
        for layer in range(pages.num_layers):
            for i in range(first_block, len(block_ids)):
                pages.write(layer, block_ids[i], memoryview(found.pages[layer, i]))
        drafts, is_ahead = tuple(found.token_ids), True
        if pages.num_layers - pages.num_target_layers > 1:
            # Each layer reads rows of the one before it; at the end of a block these are in the page.
            whole = num_tokens - num_tokens % self.block_size
            drafts, is_ahead, num_tokens = drafts if whole == num_tokens else (), False, whole
        origins = {"prefill": num_tokens - num_cached_tokens}
        self._arrived.append(KvArrival(request.request_id, num_tokens, drafts, is_ahead, origins))
        return True

    def cancel(self, request_id: RequestId) -> None:
        self._arrived = [arrival for arrival in self._arrived if arrival.request_id != request_id]

    def arrivals(self) -> list[KvArrival]:
        arrived, self._arrived = self._arrived, []
        return arrived


class WatchedExecutor:
    """Notes what was drafted behind how many tokens of each request, and the pages of prompts that are done."""

    def __init__(self, executor: LocalExecutor) -> None:
        self._executor = executor
        self.model_info = executor.model_info
        self.block_store, self.grammars = executor.block_store, executor.grammars
        self.drafted: dict[tuple[RequestId, int], list[int]] = {}
        self.prefills: dict[RequestId, Prefill] = {}
        self._known: dict[RequestId, list[int]] = {}
        self._blocks: dict[RequestId, list[int]] = {}

    def execute(self, plan: SchedulerOutput) -> StepResult:
        result = self._executor.execute(plan)
        for new in plan.new:
            self._known[new.request.request_id] = new.token_ids.tolist()
            self._blocks[new.request.request_id] = list(new.block_ids)
        for delta in plan.deltas:
            self._blocks[delta.request_id] += delta.new_block_ids
        for r, name in enumerate(plan.request_ids):
            output, drafts = result.verified.row(r).tolist(), result.drafts.row(r).tolist()
            is_first = bool(output) and name not in self.prefills
            if is_first:
                self.prefills[name] = Prefill(self._pages_of(name), [*output, *drafts])
            self._known[name] += output
            if output:
                self.drafted[name, len(self._known[name])] = drafts
        return result

    def _pages_of(self, name: RequestId) -> dict[tuple[int, int], bytes]:
        pages, blocks = self._executor.kv_pages, self._blocks[name]
        num_blocks = -(-len(self._known[name]) // self.model_info.block_size)
        return {
            (layer, i): b"".join(part.tobytes() for part in pages.read_all(layer, [blocks[i]])[0])
            for layer in range(pages.num_layers)
            for i in range(num_blocks)
        }

    def shutdown(self) -> None:
        self._executor.shutdown()


@contextmanager
def watched_engine(
    reference: Reference, method: Method, connector: PrefilledConnector | None = None
) -> Iterator[tuple[Engine, WatchedExecutor]]:
    config = engine_config(reference.base, WAY, method)
    executor = create_executor(config, method.make_proposer)
    watched = WatchedExecutor(executor)
    if connector is not None:
        connector.pages, connector.block_size = executor.kv_pages, executor.model_info.block_size
    try:
        yield Engine(config, watched, connector), watched
    finally:
        executor.shutdown()


@pytest.mark.parametrize(
    ("model", "name"),
    [("demo", "mtp"), ("demo", "naive"), ("int8 KV", "mtp"), ("float32", "mtp-ngram"), ("two MTP layers", "mtp")],
)
def test_a_prompt_computed_elsewhere_goes_on_as_if_computed_here(references: References, model: str, name: str) -> None:
    reference = references.get(model)
    [method] = standard_methods([name], [2], model_method="mtp")
    with watched_engine(reference, method) as (engine, source):
        assert compare(reference.answers, run(engine, reference.requests)) is None
    connector = PrefilledConnector(source.prefills)
    with watched_engine(reference, method, connector) as (engine, target):
        got = run(engine, reference.requests, arrivals_per_step=3)
        assert compare(reference.answers, got) is None
        stats = engine.stats()
        # Those with log-probabilities of the prompt compute it themselves.
        supplied = [r for r in reference.requests if r.sampling.prompt_logprobs is None]
        assert stats.num_kv_arrivals == len(supplied)
        assert stats.num_prefix_hits > 0
    # The first drafts were handed over. Later ones are those that the first engine made behind the same text.
    both = target.drafted.keys() & source.drafted.keys()
    assert len(both) > len(target.drafted) // 2
    assert {key: source.drafted[key] for key in both} == {key: target.drafted[key] for key in both}
    handed_over = stats.drafts.get("handed_over")
    if method.is_drafting and model != "two MTP layers":
        assert handed_over is not None
        long = [r for r in supplied if r.max_tokens > 2]
        assert handed_over.accepted[0] >= len(long)  # the first token of the same model is always right
        assert len(target.drafted) < len(source.drafted)
    elif method.is_drafting:
        assert handed_over is not None
    else:
        assert handed_over is None


def test_pages_of_other_layers_and_lengths_are_refused(references: References) -> None:
    reference = references.get("int8 KV")
    [method] = standard_methods(["mtp"], [2], model_method="mtp")
    executor = create_executor(engine_config(reference.base, replace(WAY, num_blocks=8), method))
    try:
        pages = executor.kv_pages
        assert (pages.num_layers - pages.num_target_layers, pages.num_blocks) == (1, 8)
        first, last = pages.page_bytes(0), pages.page_bytes(pages.num_layers - 1)
        [of_first], [of_last] = pages.read_all(0, [0]), pages.read_all(pages.num_layers - 1, [7])
        assert [len(part) for part in of_first] == [len(part) for part in of_last][:4]
        assert last > first  # the hidden row
        pattern = np.random.default_rng(0).integers(0, 256, last, np.uint8)
        pages.write(pages.num_layers - 1, 3, memoryview(pattern.tobytes()))
        assert np.concatenate(pages.read_all(pages.num_layers - 1, [3])[0]).tolist() == pattern.tolist()
        for block in (2, 4):
            assert not np.concatenate(pages.read_all(pages.num_layers - 1, [block])[0]).any()
        with pytest.raises(ValueError, match=f"expected {first} bytes, got {last}"):
            pages.write(0, 3, memoryview(pattern.tobytes()))
        for layer, block in ((0, 8), (0, -1), (pages.num_layers, 0), (-1, 0)):
            with pytest.raises(IndexError, match=f"layer {layer}, block {block}"):
                pages.read_all(layer, [block])
    finally:
        executor.shutdown()


def test_only_instances_with_the_same_arithmetic_share_a_fingerprint(references: References, tmp_path: Path) -> None:
    """Method, draft length, cache size and the place of the checkpoint make no difference; formats and weights do."""
    base = references.get("demo").base
    [naive], [mtp] = (standard_methods([name], [2], model_method="mtp") for name in ("naive", "mtp"))

    def identity(config: Config) -> tuple[str, str]:
        executor = create_executor(config)
        executor.shutdown()
        assert executor.model_info.fingerprint == executor.kv_identity.fingerprint
        return executor.kv_identity.fingerprint, executor.kv_identity.draft_fingerprint

    copies = [Path(shutil.copytree(base.model.path, tmp_path / name)) for name in ("copy", "damaged")]
    with open(copies[1] / "model.safetensors", "r+b") as file:
        file.seek(-200_000, 2)
        file.write(bytes(1000))
    copy, damaged = (
        identity(engine_config(replace(base, model=replace(base.model, model=str(path))), WAY, naive))
        for path in copies
    )
    plain = identity(engine_config(base, WAY, naive))
    drafting = identity(engine_config(base, replace(WAY, num_blocks=64), mtp))
    int8 = identity(engine_config(replace(base, cache=replace(base.cache, kv_cache_dtype="int8")), WAY, mtp))
    wint8 = identity(engine_config(replace(base, model=replace(base.model, quantization="wint8")), WAY, mtp))
    other = identity(engine_config(references.get("int8 KV").base, WAY, mtp))
    config = engine_config(base, WAY, mtp)
    by_default = replace(config.speculative, quantization="wint8")
    exact = replace(config.speculative, quantization="none")
    as_by_default, unquantised = (identity(replace(config, speculative=s)) for s in (by_default, exact))
    assert plain[0] == drafting[0]
    assert plain[1] == ""
    assert copy == plain
    assert len({plain[0], damaged[0], int8[0], wint8[0], other[0]}) == 5
    assert len({drafting[1], int8[1], wint8[1], other[1], unquantised[1], ""}) == 6
    assert as_by_default == drafting
