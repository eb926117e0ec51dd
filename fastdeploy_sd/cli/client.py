"""`fastdeploy-sd chat` and `complete`: stream answers of a running server to the terminal.

Speaks the public HTTP API only; any OpenAI-compatible server will do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx

from fastdeploy_sd.cli.arguments import Parser
from fastdeploy_sd.errors import ConfigError, FdsdError, Unavailable

KEY_VARIABLE = "FDSD_API_KEY"
CONNECT_TIMEOUT_S = 10.0
_EVENT = "data: "
_END = "[DONE]"


def chat(argv: Sequence[str]) -> int:
    """Answer one message, or hold a conversation when none is given (end of input ends it).

    Raises:
        ConfigError: the options make no sense.
        FdsdError: the server cannot be reached or reports an error.
    """
    parser = _parser("chat", "Talk to a running server. Without MESSAGE: a conversation, ended by end of input.")
    parser.add_argument("message", nargs="?", metavar="MESSAGE", help="what to say; - reads standard input")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    args = parser.parse_args(argv)
    messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    with _Server(args.url, args.api_key) as server:
        body = {**_sampling(args), "model": args.model or server.first_model()}
        for content in _said(args.message):
            messages.append({"role": "user", "content": content})
            answer = _show(server.stream("/v1/chat/completions", {**body, "messages": messages}))
            messages.append({"role": "assistant", "content": answer})
    return 0


def complete(argv: Sequence[str]) -> int:
    """Print a prompt's continuation.

    Raises:
        ConfigError, FdsdError: as chat.
    """
    parser = _parser("complete", "Let a running server continue a text.")
    parser.add_argument("prompt", metavar="PROMPT", help="the text; - reads standard input")
    args = parser.parse_args(argv)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    with _Server(args.url, args.api_key) as server:
        body = {**_sampling(args), "model": args.model or server.first_model(), "prompt": prompt}
        _show(server.stream("/v1/completions", body))
    return 0


def _parser(name: str, text: str) -> argparse.ArgumentParser:
    parser = Parser(f"fastdeploy-sd {name}", text)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
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


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Only what was given, so that the server's defaults hold for the rest."""
    given = {name: getattr(args, name) for name in ("max_tokens", "temperature", "seed")}
    return {name: value for name, value in given.items() if value is not None} | {"stream": True}


def _said(message: str | None) -> Iterator[str]:
    if message == "-":
        yield sys.stdin.read()
    elif message is not None:
        yield message
    else:
        is_terminal = sys.stdin.isatty()
        while line := _read_line("> " if is_terminal else ""):
            if line.strip():
                yield line.rstrip("\n")


def _read_line(prompt: str) -> str:
    print(prompt, end="", flush=True)
    return sys.stdin.readline()


def _show(pieces: Iterator[str]) -> str:
    """Print an answer as it comes and return it."""
    answer = []
    for piece in pieces:
        print(piece, end="", flush=True)
        answer.append(piece)
    print()
    return "".join(answer)


class _Server:
    """A connection to one server; a context manager."""

    def __init__(self, url: str, api_key: str | None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url: expected an http:// or https:// URL, got {url!r}")
        # No read timeout: a long prompt or a full queue may keep the first token back for long.
        timeout = httpx.Timeout(CONNECT_TIMEOUT_S, read=None)
        try:
            self._client = httpx.Client(base_url=url, headers=headers, timeout=timeout)
        except httpx.InvalidURL as error:
            raise ConfigError(f"url: expected a server's URL, got {url!r} ({error})") from None
        self._url = url

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def first_model(self) -> str:
        try:
            response = self._client.get("/v1/models")
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if response.is_error:
            raise _reported(response)
        name: str = response.json()["data"][0]["id"]
        return name

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[str]:
        """Yield the text of the first choice as it arrives."""
        try:
            with self._client.stream("POST", path, json=body) as response:
                if response.is_error:
                    response.read()
                    raise _reported(response)
                yield from _texts(response.iter_lines())
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: httpx.HTTPError) -> Unavailable:
        return Unavailable(f"url: expected a running server, got {error or type(error).__name__} from {self._url}")


def _texts(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith(_EVENT):
            continue
        data = line.removeprefix(_EVENT)
        if data == _END:
            return
        event = json.loads(data)
        if "error" in event:
            raise FdsdError(f"server: {event['error']['message']}")
        for choice in event["choices"]:
            yield (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""
    raise Unavailable("server: expected the answer's end, got a closed connection")


def _reported(response: httpx.Response) -> FdsdError:
    """Return the error of an OpenAI-shaped body, or of whatever else came."""
    try:
        text = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        text = response.text[:500]
    return FdsdError(f"server: {response.status_code}: {text}")
