"""Generated token ids -> text, one token at a time; a character is emitted when its last byte has arrived.

The result depends on the ids only, not on how they were grouped into steps. Knows no stop strings and no requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from fastdeploy_sd.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
_NUM_CONTEXT_TOKENS = 6
_MAX_PENDING_TOKENS = 16


class ByteDetokenizer:
    """The state of one sequence, for vocabularies that define bytes per token: it decodes them as UTF-8, exactly."""

    def __init__(self, tokenizer: Tokenizer, hidden_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that became certain; O(1) amortised."""
        if token_id in self._hidden_ids:
            return ""
        if token_id in self._tokenizer.hidden_ids:  # shown here; such a token has no bytes of a text
            return self.finish() + self._tokenizer.decode([token_id], skip_hidden=False)
        return self._decoder.decode(self._tokenizer.token_bytes(token_id) or b"")

    def finish(self) -> str:
        """Return what is left at the end of the sequence: a character cut short becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other vocabulary: emits what a token adds to the text of a short window, once it is whole.

    Source: the idea of prefix and read offsets, huggingface/text-generation-inference server/models/model.py.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], hidden_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids
        self._shown = [int(i) for i in prompt_token_ids[-_NUM_CONTEXT_TOKENS:]]
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._hidden_ids:
            return ""
        if token_id in self._tokenizer.hidden_ids:  # shown here, and no part of the text around it
            return self.finish() + self._tokenizer.decode([token_id], skip_hidden=False)
        self._pending.append(token_id)
        text = self._pending_text()
        if (not text or text.endswith(REPLACEMENT)) and len(self._pending) < _MAX_PENDING_TOKENS:
            return ""
        self._shown, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        text = self._pending_text() if self._pending else ""
        self._shown, self._pending = [*self._shown, *self._pending], []
        return text

    def _pending_text(self) -> str:
        before = self._tokenizer.decode(self._shown, skip_hidden=True)
        after = self._tokenizer.decode([*self._shown, *self._pending], skip_hidden=True)
        return after[len(before) :]


Detokenizer = ByteDetokenizer | WindowDetokenizer


def create_detokenizer(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], shown_ids: Collection[int] = ()
) -> Detokenizer:
    """Return a detokenizer for text that continues the prompt int[P], where `shown_ids` of hidden tokens add text."""
    hidden_ids = tokenizer.hidden_ids - frozenset(shown_ids)
    if tokenizer.token_bytes(0) is not None:
        return ByteDetokenizer(tokenizer, hidden_ids)
    return WindowDetokenizer(tokenizer, prompt_token_ids, hidden_ids)
