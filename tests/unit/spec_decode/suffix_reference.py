"""Suffix decoding by its definition: every count is taken by looking at all texts. For tiny texts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

NUM_SHARES = 8
MAX_ANCHORS = 4
MIN_COPY = 6
MAX_CREDIT = 4
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


@dataclass
class Copy:
    """The end of a request's text with replaced tokens put back; () = it is no copy."""

    string: Tokens = ()
    num_agreed: int = 0
    num_recent: int = 0
    credit: int = 1

    def read(self, text: Text, token: int, before: Tokens, after: Tokens, max_context: int) -> None:
        """`before`, `after`: the longest end of the text without and with the token that is in `text`."""
        if not self.string:
            if len(before) < MIN_COPY or after == (*before, token)[-max_context:]:
                return
            self.string, self.num_agreed, self.num_recent = before, len(before), len(before)
        extended = (*self.string, token)[-max_context:]
        agrees = bool(text.ends(extended))
        ends = not agrees and (self.num_recent == 0 or self.num_agreed < MIN_COPY)
        if self.num_recent == 0:
            self.credit = min(MAX_CREDIT, self.credit + 1) if agrees else max(-MAX_CREDIT, self.credit - 1)
        if agrees:
            self.string, self.num_agreed, self.num_recent = extended, self.num_agreed + 1, self.num_recent + 1
        else:
            best = None if ends else text.best(self.string)
            self.string = () if best is None else (*self.string, best)[-max_context:]
            self.num_recent = self.num_recent if ends else 0
        if len(after) >= len(self.string) or (self.num_recent > 0 and len(after) > self.num_recent + 1):
            self.string = ()

    def says_more(self, num_matched: int) -> bool:
        return bool(self.string) and (self.num_recent > 0 or self.credit > 0) and num_matched <= self.num_recent + 1


@dataclass(eq=False)
class Own:
    """A request: its text, what of it matched where, and where its output goes."""

    salt: int
    num_private: int
    end_token_ids: tuple[int, ...]
    first_end: int
    text: Text = field(default_factory=Text)
    match: Tokens = ()
    copy: Copy = field(default_factory=Copy)
    matches: dict[int, Tokens] = field(default_factory=dict)  # by id of the shard
    output: Output = field(default_factory=Output)
    has_ended: bool = False


@dataclass(eq=False)
class Reference:
    max_context: int
    max_factor: float
    min_token_prob: float
    max_outputs: int
    follows_copies: bool
    shards: list[Shard] = field(default_factory=list)  # by last append
    outputs: list[Output] = field(default_factory=list)  # that ever began
    own: dict[int, Own] = field(default_factory=dict)  # by table row

    def of_salt(self, salt: int) -> list[Shard]:
        return [shard for shard in self.shards if shard.salt == salt]

    def num_outputs(self) -> int:
        return sum(output.shard in self.shards for output in self.outputs)

    def begin(self, table_row: int, num_private: int, salt: int, end: tuple[tuple[int, ...], int]) -> None:
        self.own[table_row] = Own(salt, num_private, *end)
        self.own[table_row].text.start()

    def read(self, table_row: int, tokens: list[int]) -> None:
        """Read a row's new tokens; rows are read in their order."""
        own = self.own[table_row]
        for token in tokens:
            self.read_own(own, token)
            own.text.append(0, token)
            for shard in self.of_salt(own.salt):
                match = own.matches.get(id(shard), ())
                own.matches[id(shard)] = shard.text.advance(match, token, self.max_context)
            if own.text.num_tokens > own.num_private and not own.has_ended:
                if own.output.shard is None:
                    for earlier in own.text.sequences[0][: own.num_private][-self.max_context :]:
                        self.share(own.salt, earlier, own.output)
                self.share(own.salt, token, own.output)
                own.has_ended = own.text.num_tokens > own.first_end and token in own.end_token_ids

    def read_own(self, own: Own, token: int) -> None:
        """Go on with the matches in the own text, which does not hold the token yet."""
        before = own.match
        own.match = own.text.advance(before, token, self.max_context)
        if self.follows_copies:
            own.copy.read(own.text, token, before, own.match, self.max_context)

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

    def draft(self, table_row: int, budget: int, prefix: list[int]) -> list[int]:
        own = self.own[table_row]
        own_tail = own.text.sequences[0]
        found = [(own.text, own.match, own_tail, len(own_tail))]
        for shard in reversed(self.of_salt(own.salt)):
            tail = shard.text.sequences[own.output.sequence] if shard is own.output.shard else []
            found.append((shard.text, own.matches.get(id(shard), ()), tail, len(tail)))
        for token in prefix:
            found = [(text, text.advance(match, token, self.max_context), tail, n) for text, match, tail, n in found]
        found.sort(key=lambda source: -len(source[1]))
        ahead = replace(own, copy=replace(own.copy))
        for token in prefix:
            self.read_own(ahead, token)
        if ahead.copy.says_more(len(found[0][1])):
            found.insert(0, (own.text, ahead.copy.string, own_tail, ahead.copy.num_recent))
        best: tuple[float, int, list[int]] = (0.0, 0, [])
        for text, match, tail, num_shared in found:
            anchors = [end for end in text.shorter(match) if text.best(end) is not None]
            for anchor in anchors[:MAX_ANCHORS]:
                max_tokens = min(budget, math.floor(len(anchor) * self.max_factor + 1e-9))
                # Of the tail's own end nothing has followed yet.
                is_open = not prefix and len(anchor) <= num_shared
                tokens, score = self._follow(text, anchor, max_tokens, tuple(tail), is_open)
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
                # The end of the own text: continue after its longest end that has a continuation.
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
