"""Prompts for the counting checkpoint, and what every peer must answer. Knows no peer.

random    tokens of the count in random order; the answer counts on from the last one
copy      a stretch of the count in which some tokens were changed, then its beginning once more: the answer is
          the stretch with the changes undone, as in a chat that asks for a corrected text
"""

from __future__ import annotations

import random

from benchmarks.peers.protocol import TokenIds

# The tokens of the count. Those below may be special or single bytes; those above have no text in the tokenizer.
FIRST_TOKEN, NUM_TOKENS = 512, 3584
COPY_LEN = 256
# One token in so many of a copied stretch is changed.
EDIT_DISTANCE = 24
_BEGINNING_LEN = 8


def next_token(token_id: int) -> int:
    """What the model answers to a token of the count."""
    return FIRST_TOKEN + (token_id - FIRST_TOKEN + 1) % NUM_TOKENS


def random_prompt(length: int, seed: int) -> TokenIds:
    """Return a prompt that shares no prefix with that of another seed, but by chance."""
    rng = random.Random(seed)
    return [FIRST_TOKEN + rng.randrange(NUM_TOKENS) for _ in range(length)]


def copy_prompt(seed: int) -> TokenIds:
    """Return COPY_LEN tokens to be copied and the first few of the copy.

    Up to a dozen neighbouring seeds have no token of the count in common: no answer helps to guess another one.
    """
    rng = random.Random(seed)
    stretch = counted(FIRST_TOKEN + seed * (COPY_LEN + _BEGINNING_LEN) % NUM_TOKENS, COPY_LEN)
    beginning = stretch[:_BEGINNING_LEN]
    for begin in range(_BEGINNING_LEN, COPY_LEN - EDIT_DISTANCE, EDIT_DISTANCE):
        stretch[begin + rng.randrange(EDIT_DISTANCE)] = FIRST_TOKEN + rng.randrange(NUM_TOKENS)
    return stretch + beginning


def counted(token_id: int, length: int) -> TokenIds:
    """Return `length` tokens of the count from `token_id` on."""
    tokens = []
    for _ in range(length):
        tokens.append(token_id)
        token_id = next_token(token_id)
    return tokens


def answer(prompt: TokenIds, length: int) -> TokenIds:
    """Return what greedy decoding must give."""
    return counted(next_token(prompt[-1]), length)
