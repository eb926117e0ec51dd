"""What every client program says, and how it reports: one JSON object on standard output.

A report has `first`, the answer to the first question; `seconds`, the answer to the second one for each way in which
the client carries the conversation on; `streamed`, the first answer once more as a stream; and `usage`, the prompt
tokens of each second turn, where the client tells them. Clients that have an exception of their own for a conversation
that is too long report how many of OVERFLOWS raised it. Runs in the clients' environments: standard library only.
"""

import json
import sys
from typing import Any

MODEL = "demo"
FIRST = "Write a function that adds two numbers."
SECOND = "Now one that multiplies them."
MAX_TOKENS = 64
STOP = "\n"  # some clients refuse an answer that was cut off
API_KEY = "none"

# What exceeds the context: a prompt by a little, one by far, and one that leaves too little room.
OVERFLOWS: list[tuple[str, dict[str, Any]]] = [
    ("a b " * 5000, {}),
    ("a b " * 200_000, {}),
    ("a", {"max_tokens": 100_000}),
]


def base_url() -> str:
    """The server's /v1, from the command line."""
    return sys.argv[1] + "/v1"


def report(
    first: object, seconds: dict[str, Any], streamed: object, usage: dict[str, Any] | None = None, **more: object
) -> None:
    """Print the report."""
    print(json.dumps({"first": first, "seconds": seconds, "streamed": streamed, "usage": usage or {}, **more}))
