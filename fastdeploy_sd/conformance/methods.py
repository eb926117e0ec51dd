"""The columns of the matrix: how drafts are made, and what single requests wish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.errors import ConfigError, suggest
from fastdeploy_sd.spec_decode.proposer import MakeProposer, create_proposer
from fastdeploy_sd.types import Request, Speculation

METHOD_NAMES = ("naive", "ngram", "suffix", "mtp", "mtp-ngram", "mtp-suffix", "mixed")
_HYBRIDS = {"mtp-ngram": "with_ngram", "mtp-suffix": "with_suffix"}
_MIN_HYBRID_TOKENS = 2
# Drafts on the slightest ground: more of them are judged, and wrong ones are as good a test as right ones.
_EAGER = SpeculativeConfig(
    min_ngram_size=1,
    max_ngram_size=3,
    ngram_max_spec_factor=8.0,
    suffix_decoding_max_spec_factor=8.0,
    suffix_decoding_min_token_prob=0.0,
)


@dataclass(frozen=True, slots=True)
class Method:
    """One way of drafting.

    Attributes:
        name: heading of the column.
        speculative: what the server is configured with.
        make_proposer: makes what drafts; the tests have others than the configured method.
        wishes: request i asks for wishes[i % n]; () = no request asks for anything.
    """

    name: str
    speculative: SpeculativeConfig
    make_proposer: MakeProposer = create_proposer
    wishes: tuple[Speculation, ...] = ()

    @property
    def num_speculative_tokens(self) -> int:
        """Drafts per request and step at most."""
        return self.speculative.num_speculative_tokens

    @property
    def is_drafting(self) -> bool:
        """Whether it may draft at all."""
        return self.num_speculative_tokens > 0

    def apply(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests with the method's wishes."""
        if not self.wishes:
            return list(requests)
        return [replace(r, speculation=self.wishes[i % len(self.wishes)]) for i, r in enumerate(requests)]


NAIVE = Method("naive", SpeculativeConfig())


def standard_methods(
    names: Sequence[str],
    num_speculative_tokens: Sequence[int],
    mtp: SpeculativeConfig | None = None,
    has_mtp: bool = False,
) -> list[Method]:
    """Return the columns for some of METHOD_NAMES.

    Args:
        names: "mixed" lets the requests of one batch choose among methods and lengths. It has one column, of the
            largest number, which is also MTP's number of steps there: the checkpoint must have layers for it.
        num_speculative_tokens: every method that drafts gets a column for each; a hybrid, which needs two drafts, for
            those of at least 2.
        mtp: says where the MTP weights are and in which formats they and their head are; None = the defaults.
        has_mtp: whether "mixed" has MTP among its methods; it does too if one of the names uses it.

    Raises:
        ConfigError: an unknown name, or a number below 1.
    """
    for name in names:
        if name not in METHOD_NAMES:
            known = ", ".join(METHOD_NAMES)
            raise ConfigError(f"methods: expected some of {known}, got {name!r}{suggest(name, METHOD_NAMES)}")
    if min(num_speculative_tokens, default=1) < 1:
        raise ConfigError(f"num_speculative_tokens: expected at least 1, got {min(num_speculative_tokens)}")
    weights = mtp or SpeculativeConfig()
    base = replace(
        _EAGER,
        model=weights.model,
        quantization=weights.quantization,
        draft_head_quantization=weights.draft_head_quantization,
    )
    methods = []
    for name in dict.fromkeys(names):
        if name == "naive":
            methods.append(NAIVE)
        elif name == "mixed":
            methods.append(_mixed(max(num_speculative_tokens), base, has_mtp or any("mtp" in n for n in names)))
        else:
            methods += [_column(name, k, base) for k in num_speculative_tokens if _has_room(name, k)]
    return methods


def _has_room(name: str, k: int) -> bool:
    return name not in _HYBRIDS or k >= _MIN_HYBRID_TOKENS


def _column(name: str, k: int, base: SpeculativeConfig) -> Method:
    values: dict[str, Any] = {"method": name, "num_speculative_tokens": k}
    if name == "mtp":
        values["num_model_steps"] = k
    elif name in _HYBRIDS:
        values |= {"method": "mtp", "mtp_strategy": _HYBRIDS[name], "num_model_steps": k // 2}
    return Method(f"{name} k={k}", replace(base, **values))


def _mixed(k: int, base: SpeculativeConfig, has_mtp: bool) -> Method:
    name = "mtp" if has_mtp else "suffix"
    wishes = (
        Speculation(),
        Speculation(method="ngram"),
        Speculation(enabled=False),
        Speculation(method="suffix", num_speculative_tokens=1),
        Speculation(method="naive"),
    )
    return replace(_column(name, k, base), name=f"mixed k={k}", wishes=wishes)
