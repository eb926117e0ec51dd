"""Suffix decoding by its definition: every count is taken by looking at all texts. For tiny texts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

NUM_SHARES = 8
MAX_ANCHORS = 4
Tokens = tuple[int, ...]


@dataclass(eq=False)
class Text:
    """Sequences that grow, and when each token came."""

    sequences: list[list[int]] = field(default_factory=list)
    times: list[list[int]] = field(default_factory=list)
    num_tokens: int = 0

    def start(self) -> int:
        self.sequences.append([])
        self.times.append([])
        return len(self.sequences) - 1

    def append(self, sequence: int, token: int) -> None:
        self.sequences[sequence].append(token)
        self.times[sequence].append(self.num_tokens)
        self.num_tokens += 1

    def ends(self, string: Tokens) -> frozenset[int]:
        """Times of the last token of every occurrence."""
        n = len(string)
        return frozenset(
            times[i + n - 1]
            for tokens, times in zip(self.sequences, self.times, strict=True)
            for i in range(len(tokens) - n + 1)
            if tuple(tokens[i : i + n]) == string
        )

    def best(self, string: Tokens) -> int | None:
        """The most frequent continuation, of equals the one that occurred last."""
        continuations = {token: self.ends((*string, token)) for tokens in self.sequences for token in tokens}
        ranked = [(len(ends), max(ends), token) for token, ends in continuations.items() if ends]
        return max(ranked)[2] if ranked else None

    def shorter(self, string: Tokens) -> Iterator[Tokens]:
        """The ends of a string, itself first, each the longest of those that occur at the same places."""
        last: frozenset[int] | None = None
        for i in range(len(string)):
            ends = self.ends(string[i:])
            if ends != last:
                yield string[i:]
            last = ends

    def advance(self, match: Tokens, token: int, max_context: int) -> Tokens:
        extended = (*match, token)[-max_context:]
        while extended and not self.ends(extended):
            extended = extended[1:]
        return extended


@dataclass(eq=False)
class Shard:
    salt: int
    text: Text = field(default_factory=Text)
    num_begun: int = 0


@dataclass(eq=False)
class Output:
    """Where the newest piece of a shared output is."""

    shard: Shard | None = None
    sequence: int = 0


@dataclass(eq=False)
class Own:
    """A request: its text, what of it matched where, and where its output goes."""

    salt: int
    num_private: int
    end_token_ids: tuple[int, ...]
    first_end: int
    text: Text = field(default_factory=Text)
    match: Tokens = ()
    matches: dict[int, Tokens] = field(default_factory=dict)  # by id of the shard
    output: Output = field(default_factory=Output)
    has_ended: bool = False


@dataclass(eq=False)
class Reference:
    max_context: int
    max_factor: float
    min_token_prob: float
    max_outputs: int
    shards: list[Shard] = field(default_factory=list)  # by last append
    outputs: list[Output] = field(default_factory=list)  # that ever began
    own: dict[int, Own] = field(default_factory=dict)  # by slot

    def of_salt(self, salt: int) -> list[Shard]:
        return [shard for shard in self.shards if shard.salt == salt]

    def num_outputs(self) -> int:
        return sum(output.shard in self.shards for output in self.outputs)

    def begin(self, slot: int, num_private: int, salt: int, end: tuple[tuple[int, ...], int]) -> None:
        self.own[slot] = Own(salt, num_private, *end)
        self.own[slot].text.start()

    def read(self, slot: int, tokens: list[int]) -> None:
        """Read a row's new tokens; rows are read in their order."""
        own = self.own[slot]
        for token in tokens:
            own.match = own.text.advance(own.match, token, self.max_context)
            own.text.append(0, token)
            for shard in self.of_salt(own.salt):
                match = own.matches.get(id(shard), ())
                own.matches[id(shard)] = shard.text.advance(match, token, self.max_context)
            if own.text.num_tokens > own.num_private and not own.has_ended:
                self.share(own.salt, token, own.output)
                own.has_ended = own.text.num_tokens > own.first_end and token in own.end_token_ids

    def share(self, salt: int, token: int, output: Output) -> None:
        """Append an output token, in the salt's youngest shard."""
        if self.max_outputs == 0:
            return
        mine = self.of_salt(salt)
        if output.shard is None:
            while 0 < self.max_outputs <= self.num_outputs():
                del self.shards[0]
            mine = self.of_salt(salt)
            share = max(1, self.max_outputs // NUM_SHARES)
            if not mine or (self.max_outputs > 0 and mine[-1].num_begun >= share):
                mine = [Shard(salt)]
                self.shards += mine
            mine[-1].num_begun += 1
            self.outputs.append(output)
        elif output.shard not in self.shards and 0 < self.max_outputs <= self.num_outputs():
            return
        elif not mine:
            mine = [Shard(salt)]
            self.shards += mine
        shard = mine[-1]
        if output.shard is not shard:
            output.shard, output.sequence = shard, shard.text.start()
        shard.text.append(output.sequence, token)
        self.shards.remove(shard)
        self.shards.append(shard)

    def draft(self, slot: int, budget: int, prefix: list[int]) -> list[int]:
        own = self.own[slot]
        found = [(own.text, own.match, own.text.sequences[0])]
        for shard in reversed(self.of_salt(own.salt)):
            tail = shard.text.sequences[own.output.sequence] if shard is own.output.shard else None
            found.append((shard.text, own.matches.get(id(shard), ()), tail))
        for token in prefix:
            found = [(text, text.advance(match, token, self.max_context), tail) for text, match, tail in found]
        found.sort(key=lambda source: -len(source[1]))
        best: tuple[float, int, list[int]] = (0.0, 0, [])
        for text, match, tail in found:
            anchors = [end for end in text.shorter(match) if text.best(end) is not None]
            for anchor in anchors[:MAX_ANCHORS]:
                max_tokens = min(budget, math.floor(len(anchor) * self.max_factor + 1e-9))
                is_open = tail is not None and not prefix and len(anchor) <= len(tail)
                tokens, score = self._follow(text, anchor, max_tokens, tuple(tail or ()), is_open)
                if score > best[0] or (score == best[0] > 0 and len(anchor) > best[1]):
                    best = (score, len(anchor), tokens)
        return best[2]

    def _follow(
        self, text: Text, string: Tokens, max_tokens: int, tail: Tokens, is_open: bool
    ) -> tuple[list[int], float]:
        tokens: list[int] = []
        probability, score = 1.0, 0.0
        while len(tokens) < max_tokens:
            token = text.best(string)
            if token is None and tail and text.ends(string) == text.ends(tail):
                # The end of the own text: go on behind its longest end that has a continuation.
                string = next((end for end in text.shorter(string) if text.best(end) is not None), ())
                token = text.best(string) if string else None
                is_open = True
            if token is None:
                break
            num_continued = max(1, len(text.ends(string)) - is_open)
            string, is_open = (*string, token), False
            probability *= min(1.0, len(text.ends(string)) / num_continued)
            if probability < self.min_token_prob:
                break
            tokens.append(token)
            score += probability
        return tokens, score
