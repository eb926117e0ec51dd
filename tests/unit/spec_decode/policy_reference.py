"""The draft policy written out plainly, as the native one is defined. See custom_ops/cpu/drafters/draft_policy.h."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

# What a source offers for a row: (token_ids, probabilities, (matched, recent, origin)).
OfferedRow = tuple[list[int], list[float], tuple[int, int, int]]
_LENGTHS = [1, 2, 3, 4, 5, 8, 12, 20, 40]
_POSITIONS = [1, 2, 3, 4, 6, 9, 14]
_PROBS = [0.1, 0.2, 0.34, 0.45, 0.55, 0.7, 0.8, 0.88, 0.94]
_U32 = 0xFFFFFFFF
# The table whose cells are about one request's tokens each.
_OF_REQUEST = 4


def _squash(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def _logit(p: float) -> float:
    return float(np.float32(math.log(p / (1.0 - p))))


def _clamp(p: float, least: float) -> float:
    return min(max(p, least), 1.0 - least)


@dataclass
class Cell:
    probability: float
    count: int = 0
    owner: int = 0


@dataclass
class Prediction:
    cells: list[Cell]
    weights: list[float]
    request: int
    probability: float = 0.0

    def mix(self) -> float:
        own = self.cells[_OF_REQUEST]
        known = list(self.cells)
        if own.owner != self.request:
            known[_OF_REQUEST] = Cell(0.5)
        x = sum(w * _logit(c.probability) for w, c in zip(self.weights, known, strict=True))
        return _clamp(_squash(x), 0.001)

    def learn(self, is_right: bool) -> None:
        own = self.cells[_OF_REQUEST]
        if own.owner != self.request:
            own.probability, own.count, own.owner = 0.5, 0, self.request
        step = 0.015 * (is_right - self.mix())
        for i, cell in enumerate(self.cells):
            self.weights[i] += step * _logit(cell.probability)
            rate = max(1.0 / (cell.count + 1.6), 1.0 / 200.0)
            cell.probability = _clamp(cell.probability + rate * (is_right - cell.probability), 0.002)
            cell.count = min(cell.count + 1, 200)


class Model:
    def __init__(self, prior_logits: Sequence[float]) -> None:
        self.prior_logits = prior_logits
        self.cells: dict[tuple[int, ...], Cell] = {}
        self.weights: dict[tuple[int, int], list[float]] = {}

    def _cell(self, key: tuple[int, ...], logit: float | None) -> Cell:
        if key not in self.cells:
            self.cells[key] = Cell(0.5 if logit is None else _clamp(_squash(logit), 0.002))
        return self.cells[key]

    def predict(
        self, source: int, i: int, *, evidence: tuple[int, int, int], agreement: int, prob: float, token: int,
        request: int, rate: float,
    ) -> Prediction:  # fmt: skip
        matched, recent, origin = evidence
        length, recent_length = bisect_right(_LENGTHS, matched), bisect_right(_LENGTHS, recent)
        position, q, first = bisect_right(_POSITIONS, i), bisect_right(_PROBS, prob), min(i, 3)
        rate_bucket = min(7, int(rate * 8))
        kind = 2 * origin + (recent < matched)

        def prior(length: int, position: int) -> float:
            of_agreement = (0.0, 0.8, -0.5)[agreement]
            return -1.2 + 0.25 * length + 0.35 * min(position, 6) + of_agreement + self.prior_logits[source]

        of_prob = 1.2 * ((q + 0.5) / 10 - 0.5)
        hashed = ((token * 2654435761) & _U32) ^ ((request * 2246822519) & _U32)
        hashed_by_source = ((token * 2654435761) & _U32) ^ ((source * 2246822519) & _U32)
        cells = [
            self._cell((0, source, agreement, length, position), prior(length, position)),
            self._cell((1, source, agreement, q, first, kind), prior(4, first) + of_prob),
            self._cell(
                (2, source, agreement, rate_bucket, length // 2, first),
                prior(2 * (length // 2), first) + 0.3 * (rate_bucket - 3.5),
            ),
            self._cell((3, source, agreement, recent_length, q), prior(recent_length, 1) + of_prob),
            self._cell((_OF_REQUEST, hashed >> 18), None),
            self._cell((5, hashed_by_source >> 18), None),
        ]
        made = Prediction(cells, self.weights.setdefault((source, position), [0.22] * 6), request)
        made.probability = made.mix()
        return made


@dataclass
class Offer:
    source: int
    begin: int
    token_ids: list[int]
    predictions: list[Prediction]
    num_prefix: int
    wanted: list[float]
    num_scored: int = 0


@dataclass
class Row:
    request: int
    rates: list[float]
    offers: list[Offer] = field(default_factory=list)


@dataclass
class Chain:
    row: int
    source: int
    accept_probs: list[float]
    predictions: list[Prediction]
    num_certain: int = 0


class ReferencePolicy:
    """`asked`: the sources whose offers are drafters'; the caller writes those of the others."""

    def __init__(self, max_draft_len: int, prior_logits: Sequence[float], asked: Sequence[int] = ()) -> None:
        self.max_draft_len = max_draft_len
        self.asked = frozenset(asked)
        self.num_sources = len(prior_logits)
        self.model = Model(prior_logits)
        self.rows: dict[int, Row] = {}
        self.last_rates = [0.5] * self.num_sources
        self.num_requests = 0
        self.num_decisions = 0
        self.scored: list[tuple[int, float, bool]] = []
        self.accept_prob, self.num_right = 20.0, 20.0 / 1.05  # of drafts that were chosen

    def begin(self, table_row: int) -> None:
        self.rows[table_row] = Row(self.num_requests, [0.5 * rate + 0.25 for rate in self.last_rates])
        self.num_requests += 1

    def decide(  # noqa: PLR0917 (what a step is)
        self,
        table_rows: Sequence[int],
        texts: Sequence[Sequence[int]],
        max_draft_len: Sequence[int],
        offers: Sequence[Sequence[OfferedRow]],
        num_outputs: int,
        times: Sequence[float],
        prefixes: Sequence[list[int]],
        least_gain: float = 1.0,
    ) -> list[tuple[int, list[int]]]:
        """`offers[r][s]`. Returns (source, drafts) of every row, its prefix first; source -1 where none offers any."""
        for table_row, text in zip(table_rows, texts, strict=True):
            row = self.rows[table_row]
            row.offers = [offer for offer in row.offers if self._score(row, offer, text)]
        chains = self._chains(table_rows, max_draft_len, offers, prefixes)
        calibration = min(max(self.num_right / self.accept_prob, 0.5), 1.0)
        counts = fill(chains, num_outputs, times, calibration, least_gain)
        chosen: list[tuple[int, list[int]]] = [(-1, [])] * len(table_rows)
        for chain, count in zip(chains, counts, strict=True):
            if count:
                offered = offers[chain.row][chain.source][0] if chain.source >= 0 else []
                chosen[chain.row] = chain.source, (prefixes[chain.row] + offered)[:count]
        num_left = 16 if self._has_many_offers(table_rows) else 64
        for i in range(len(chains)):
            c = (self.num_decisions + i) % len(chains)
            chain = chains[c]
            row, prefix = self.rows[table_rows[chain.row]], prefixes[chain.row]
            if chain.source < 0:
                continue
            if num_left > 0 and (counts[c] or sum(offer.source == chain.source for offer in row.offers) < 4):
                token_ids = (prefix + offers[chain.row][chain.source][0])[: len(chain.accept_probs)]
                wanted = chain.accept_probs[len(prefix) : counts[c]]
                offer = Offer(chain.source, len(texts[chain.row]), token_ids, chain.predictions, len(prefix), wanted)
                row.offers.append(offer)
                num_left -= len(token_ids)
        self.num_decisions += 1
        return chosen

    def _score(self, row: Row, offer: Offer, text: Sequence[int]) -> bool:
        while offer.num_scored < len(offer.token_ids):
            i = offer.num_scored
            if offer.begin + i >= len(text):
                return True
            is_right = text[offer.begin + i] == offer.token_ids[i]
            if i < offer.num_prefix:
                if not is_right:
                    return False
                offer.num_scored += 1
                continue
            i -= offer.num_prefix
            self.scored.append((offer.source, offer.predictions[i].probability, is_right))
            offer.predictions[i].learn(is_right)
            if i < 3:
                row.rates[offer.source] += 0.1 * (is_right - row.rates[offer.source])
                self.last_rates[offer.source] += 0.02 * (is_right - self.last_rates[offer.source])
            if not is_right:
                if i < len(offer.wanted):
                    self._calibrate(sum(offer.wanted), i)
                return False
            offer.num_scored += 1
            if i + 1 == len(offer.wanted):
                self._calibrate(sum(offer.wanted), i + 1)
        return False

    def _calibrate(self, accept_prob: float, num_right: int) -> None:
        kept = 100.0 / (100.0 + accept_prob)
        self.accept_prob = kept * self.accept_prob + accept_prob
        self.num_right = kept * self.num_right + num_right

    def _chains(
        self,
        table_rows: Sequence[int],
        max_draft_len: Sequence[int],
        offers: Sequence[Sequence[OfferedRow]],
        prefixes: Sequence[list[int]],
    ) -> list[Chain]:
        chains: list[Chain] = []
        is_one_each = self._has_many_offers(table_rows)
        num_left, num_chains_left = 512, len(table_rows) * self.num_sources
        if is_one_each:
            num_left, num_chains_left = 256, len(table_rows)
        for r, table_row in enumerate(table_rows):
            for s in [_best_offer(offers[r], self.asked)] if is_one_each else range(self.num_sources):
                share = max(1, num_left // num_chains_left)
                num_chains_left -= 1
                count = min(share, len(offers[r][s][0]), max_draft_len[r], self.max_draft_len)
                if count:
                    chains.append(self._chain(r, s, self.rows[table_row], offers[r], count))
                    num_left -= len(chains[-1].accept_probs)
                    chains[-1].accept_probs[:0] = [1.0] * len(prefixes[r])
                    chains[-1].num_certain = len(prefixes[r])
            if prefixes[r] and not any(chain.row == r for chain in chains):
                chains.append(Chain(r, -1, [1.0] * len(prefixes[r]), [], len(prefixes[r])))
        return chains

    def _has_many_offers(self, table_rows: Sequence[int]) -> bool:
        return len(table_rows) * self.num_sources > 256

    def _chain(self, r: int, s: int, row: Row, offers: Sequence[OfferedRow], count: int) -> Chain:
        token_ids, probs, evidence = offers[s]
        chain = Chain(r, s, [], [])
        accept_prob = 1.0
        for i in range(count):
            if accept_prob <= 0.02:
                break
            made = self.model.predict(
                s, i, evidence=evidence, agreement=_agreement(offers, s, i), prob=probs[i], token=token_ids[i],
                request=row.request, rate=row.rates[s],
            )  # fmt: skip
            accept_prob *= made.probability
            chain.predictions.append(made)
            chain.accept_probs.append(accept_prob)
        return chain


def _best_offer(offers: Sequence[OfferedRow], asked: frozenset[int]) -> int:
    """What the caller wrote, then the longest match, then the last source."""
    made = [s for s, (token_ids, _, _) in enumerate(offers) if token_ids]
    return max(made, key=lambda s: (s not in asked, offers[s][2][0], s), default=0)


def _agreement(offers: Sequence[OfferedRow], source: int, i: int) -> int:
    own = offers[source][0]
    found = 0
    for s, (other, _, _) in enumerate(offers):
        if s == source or not other:
            continue
        differs = any(a != b for a, b in zip(own[: i + 1], other, strict=False))
        if not differs and i < len(other):
            return 1
        found = 2 if differs else found
    return found


def fill(
    chains: Sequence[Chain], num_outputs: int, times: Sequence[float], calibration: float, least_gain: float
) -> list[int]:
    """How many drafts of each chain go into the step."""
    rate = certain_rate = num_outputs / times[0]
    counts = [0] * len(chains)
    most = min(len(times) - 1, sum(len(chain.accept_probs) for chain in chains))
    if most == 0:
        return counts
    usual = min(most, max(4, len({chain.row for chain in chains})))
    drafts: list[tuple[int, float]] = []
    num_drafts = num_certain = 0
    for _ in range(2):
        price = rate / calibration * (times[usual] - times[0]) / usual
        best: dict[int, tuple[float, int]] = {}
        for c, chain in enumerate(chains):
            gain = sum(s - price for s in chain.accept_probs if s > price)
            if chain.row not in best or gain > best[chain.row][0]:
                best[chain.row] = gain, c
        drafts = [(c, s) for _, c in best.values() for s in chains[c].accept_probs]
        drafts.sort(key=lambda draft: -int(draft[1] * 1023))
        drafts = drafts[:most]
        total, rate, num_drafts = 0.0, num_outputs / times[0], 0
        certain_rate, num_certain = rate, 0
        num_all_certain = min(most, sum(chains[c].num_certain for _, c in best.values()))
        for d, (_, accept_prob) in enumerate(drafts):
            total += 1.0 if d < num_all_certain else accept_prob * calibration
            if (num_outputs + total) / times[d + 1] > rate:
                rate, num_drafts = (num_outputs + total) / times[d + 1], d + 1
            if d + 1 == num_all_certain:
                certain_rate, num_certain = rate, num_drafts
        usual = num_drafts or usual
    if rate < least_gain * certain_rate:
        num_drafts = num_certain
    for c, _ in drafts[:num_drafts]:
        counts[c] += 1
    return counts
