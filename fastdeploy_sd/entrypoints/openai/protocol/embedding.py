"""The bodies of requests for embeddings: OpenAI's, and Ollama's two."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from fastdeploy_sd.entrypoints.openai.protocol.completion import Prompt, Prompts
from fastdeploy_sd.entrypoints.openai.protocol.fields import Body, FieldKind, Ignored, Integer, NotSupported, expected
from fastdeploy_sd.entrypoints.openai.protocol.ollama_options import OllamaOptions
from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.rules.sampling import MAX_COUNT
from fastdeploy_sd.types import Pooling


class _Texts(Prompts):
    """Texts or token ids, which must be there."""

    takes_null = False


class _Pooling(FieldKind):
    schema: Mapping[str, Any] = {"enum": [*Pooling]}

    def convert(self, value: Any) -> Pooling:
        if value not in [*Pooling]:
            raise expected(f"one of {', '.join(Pooling)}")
        return Pooling(value)


class _Encoding(FieldKind):
    """Whether the floats are base64 of their bytes."""

    schema: Mapping[str, Any] = {"enum": ["float", "base64"]}

    def convert(self, value: Any) -> bool:
        if value not in ("float", "base64"):
            raise expected("one of float, base64")
        return bool(value == "base64")


class EmbeddingsBody(Body):
    """What requests for embeddings share.

    Attributes:
        dimensions: the first so many numbers, made of length 1 again; None = all.
        pooling: mean of all tokens, or the last token.
        priority: lower runs first.
        user: who shares the engine with others, where no API keys tell.
    """

    name_of_texts: ClassVar[str] = "input"

    model: str | None = None
    dimensions: Annotated[int | None, Integer(1, MAX_COUNT)] = None
    pooling: Annotated[Pooling | None, _Pooling()] = None
    priority: Annotated[int | None, Integer(-(1 << 31), (1 << 31) - 1)] = None
    user: Annotated[str, Field(max_length=256)] | None = None

    @property
    @abstractmethod
    def texts(self) -> list[Prompt]:
        """The texts, or their token ids."""

    @property
    def max_tokens(self) -> int | None:
        """To how many tokens a text is cut; None = one that is too long is refused."""
        return None

    @property
    def is_base64(self) -> bool:
        """Whether numbers are encoded."""
        return False

    def as_sent(self, error: BadRequest) -> BadRequest:
        """Return an error with the name of the field that the client sent."""
        if error.param not in ("prompt", "prompt_token_ids"):
            return error
        text = error.message.replace(error.param, self.name_of_texts, 1)
        return BadRequest(text, param=self.name_of_texts, code=error.code)


class EmbeddingBody(EmbeddingsBody):
    """POST /v1/embeddings."""

    input: Annotated[list[Prompt], _Texts(takes_text=True)]
    encoding_format: Annotated[bool | None, _Encoding()] = None
    truncate_prompt_tokens: NotSupported = None

    @property
    def texts(self) -> list[Prompt]:
        return self.input

    @property
    def is_base64(self) -> bool:
        return bool(self.encoding_format)


class OllamaEmbedBody(EmbeddingsBody):
    """POST /api/embed.

    Attributes:
        truncate: a text that is too long is cut at its end; false = it is refused.
        options: num_ctx is as many tokens as are not cut; no other has an effect, as no token is generated.
    """

    input: Annotated[list[Prompt], _Texts(takes_text=True)]
    truncate: bool | None = None
    options: OllamaOptions | None = None
    keep_alive: Ignored = None

    @property
    def texts(self) -> list[Prompt]:
        return self.input

    @property
    def max_tokens(self) -> int | None:
        num_ctx = None if self.options is None else self.options.num_ctx
        return None if self.truncate is False else num_ctx or MAX_COUNT


class OllamaEmbeddingsBody(EmbeddingsBody):
    """POST /api/embeddings, the older route, for one text."""

    name_of_texts: ClassVar[str] = "prompt"

    prompt: str
    options: OllamaOptions | None = None
    keep_alive: Ignored = None

    @property
    def texts(self) -> list[Prompt]:
        return [self.prompt]

    @property
    def max_tokens(self) -> int | None:
        return (None if self.options is None else self.options.num_ctx) or MAX_COUNT
