"""LLM: offline generation in this process, with the same engine, text handling and results as the server."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from fastdeploy_sd.config import Config, config_from_kwargs, verify_offline
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.entrypoints.offline.adapters import Adapters, LoRARequest, adapters_per_prompt
from fastdeploy_sd.entrypoints.offline.arguments import (
    GenerateOptions,
    OfflineGrammars,
    Structured,
    params_per_prompt,
    texts_per_prompt,
    token_id_lists,
)
from fastdeploy_sd.entrypoints.offline.batch import OfflineBatch
from fastdeploy_sd.entrypoints.offline.conversations import (
    AnswerReader,
    ChatMessage,
    ChatOptions,
    Conversations,
    ReadConversation,
)
from fastdeploy_sd.errors import BadRequest, Unavailable
from fastdeploy_sd.hub import located
from fastdeploy_sd.process.log_files import show_lines
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.chat_template import Json
from fastdeploy_sd.text.output_processor import Completion
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.prompt_logprobs import Logprob, prompt_logprobs
from fastdeploy_sd.text.request_builder import RequestBuilder, RequestGroup
from fastdeploy_sd.text.request_defaults import logged_defaults
from fastdeploy_sd.text.speculation import SpeculationOptions, may_change_tokens
from fastdeploy_sd.text.tokenizer import load_tokenizer
from fastdeploy_sd.types import RequestMetrics

__all__ = ["LLM", "GenerationOutput", "LoRARequest"]
Conversation = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """The result for one prompt.

    Attributes:
        prompt: as given; None when it was given as token ids or as a conversation.
        outputs: `n` completions.
        num_cached_tokens: prompt tokens the first completion took from the prefix cache.
        prompt_logprobs: per token of the prompt, where the sampling parameters ask for it, itself and the best at its
            place, by id; None for the first token.
        metrics: of the first completion; `drafts`, `tokens_per_step` and `gain` in it say what drafts were worth.
        lossy: the LLM's verification may have changed the tokens.
        messages: of a conversation, the completions in their parts: what the model thinks, says and calls.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    num_cached_tokens: int
    metrics: RequestMetrics | None
    lossy: bool
    messages: list[ChatMessage] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class LLM:
    """A loaded model that completes prompts. Not for use by several threads at once.

    Frees the model when it is dropped, when `close` is called, or at the end of a `with` block. After a step of the
    model raised, it refuses all calls but `close`.

    Example:
        >>> with LLM(model="demo") as llm:  # doctest: +SKIP
        ...     print(llm.generate("def fib(n):", SamplingParams(temperature=0, max_tokens=32))[0].outputs[0].text)

    Args:
        model: checkpoint directory, name of a model as "Qwen/Qwen3-0.6B", or "demo".
        engine_args: the options of docs/configuration.md, e.g. dtype, max_model_len, speculative_config.

    Raises:
        ConfigError: an option is unknown (the text suggests the nearest), is one of the server, or its value is wrong.
        CheckpointError: the checkpoint cannot be loaded.
    """

    def __init__(self, model: str, **engine_args: Any) -> None:
        show_lines("llm")
        verify_offline(config := config_from_kwargs(model=model, **engine_args))
        config = located(config)
        self._tokenizer = load_tokenizer(*config.model.tokenizer_source)
        self._encoder = PromptEncoder(self._tokenizer, isolates_template=True)
        self._grammars = OfflineGrammars(self._tokenizer)
        self._engine: Engine | None
        self._engine, self._free = _start(self, config)
        self._failure: str | None = None
        self._builder = RequestBuilder(self._encoder, self._engine.model_info, config.model.seed)
        self._defaults = logged_defaults(*config.model.defaults_source)
        self._speculation = self._engine.model_info.speculation
        self._rule = config.speculative
        self._conversations = Conversations(self._encoder, config, self._builder.eos_token_ids, self._grammars.verify)
        self._serials = itertools.count()

    def generate(  # noqa: PLR0913 (each is one thing that callers name)
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        speculation: SpeculationOptions = None,
        predictions: str | Sequence[str | None] | None = None,
        structured_outputs: Structured | Sequence[Structured | None] | None = None,
        lora_request: Adapters = None,
    ) -> list[GenerationOutput]:
        """Complete raw prompts; control tokens written in them act.

        Args:
            prompts: one text or several.
            sampling_params: for all prompts, or one per prompt; None = get_default_sampling_params().
            prompt_token_ids: int[P] or several of those, instead of `prompts`.
            use_tqdm: show progress (tokens, their rate, drafts accepted), if stderr is a terminal.
            speculation: of all prompts, a Speculation or some of its fields by name, e.g. {"method": "ngram"};
                None = as the LLM is configured.
            predictions: what the completions are expected to be, to draft from: one text for all prompts, or one or
                None for each. Outputs do not depend on it; `metrics.drafts` says how much of it was right.
            structured_outputs: the form that completions must have, from their first token on: StructuredOutputs or
                some of its attributes by name, e.g. {"json": schema}, for all prompts, or one or None for each.
            lora_request: the adapter of all prompts, or one or None for each; it is loaded when it is first named.

        Returns:
            One result per prompt, in their order.

        Raises:
            BadRequest: a prompt or a parameter is wrong, no such drafts can be made, or a request could never fit into
                the cache. CheckpointError: an adapter is wrong; NotFound: it is not there.
            InternalError: a computation failed; the other prompts are aborted.
            KeyboardInterrupt: after the current step; the prompts are aborted and the LLM stays usable.
            Unavailable: the LLM is closed, or a step of an earlier call raised.
            Exception: what a step raised, also KeyboardInterrupt by a second Ctrl-C; the LLM is then unusable.
        """
        if (prompts is None) == (prompt_token_ids is None):
            got = "neither" if prompts is None else "both"
            raise BadRequest(f"prompts: expected either prompts or prompt_token_ids, got {got}", param="prompts")
        if prompts is not None:
            texts = [prompts] if isinstance(prompts, str) else list(prompts)
            inputs = [_Prompt(self._encode_text(text), text) for text in texts]
        else:
            inputs = [_Prompt(token_ids) for token_ids in token_id_lists(prompt_token_ids)]
        options = GenerateOptions(speculation, predictions, structured_outputs, lora_request)
        return self._run(inputs, sampling_params, use_tqdm, options)

    def chat(  # noqa: PLR0913
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template_kwargs: Mapping[str, Json] | None = None,
        *,
        speculation: SpeculationOptions = None,
        predictions: str | Sequence[str | None] | None = None,
        structured_outputs: Structured | Sequence[Structured | None] | None = None,
        lora_request: Adapters = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
    ) -> list[GenerationOutput]:
        """Answer conversations; control tokens written in messages are plain text.

        Args:
            messages: one conversation ({"role": ..., "content": ...} each) or several. `as_turn` of an answer's
                `messages` is the turn to go on with, {"role": "tool", "tool_call_id": ..., "content": ...} after it.
            sampling_params: for all conversations, or one for each; None = get_default_sampling_params().
            use_tqdm: as for generate.
            chat_template_kwargs: extra variables of the checkpoint's chat template.
            speculation, predictions, structured_outputs, lora_request: as for generate. A form begins after what the
                model thinks.
            tools, tool_choice, parallel_tool_calls: functions that the model may call in all conversations, as in a
                chat completion of the server.
            add_generation_prompt: False = the prompts end after the last message.
            continue_final_message: True = they end inside it, and the outputs go on with the assistant's words.

        Returns:
            One result per conversation, in their order.

        Raises:
            BadRequest: a message or a parameter is wrong, or as generate.
            InternalError, KeyboardInterrupt, Unavailable, Exception: as generate.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        ends = add_generation_prompt, continue_final_message
        chat, limit = ChatOptions(tools, tool_choice, parallel_tool_calls, *ends), self._builder.max_prompt_tokens
        kwargs = chat_template_kwargs or {}
        read = [self._conversations.read(list(turns), chat, kwargs, limit) for turns in conversations]
        inputs = [_Prompt(one.token_ids, conversation=one) for one in read]
        options = GenerateOptions(speculation, predictions, structured_outputs, lora_request)
        return self._run(inputs, sampling_params, use_tqdm, options)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what a call without `sampling_params` takes: the values that the checkpoint recommends."""
        return self._defaults.params(self._builder.max_prompt_tokens)

    def close(self) -> None:
        """Free the model; every later call but `close` raises Unavailable."""
        self._engine = None
        self._free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode_text(self, prompt: object) -> list[int]:
        if not isinstance(prompt, str):
            text = f"prompts: expected text (token ids are given as prompt_token_ids), got {type(prompt).__name__}"
            raise BadRequest(text, param="prompts")
        return self._encoder.encode_text(prompt, self._builder.max_prompt_tokens)

    def _run(
        self,
        prompts: Sequence[_Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        options: GenerateOptions,
    ) -> list[GenerationOutput]:
        if self._engine is None:
            raise Unavailable("this LLM is closed")
        if self._failure is not None:
            raise Unavailable(f"this LLM is unusable, make another: a step of an earlier call raised {self._failure}")
        if sampling_params is None:
            most = self._builder.max_prompt_tokens + 1
            sampling_params = [self._defaults.params(most - len(prompt.token_ids)) for prompt in prompts]
        params = params_per_prompt(sampling_params, len(prompts))
        predicted = texts_per_prompt("predictions", options.predictions, len(prompts))
        grammars = self._grammars.per_prompt(options.structured_outputs, params)
        adapters = adapters_per_prompt(self._engine.adapters, options.adapters, len(prompts))
        groups, readers = [], []
        for prompt, sampling, text, asked, adapter in zip(prompts, params, predicted, grammars, adapters, strict=True):
            name = f"llm-{next(self._serials)}"
            reader, grammar = self._conversations.form(prompt.conversation, sampling, asked)
            group = self._builder.build([prompt.token_ids], sampling, name, speculation=options.speculation)
            groups.append(self._builder.with_prediction(replace(group, grammar=grammar, adapter=adapter), text))
            readers.append(reader)
        batch = OfflineBatch(self._engine, self._tokenizer, groups, readers)
        try:
            batch.run(use_tqdm)
        finally:
            self._failure = batch.failure
        return [
            self._result(prompt, group, batch.completions_of(group), reader)
            for prompt, group, reader in zip(prompts, groups, readers, strict=True)
        ]

    def _result(
        self, prompt: _Prompt, requests: RequestGroup, completions: list[Completion], reader: AnswerReader
    ) -> GenerationOutput:
        found, num_top = completions[0].prompt_logprobs, requests.sampling.prompt_logprobs
        prompt_token_ids: list[int] = requests.prompts[0].tolist()
        return GenerationOutput(
            request_id=requests.request_id,
            prompt=prompt.text,
            prompt_token_ids=prompt_token_ids,
            outputs=completions,
            num_cached_tokens=completions[0].num_cached_tokens,
            metrics=completions[0].metrics,
            lossy=may_change_tokens(requests.speculation, requests.sampling.temperature, self._speculation, self._rule),
            messages=reader.messages(requests.request_id, completions),
            prompt_logprobs=None
            if found is None or num_top is None
            else prompt_logprobs(prompt_token_ids, found, num_top, self._tokenizer),
        )


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt as token ids, and the text or the conversation it was given as, if it was."""

    token_ids: Sequence[int]
    text: str | None = None
    conversation: ReadConversation | None = None


def _start(owner: LLM, config: Config) -> tuple[Engine, weakref.finalize[Any, LLM]]:
    """Load the model; return the engine, and what frees the model now or, at the latest, with `owner`."""
    from fastdeploy_sd.distributed.executor import create_executor  # brings in Paddle

    executor = create_executor(config)
    return Engine(config, executor), weakref.finalize(owner, executor.shutdown)
