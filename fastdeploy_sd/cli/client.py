"""`fastdeploy-sd chat` and `complete`: stream answers of a running server to the terminal.

On a terminal an answer is followed by how fast it was, and Ctrl-C stops an answer, not the conversation.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

from fastdeploy_sd.cli.arguments import Parser
from fastdeploy_sd.cli.remote_server import Piece, RemoteServer
from fastdeploy_sd.errors import ConfigError

KEY_VARIABLE = "FDSD_API_KEY"
_HOST, _PORT = "127.0.0.1", 8000
_HINTS = "Ctrl-C stops an answer, Ctrl-D ends the conversation."


def chat(argv: Sequence[str]) -> int:
    """Answer one message, or hold a conversation when none is given (end of input ends it).

    In a conversation Ctrl-C ends the answer that is being given; what there is of it stays in the history. Raises
    ConfigError: the options make no sense; FdsdError: the server cannot be reached or reports an error.
    """
    parser = _parser("chat", "Talk to a running server. Without MESSAGE: a conversation, ended by end of input.")
    parser.add_argument("message", nargs="?", metavar="MESSAGE", help="what to say; - reads standard input")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    args = parser.parse_args(argv)
    messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    is_conversation = args.message is None
    with RemoteServer(_url(args), args.api_key) as server:
        body = {**_sampling(args), "model": args.model or server.first_model()}
        for content in _said(args.message):
            messages.append({"role": "user", "content": content})
            pieces = server.stream("/v1/chat/completions", {**body, "messages": messages})
            messages.append({"role": "assistant", "content": _show(pieces, may_stop=is_conversation)})
    return 0


def complete(argv: Sequence[str]) -> int:
    """Print a prompt's continuation. Raises ConfigError and FdsdError as `chat` does."""
    parser = _parser("complete", "Let a running server continue a text.")
    parser.add_argument("prompt", metavar="PROMPT", help="the text; - reads standard input")
    args = parser.parse_args(argv)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    with RemoteServer(_url(args), args.api_key) as server:
        body = {**_sampling(args), "model": args.model or server.first_model(), "prompt": prompt}
        _show(server.stream("/v1/completions", body))
    return 0


def _parser(name: str, text: str) -> argparse.ArgumentParser:
    parser = Parser(f"fastdeploy-sd {name}", text)
    parser.add_argument("--host", metavar="NAME", help=f"where the server listens (default: {_HOST})")
    parser.add_argument("--port", type=int, metavar="N", help=f"its port (default: {_PORT})")
    parser.add_argument("--url", help=f"both at once, as in http://{_HOST}:{_PORT} or https://example.org")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get(KEY_VARIABLE),
        help=f"bearer token (default: ${KEY_VARIABLE})",
    )
    parser.add_argument("--model", metavar="NAME", help="model name (default: the server's first)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (default: the server's)")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the server's)")
    parser.add_argument("--seed", type=int, metavar="N", help="makes a sampled answer repeatable")
    return parser


def _url(args: argparse.Namespace) -> str:
    if args.url is None:
        host = args.host or _HOST
        return f"http://{f'[{host}]' if ':' in host else host}:{_PORT if args.port is None else args.port}"
    if args.host is not None or args.port is not None:
        raise ConfigError("url: expected without host and port, got both", param="url")
    url: str = args.url
    return url


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Only what was given, so that the server's defaults hold for the rest."""
    given = {name: getattr(args, name) for name in ("max_tokens", "temperature", "seed")}
    wanted: dict[str, Any] = {name: value for name, value in given.items() if value is not None} | {"stream": True}
    return wanted | ({"stream_options": {"include_usage": True}} if sys.stderr.isatty() else {})


def _said(message: str | None) -> Iterator[str]:
    if message == "-":
        yield sys.stdin.read()
    elif message is not None:
        yield message
    else:
        yield from filter(str.strip, _lines())


def _lines() -> Iterator[str]:
    """Yield what is typed, a line at a time, with the editing keys and the history of a terminal."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    import readline  # noqa: F401 (makes input() an editor)

    print(_HINTS, file=sys.stderr)
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        yield line


def _show(pieces: Generator[Piece, None, None], may_stop: bool = False) -> str:
    """Print an answer as it comes and return it; `may_stop`: Ctrl-C ends the answer, and not more."""
    answer, speed = "", _Speed()
    with closing(pieces):  # a stopped answer's connection too: that is how the server hears of it
        try:
            for piece in pieces:
                print(piece.text, end="", flush=True)
                answer += piece.text
                speed.note(piece)
        except KeyboardInterrupt:
            print("\n[stopped]", file=sys.stderr)
            if not may_stop:
                raise
            return answer
    print()
    if sys.stderr.isatty():
        print(speed.text, file=sys.stderr)
    return answer


class _Speed:
    """How long an answer's first text took, and how fast the rest came."""

    def __init__(self) -> None:
        self._start = self._first = self._last = time.perf_counter()
        self._num_texts = 0
        self._num_tokens: int | None = None

    def note(self, piece: Piece) -> None:
        if piece.num_tokens is not None:
            self._num_tokens = piece.num_tokens
        if not piece.text:
            return
        self._last = time.perf_counter()
        if self._num_texts == 0:
            self._first = self._last
        self._num_texts += 1

    @property
    def text(self) -> str:
        first = f"first text after {self._first - self._start:.2f} s"
        if self._num_tokens is None:
            return f"[{first}]"
        seconds = self._last - self._first
        speed = f", {(self._num_tokens - 1) / seconds:.1f} tokens/s" if self._num_tokens > 1 and seconds > 0 else ""
        return f"[{self._num_tokens} tokens{speed}, {first}]"
