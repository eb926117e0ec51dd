"""The same work by other projects' kernels, where they are installed: PyTorch's ops and FlashInfer's.

Each is imported only when it is asked, and times itself as ours are: by events, after writes that fill the
second-level cache. They compute what ours do, in bfloat16 and over a KV cache of it; sampling without rules and without
verification, which they have no op for.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

# More than any GPU's second-level cache.
FLUSH_BYTES = 256 << 20
WARM_UPS = 3
_MATMUL_SIZE = 8192
_WORKSPACE_BYTES, _PAGE_SIZE = 128 << 20, 64
Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class LinearWork:
    """Rows of bfloat16 with a matrix of it."""

    rows: int
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """The last `rows` tokens of every request over its `context` keys, each over those up to its own.

    Attributes:
        prefix: of the keys, that all requests share: whole pages, read once by kernels that know of it.
    """

    requests: int
    rows: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    prefix: int = 0


@dataclass(frozen=True, slots=True)
class SamplingWork:
    """A token of every row, whose logits are f32[few, V], again and again.

    Attributes:
        top_k: 0 = off.
        top_p: 1 = off.
    """

    logits: npt.NDArray[np.float32]
    num_rows: int
    temperature: float
    top_k: int
    top_p: float


Work = LinearWork | AttentionWork | SamplingWork


class GpuPeer(Protocol):
    """Kernels of another project."""

    name: str

    def refusal(self) -> str | None:
        """Return why they cannot be asked here, None where they can."""
        ...

    def seconds(self, work: Work, repeats: int) -> float | None:
        """Return the median time of the work, None where there is no op for it.

        Raises:
            RuntimeError: it did not run; the text says why.
        """
        ...


class TorchPeer:
    """PyTorch's own ops."""

    name = "PyTorch"

    def refusal(self) -> str | None:
        """See GpuPeer."""
        if importlib.util.find_spec("torch") is None:
            return "not installed"
        return None if _torch().cuda.is_available() else "sees no GPU"

    def seconds(self, work: Work, repeats: int) -> float | None:
        """See GpuPeer."""
        torch = _torch()
        try:
            run = self._run_of(torch, work)
            return None if run is None else _seconds(torch, run, repeats)
        except (AttributeError, ImportError, NotImplementedError, TypeError, ValueError) as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        finally:
            torch.cuda.empty_cache()

    def matmul_tflop_per_s(self, repeats: int) -> float | None:
        """Return the rate of the largest product, None where there is a refusal."""
        if self.refusal() is not None:
            return None
        torch = _torch()
        a, b = (torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        return float(2 * _MATMUL_SIZE**3 / _seconds(torch, lambda: torch.matmul(a, b), repeats) / 1e12)

    def _run_of(self, torch: Any, work: Work) -> Run | None:
        if isinstance(work, LinearWork):
            x, weight = (
                torch.randn(count, work.in_features, dtype=torch.bfloat16, device="cuda")
                for count in (work.rows, work.out_features)
            )
            return lambda: torch.nn.functional.linear(x, weight)
        if isinstance(work, SamplingWork):
            return _sampling(torch, work)
        return _attention(torch, work) if work.prefix == 0 else None


class FlashInferPeer(TorchPeer):
    """FlashInfer's kernels over a paged cache, and its sampling without sorting."""

    name = "FlashInfer"

    def refusal(self) -> str | None:
        """See GpuPeer."""
        if importlib.util.find_spec("flashinfer") is None:
            return "not installed"
        return None if (reason := super().refusal()) is None else f"PyTorch: {reason}"

    def _run_of(self, torch: Any, work: Work) -> Run | None:
        if isinstance(work, LinearWork):
            return None
        flashinfer = importlib.import_module("flashinfer")
        if isinstance(work, AttentionWork):
            of_work = _paged_attention if work.prefix == 0 else _cascade_attention
            return of_work(torch, flashinfer, work)
        return _sampling_without_sort(torch, flashinfer.sampling, work)


def _torch() -> Any:
    return importlib.import_module("torch")


def _seconds(torch: Any, run: Run, repeats: int) -> float:
    flushed = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times: list[float] = []
    for _ in range(WARM_UPS + repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed.zero_()
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return max(median(times[WARM_UPS:]), 1e-9)


def _attention(torch: Any, work: AttentionWork) -> Run:
    q, k, v = (
        torch.randn(work.requests, heads, count, work.head_dim, dtype=torch.bfloat16, device="cuda")
        for heads, count in (
            (work.heads, work.rows), (work.kv_heads, work.context), (work.kv_heads, work.context),
        )
    )  # fmt: skip
    # The last rows, not the first, are those at the end of the keys. One sees all of them.
    masks = importlib.import_module("torch.nn.attention.bias")
    mask = None if work.rows == 1 else masks.causal_lower_right(work.rows, work.context)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def _sampling(torch: Any, work: SamplingWork) -> Run:
    logits = _logits(torch, work)

    def drawn(values: Any) -> Any:
        return torch.multinomial(torch.softmax(values / work.temperature, dim=-1), 1)

    def filtered() -> Any:
        if work.top_k > 0:
            values, tokens = torch.topk(logits, work.top_k, dim=-1)
        else:
            values, tokens = torch.sort(logits, dim=-1, descending=True)
        if work.top_p < 1:
            shares = torch.softmax(values / work.temperature, dim=-1)
            values = values.masked_fill(shares.cumsum(dim=-1) - shares >= work.top_p, float("-inf"))
        return tokens.gather(-1, drawn(values))

    if work.temperature == 0:
        return lambda: torch.argmax(logits, dim=-1)
    return filtered if work.top_k > 0 or work.top_p < 1 else lambda: drawn(logits)


def _logits(torch: Any, work: SamplingWork) -> Any:
    return torch.from_numpy(np.resize(work.logits, (work.num_rows, work.logits.shape[1]))).to("cuda")


def _paged_attention(torch: Any, flashinfer: Any, work: AttentionWork) -> Run:
    pages = -(-work.context // _PAGE_SIZE)
    q, k, v, workspace = _paged_inputs(torch, work, work.requests * pages)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    starts, places, last = _pages(torch, work, 0, pages)
    heads = (work.heads, work.kv_heads, work.head_dim, _PAGE_SIZE)
    rows = _starts(torch, work.requests, work.rows)
    wrapper.plan(rows, starts, places, last, *heads, causal=True, q_data_type=torch.bfloat16)
    return lambda: wrapper.run(q, (k, v))


def _cascade_attention(torch: Any, flashinfer: Any, work: AttentionWork) -> Run:
    """Two levels: all rows over the shared pages, then each request's over its own."""
    shared = work.prefix // _PAGE_SIZE
    pages = -(-work.context // _PAGE_SIZE) - shared
    q, k, v, workspace = _paged_inputs(torch, work, shared + work.requests * pages)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
    starts, places, last = _pages(torch, work, shared, pages)
    whole_page = torch.full((1,), _PAGE_SIZE, dtype=torch.int32, device="cuda")
    wrapper.plan(
        [_starts(torch, 1, work.requests * work.rows), _starts(torch, work.requests, work.rows)],
        [_starts(torch, 1, shared), starts],
        [torch.arange(shared, dtype=torch.int32, device="cuda"), places],
        [whole_page, last],
        work.heads,
        work.kv_heads,
        work.head_dim,
        _PAGE_SIZE,
        causal=True,
        q_data_type=torch.bfloat16,
    )
    return lambda: wrapper.run(q, (k, v))


def _paged_inputs(torch: Any, work: AttentionWork, num_pages: int) -> tuple[Any, Any, Any, Any]:
    """Return queries, keys and values in pages, and memory to work in."""
    shape = (num_pages, _PAGE_SIZE, work.kv_heads, work.head_dim)
    k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    q_shape = (work.requests * work.rows, work.heads, work.head_dim)
    q = torch.randn(q_shape, dtype=torch.bfloat16, device="cuda")
    return q, k, v, torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _starts(torch: Any, count: int, step: int) -> Any:
    return torch.arange(count + 1, dtype=torch.int32, device="cuda") * step


def _pages(torch: Any, work: AttentionWork, first: int, pages: int) -> tuple[Any, Any, Any]:
    """Return where each request's pages begin, which they are, from `first` on, and how full the last one is."""
    places = first + torch.randperm(work.requests * pages, device="cuda").to(torch.int32)
    filled = work.context - first * _PAGE_SIZE - (pages - 1) * _PAGE_SIZE
    last = torch.full((work.requests,), filled, dtype=torch.int32, device="cuda")
    return _starts(torch, work.requests, pages), places, last


def _sampling_without_sort(torch: Any, sampling: Any, work: SamplingWork) -> Run | None:
    if work.temperature == 0:
        return None
    logits = _logits(torch, work)

    def probs() -> Any:
        return torch.softmax(logits / work.temperature, dim=-1)

    if work.top_k > 0 and work.top_p < 1:
        return lambda: sampling.top_k_top_p_sampling_from_probs(probs(), work.top_k, work.top_p)
    if work.top_k > 0:
        return lambda: sampling.top_k_sampling_from_probs(probs(), work.top_k)
    if work.top_p < 1:
        return lambda: sampling.top_p_sampling_from_probs(probs(), work.top_p)
    return lambda: sampling.sampling_from_probs(probs())
