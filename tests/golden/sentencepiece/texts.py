"""The seeded texts that the SentencePiece tests and their oracle share; standard library only."""

from __future__ import annotations

import random

_PARTS = (
    *(
        "hello",
        "world",
        "def f(x):",
        "return",
        "1234",
        "\u4f60\u597d",
        "\u4e16\u754c",
        "Z\u00fcrich",
        "e\u0301",
        "\u00e9",
    ),
    *(
        "\uff21\uff22",
        "\u2460",
        "\ufb01",
        "\U0001f680",
        "\U0001f9d1\u200d\U0001f680",
    ),
    *(
        "\u0391\u0345",
        "\ud55c\uae00",
        "\u1112\u1161\u11ab",
    ),
    *(
        " ",
        " ",
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        "\u3000",
        "\xa0",
        "\u200b",
        "\u2581",
        "\u2581\u2581",
        "\x00",
        "\x1c",
    ),
    *(
        "<s>",
        "</s>",
        "<unk>",
        "<u>",
        "<|user|>",
        "<|end|>",
        "<think>",
        "</think>",
        "<mask:1>",
        "<mask:",
        "<|u",
        "|>",
        "<",
        ">",
    ),
    *("\uff1cs\uff1e", "<S>", "<0x41>", ".", ",", "!", "a", "b", "x", "the ", " the", "foo_bar", "ABC"),
)


def texts(count: int) -> list[str]:
    """Return `count` texts of 0 to 11 parts, the same ones every time."""
    source = random.Random(45)
    made = []
    for _ in range(count):
        parts = [_PARTS[int(source.random() * len(_PARTS))] for _ in range(int(source.random() * 12))]
        if source.random() < 0.3:
            parts.append(chr(0x20 + int(source.random() * 0xD7E0)))
        made.append("".join(parts))
    return made
