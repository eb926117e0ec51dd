"""RequestGroup: the engine requests of one user's request, made one at a time when they are submitted.

What they share is held once, so a group costs what its prompts cost, however many sequences it asks for. Knows no
tokenizer and no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import overload

from fastdeploy_sd.rules.sampling import SEED_LIMIT
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import EMPTY_I32, I32, KvSource, Request, Speculation


@dataclass(frozen=True, slots=True, eq=False)
class RequestGroup(Sequence[Request]):
    """`sampling.n` sequences of every prompt: those of prompt p are requests p*n .. p*n + n-1.

    Attributes:
        request_id: of the whole; with several prompts those of prompt p add "-{p}", with n > 1 sequence i adds "-{i}".
        prompts: i32[P] each.
        max_tokens: resolved, one per prompt.
        seeds: of sequence 0 of each prompt; sequence i has seed + i.
        eos_token_ids .. speculation, client, kv_source, grammar, prediction_token_ids: as in Request.
        output_token_ids: of every request, as in Request; () = none has any.
    """

    request_id: str
    prompts: tuple[I32, ...]
    max_tokens: tuple[int, ...]
    sampling: SamplingParams
    seeds: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    bad_words_token_ids: tuple[tuple[int, ...], ...]
    priority: int
    arrival_time: float
    cache_salt: str
    speculation: Speculation
    client: str = ""
    kv_source: KvSource | None = None
    output_token_ids: tuple[I32, ...] = ()
    grammar: str = ""
    prediction_token_ids: I32 = field(default_factory=lambda: EMPTY_I32)

    def __len__(self) -> int:
        return len(self.prompts) * self.sampling.n

    @overload
    def __getitem__(self, index: int) -> Request: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Request]: ...

    def __getitem__(self, index: int | slice) -> Request | Sequence[Request]:
        """Make request `index`, or those of a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        prompt, sequence = divmod(index, self.sampling.n)
        return Request(
            request_id=self._request_id(prompt, sequence),
            prompt_token_ids=self.prompts[prompt],
            sampling=self.sampling,
            max_tokens=self.max_tokens[prompt],
            seed=(self.seeds[prompt] + sequence) % SEED_LIMIT,
            eos_token_ids=self.eos_token_ids,
            bad_words_token_ids=self.bad_words_token_ids,
            priority=self.priority,
            client=self.client,
            arrival_time=self.arrival_time,
            cache_salt=self.cache_salt,
            speculation=self.speculation,
            output_token_ids=self.output_token_ids[index] if self.output_token_ids else EMPTY_I32,
            kv_source=self.kv_source,
            grammar=self.grammar,
            prediction_token_ids=self.prediction_token_ids,
        )

    def _request_id(self, prompt: int, sequence: int) -> str:
        suffixes = [str(prompt)] if len(self.prompts) > 1 else []
        suffixes += [str(sequence)] if self.sampling.n > 1 else []
        return "-".join([self.request_id, *suffixes])

    @property
    def num_logprobs_per_token(self) -> int:
        """How many entries the output has per token: itself, and the alternatives that are reported with it."""
        return 1 + (self.sampling.logprobs or 0)

    @property
    def max_output_entries(self) -> int:
        """The most entries that all outputs together can have."""
        return sum(self.max_tokens) * self.sampling.n * self.num_logprobs_per_token

    def prompt_of(self, index: int) -> I32:
        """Return the prompt of request `index`."""
        return self.prompts[index // self.sampling.n]
