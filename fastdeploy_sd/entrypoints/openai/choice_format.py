"""How the choices of a response and of a stream chunk look: one class for chat, one for text completions.

Knows OpenAI's JSON and FastDeploy's extra fields; knows no sockets and no engine.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fastdeploy_sd.entrypoints.openai.answer_format import AnswerFormat, StreamPart, data_event
from fastdeploy_sd.entrypoints.openai.job import GenerationJob
from fastdeploy_sd.entrypoints.openai.logprobs import LogprobsFormat
from fastdeploy_sd.entrypoints.openai.usage import UsageCounter, metrics_json, speculate_metrics
from fastdeploy_sd.errors import FdsdError
from fastdeploy_sd.text.answer_parser import AnswerParser
from fastdeploy_sd.text.answer_parts import PartsDelta, ToolCallDelta, tool_call_id
from fastdeploy_sd.text.output_processor import Completion, TextDelta
from fastdeploy_sd.text.prompt_logprobs import text_offsets
from fastdeploy_sd.text.tokenizer import Tokenizer
from fastdeploy_sd.types import FinishReason
from fastdeploy_sd.wire.http.error_format import chunk_error
from fastdeploy_sd.wire.http.event_stream import DONE


class ChoiceFormat(AnswerFormat):
    """JSON of the choices of one job; a stream of them is one of chunks.

    Attributes:
        response_object, chunk_object: OpenAI's `object` of a whole response and of a stream chunk.
    """

    response_object: str
    chunk_object: str
    stream_end = DONE

    def __init__(self, job: GenerationJob, tokenizer: Tokenizer) -> None:
        super().__init__(job, tokenizer)
        self._begun = job.begun_choices
        self._logprobs_format = LogprobsFormat(tokenizer, names_ids=job.answer.names_token_ids)

    def whole(self, completions: Sequence[Completion], usage: UsageCounter) -> dict[str, Any]:
        choices = [self._final_choice(completion) for completion in completions]
        answer = self._envelope(self.response_object, choices) | {"usage": usage.to_json()}
        return answer | self._vllm_prompt_token_ids(0) | self._shared_prompt_logprobs(completions[0])

    def part(self, choice: int, delta: TextDelta, usage: UsageCounter) -> StreamPart | None:
        is_first = choice not in self._begun
        entries = self._stream_choice(choice, delta, is_first)
        if not entries:
            return None
        self._begun.add(choice)
        more: dict[str, Any] = {}
        if self._answer.includes_continuous_usage:
            more["usage"] = usage.to_json()
        elif self._answer.includes_usage:
            more["usage"] = None  # OpenAI: present and null until the last chunk
        chunks = [self._envelope(self.chunk_object, [entry]) | more for entry in entries]
        if is_first:
            chunks[0] |= self._vllm_prompt_token_ids(choice)
        return StreamPart("".join(map(data_event, chunks)), len(chunks))

    def ending(self, usage: UsageCounter) -> str:
        if not self._job.owes_usage:
            return ""
        return data_event(self._envelope(self.chunk_object, []) | {"usage": usage.to_json()})

    def error(self, error: FdsdError) -> StreamPart:
        return StreamPart(chunk_error(error, 0))

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        job = self._job
        tier = {"service_tier": "default"} if self._answer.tells_service_tier else {}
        return {"id": job.job_id, "object": kind, "created": job.created, "model": job.model, "choices": choices} | tier

    @abstractmethod
    def _final_choice(self, completion: Completion) -> dict[str, Any]:
        """Return a finished choice."""

    @abstractmethod
    def _stream_choice(self, choice: int, delta: TextDelta, is_first: bool) -> list[dict[str, Any]]:
        """Return what a delta adds to a choice, chunk by chunk; none when a client would learn nothing from it."""

    def _prompt_token_ids(self, choice: int) -> dict[str, Any]:
        """The prompt's ids when asked for; once per choice."""
        return {"prompt_token_ids": self._job.prompt_token_ids_of(choice)} if self._answer.returns_token_ids else {}

    def _vllm_prompt_token_ids(self, choice: int) -> dict[str, Any]:
        """The same where vLLM's clients look for them: next to `choices`, where all have one prompt."""
        return {}

    def _shared_prompt_logprobs(self, completion: Completion) -> dict[str, Any]:
        """Those of the prompt next to `choices`, where all have one prompt."""
        return {}

    def _prompt_logprobs(self, part: Completion) -> dict[str, Any]:
        """Those of the prompt when asked for, in vLLM's form."""
        num_top, found = self._answer.num_prompt_logprobs, part.prompt_logprobs
        if num_top is None or found is None:
            return {}
        prompt = self._job.prompt_token_ids_of(part.index)
        return {"prompt_logprobs": self._logprobs_format.prompt(prompt, found, num_top)}

    def _token_ids(self, part: Completion | TextDelta) -> dict[str, Any]:
        """The output's ids when asked for."""
        return {"completion_token_ids": list(part.token_ids)} if self._answer.returns_token_ids else {}

    def _token_reports(self, part: Completion | TextDelta) -> dict[str, Any]:
        """What is told of the output's tokens next to the text: ids, as for vLLM's clients, and who guessed them."""
        ids = {"token_ids": list(part.token_ids)} if self._answer.returns_token_ids else {}
        if not self._answer.returns_token_sources:
            return ids
        return ids | {"token_sources": [asdict(step) for step in part.token_sources or ()]}

    def _ending(self, part: Completion | TextDelta) -> dict[str, Any]:
        """How a choice ended, and in its last chunk what was measured."""
        ending: dict[str, Any] = {
            "finish_reason": None if part.finish_reason is None else part.finish_reason.value,
            "stop_reason": part.stop_reason,
        }
        if self._answer.collects_metrics and part.metrics is not None:
            ending["metrics"] = metrics_json(part.metrics)
        if self._job.reports_speculation and part.metrics is not None:
            ending["speculate_metrics"] = speculate_metrics(part.metrics, self._job.method, self._job.is_lossy)
        return ending

    def _shows_tokens(self, delta: TextDelta) -> bool:
        """Whether a delta shows tokens, be their text held back or not."""
        answer = self._answer
        is_asked = answer.returns_token_ids or answer.returns_token_sources or delta.logprobs is not None
        return is_asked and bool(delta.token_ids)


class ChatFormat(ChoiceFormat):
    """Choices of /v1/chat/completions: their text in parts."""

    response_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, job: GenerationJob, tokenizer: Tokenizer) -> None:
        super().__init__(job, tokenizer)
        self._parsers: dict[int, AnswerParser] = {}
        self._calling: set[int] = set()  # choices with a call

    def _final_choice(self, completion: Completion) -> dict[str, Any]:
        index = completion.index
        parser = self._answer.parser()
        parts = PartsDelta.of(parser.push(completion.text) + parser.finish())
        message: dict[str, Any] = {"role": "assistant", "content": parts.content} | _reasoning(parts.reasoning)
        if parts.tool_calls:
            self._calling.add(index)
            message |= {"content": parts.content or None} | self._calls(index, parts.tool_calls, is_whole=True)
        message |= self._prompt_token_ids(index) | self._token_ids(completion)
        entry = {"index": index, "message": message} | self._logprobs(completion) | self._token_reports(completion)
        return entry | self._chat_ending(completion, index)

    def _stream_choice(self, choice: int, delta: TextDelta, is_first: bool) -> list[dict[str, Any]]:
        """OpenAI's chunks: the first has the role alone, the last how it ended, and what is said stands between."""
        parts = self._parts(choice, delta)
        entries = []
        if is_first:
            entries.append(_chunk(choice, {"role": "assistant", "content": ""} | self._prompt_token_ids(choice)))
        if not parts.is_empty or self._shows_tokens(delta):
            content: dict[str, Any] = {"content": parts.content} | _reasoning(parts.reasoning)
            if parts.tool_calls:
                self._calling.add(choice)
                content |= {"content": parts.content or None} | self._calls(choice, parts.tool_calls, is_whole=False)
            chunk = _chunk(choice, content | self._token_ids(delta))
            entries.append(chunk | self._logprobs(delta) | self._token_reports(delta))
        if delta.finish_reason is not None:
            entries.append(_chunk(choice, {}) | self._chat_ending(delta, choice))
        return entries

    def _vllm_prompt_token_ids(self, choice: int) -> dict[str, Any]:
        return self._prompt_token_ids(choice)

    def _shared_prompt_logprobs(self, completion: Completion) -> dict[str, Any]:
        return self._prompt_logprobs(completion)

    def _parts(self, choice: int, delta: TextDelta) -> PartsDelta:
        """What a delta adds to the parts of a choice, of which another instance may have shown some."""
        parser = self._parsers.get(choice)
        if parser is None:
            parser = self._parsers[choice] = self._answer.parser()
            shown = PartsDelta.of(parser.push(self._job.shown_text_of(choice, self._tokenizer)))
            if shown.tool_calls:
                self._calling.add(choice)
        parts = parser.push(delta.text)
        return PartsDelta.of(parts if delta.finish_reason is None else parts + parser.finish())

    def _calls(self, choice: int, calls: Sequence[ToolCallDelta], *, is_whole: bool) -> dict[str, Any]:
        """Calls, or pieces of them, of which only the first has the name."""
        if self._is_legacy:
            return {"function_call": _function(calls[0])}
        entries = []
        for call in calls:
            entry: dict[str, Any] = {} if is_whole else {"index": call.index}
            if call.name is not None:
                entry |= {"id": tool_call_id(self._job.job_id, choice, call.index), "type": "function"}
            entries.append(entry | {"function": _function(call)})
        return {"tool_calls": entries}

    @property
    def _is_legacy(self) -> bool:
        """Whether the request uses OpenAI's older names, for one call at most."""
        return self._answer.tools is not None and self._answer.tools.is_legacy

    def _chat_ending(self, part: Completion | TextDelta, choice: int) -> dict[str, Any]:
        """How a choice ended; OpenAI has a word of its own for one that ended by itself and calls something."""
        ending = self._ending(part)
        if part.finish_reason is FinishReason.STOP and choice in self._calling:
            ending["finish_reason"] = "function_call" if self._is_legacy else "tool_calls"
        return ending

    def _logprobs(self, part: Completion | TextDelta) -> dict[str, Any]:
        """`logprobs`, and `draft_logprobs` when asked for."""
        logprobs = {"logprobs": None if part.logprobs is None else self._logprobs_format.chat(part.logprobs)}
        if not self._answer.includes_draft_logprobs:
            return logprobs
        return logprobs | {"draft_logprobs": self._logprobs_format.chat_drafts(part.draft_logprobs or ())}


class CompletionFormat(ChoiceFormat):
    """Choices of /v1/completions."""

    response_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, job: GenerationJob, tokenizer: Tokenizer) -> None:
        super().__init__(job, tokenizer)
        self._echoes: dict[int, str] = {}

    def _final_choice(self, completion: Completion) -> dict[str, Any]:
        index = completion.index
        choice = {"index": index, "text": self._echo(index) + completion.text} | self._logprobs(completion, index)
        choice |= self._prompt_logprobs(completion)
        choice |= self._prompt_token_ids(index) | self._token_ids(completion) | self._token_reports(completion)
        return choice | self._ending(completion)

    def _stream_choice(self, choice: int, delta: TextDelta, is_first: bool) -> list[dict[str, Any]]:
        text = (self._echo(choice) if is_first else "") + delta.text
        if not (text or self._shows_tokens(delta) or delta.finish_reason is not None):
            return []
        entry = {"index": choice, "text": text} | self._logprobs(delta, choice)
        entry |= (self._prompt_token_ids(choice) if is_first else {}) | self._token_ids(delta)
        return [entry | self._token_reports(delta) | self._ending(delta)]

    def _echo(self, choice: int) -> str:
        """The prompt as text, when asked for; token ids are decoded with their control tokens visible."""
        if not self._answer.echo:
            return ""
        text = self._job.echoed_text_of(choice)
        if text is None and choice not in self._echoes:
            prompt = self._job.prompt_token_ids_of(choice)
            self._echoes[choice] = self._tokenizer.decode(prompt, skip_hidden=False)
        return self._echoes[choice] if text is None else text

    def _logprobs(self, part: Completion | TextDelta, choice: int) -> dict[str, Any]:
        """`logprobs`, of an echoed prompt too, and `draft_logprobs` when asked for."""
        form, num_top = self._logprobs_format, self._job.requests.sampling.logprobs
        begin = len(self._echo(choice)) if num_top is not None else 0
        logprobs = None
        if part.logprobs is not None:
            logprobs = form.completion(part.logprobs, [begin + offset for offset in part.text_offsets])
        if self._answer.echo and num_top is not None and part.prompt_logprobs is not None:
            prompt = self._job.prompt_token_ids_of(choice)
            offsets = self._echo_offsets(choice, prompt)
            echoed = form.echoed(prompt, part.prompt_logprobs, num_top, offsets)
            logprobs = echoed if logprobs is None else {name: echoed[name] + logprobs[name] for name in echoed}
        if not self._answer.includes_draft_logprobs:
            return {"logprobs": logprobs}
        drafts, offsets = part.draft_logprobs or (), [begin + offset for offset in part.draft_text_offsets]
        return {"logprobs": logprobs, "draft_logprobs": form.completion_drafts(drafts, offsets)}

    def _echo_offsets(self, choice: int, prompt_token_ids: Sequence[int]) -> list[int]:
        """Return where each token's text starts in the echoed prompt, of which an added first token is no part."""
        offsets = text_offsets(self._tokenizer, prompt_token_ids)
        first = self._tokenizer.decode(prompt_token_ids[:1], skip_hidden=False)
        is_added = prompt_token_ids[0] in self._tokenizer.hidden_ids and not self._echo(choice).startswith(first)
        return [max(offset - len(first), 0) for offset in offsets] if is_added else offsets


def _chunk(choice: int, delta: dict[str, Any]) -> dict[str, Any]:
    """A choice as a chunk has it that is neither its last one nor tells log-probabilities."""
    return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None}


def _function(call: ToolCallDelta) -> dict[str, str]:
    return ({} if call.name is None else {"name": call.name}) | {"arguments": call.arguments}


def _reasoning(text: str) -> dict[str, str]:
    """What the model thought, under the name of DeepSeek and FastDeploy and the one that vLLM has now."""
    return {"reasoning_content": text, "reasoning": text} if text else {}
