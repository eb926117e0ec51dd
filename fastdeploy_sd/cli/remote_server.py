"""A running server, spoken to over the public HTTP API only; any OpenAI-compatible one will do."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from fastdeploy_sd.errors import ConfigError, FdsdError, Unavailable

CONNECT_TIMEOUT_S = 10.0
_EVENT = "data: "
_END = "[DONE]"


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event of a stream brings.

    Attributes:
        text: of the first choice; may be empty.
        num_tokens: of the whole answer, in the event that says so; else None.
    """

    text: str
    num_tokens: int | None = None


class RemoteServer:
    """A connection to one server; a context manager. Raises ConfigError for a URL that is none."""

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

    def __enter__(self) -> RemoteServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def first_model(self) -> str:
        """Return the name of the first model it lists.

        Raises FdsdError: the server cannot be reached or reports an error.
        """
        try:
            response = self._client.get("/v1/models")
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if response.is_error:
            raise _reported(response)
        name: str = response.json()["data"][0]["id"]
        return name

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """Yield an answer as it arrives. Raises FdsdError as `first_model` does."""
        try:
            with self._client.stream("POST", path, json=body) as response:
                if response.is_error:
                    response.read()
                    raise _reported(response)
                yield from _pieces(response.iter_lines())
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: httpx.HTTPError) -> Unavailable:
        return Unavailable(f"url: expected a running server, got {error or type(error).__name__} from {self._url}")


def _pieces(lines: Iterator[str]) -> Iterator[Piece]:
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
            yield Piece((choice["delta"].get("content") if "delta" in choice else choice["text"]) or "")
        if event.get("usage"):
            yield Piece("", event["usage"].get("completion_tokens"))
    raise Unavailable("server: expected the answer's end, got a closed connection")


def _reported(response: httpx.Response) -> FdsdError:
    """Return the error of an OpenAI-shaped body, or of whatever else came."""
    try:
        text = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        text = response.text[:500]
    return FdsdError(f"server: {response.status_code}: {text}")
