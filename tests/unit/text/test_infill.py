"""Filling in the middle: prompts with a model's own marks, in the routes that take a suffix."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fastdeploy_sd.config import Config, ModelConfig
from fastdeploy_sd.entrypoints.openai.infill_format import InfillFormat
from fastdeploy_sd.entrypoints.openai.job_builder import JobBuilder
from fastdeploy_sd.entrypoints.openai.protocol import CompletionBody, InfillBody, OllamaGenerateBody, parse_body
from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.infill import MARKS, find_marks
from fastdeploy_sd.text.line_limits import LineLimits
from fastdeploy_sd.text.output_processor import Completion, TextDelta
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.types import FinishReason, RequestMetrics
from tests.unit.entrypoints.scripted_app import INFO
from tests.unit.text.vocabularies import GOLDEN, added_tokenizer, golden_tokenizer

PRE, SUF, MID, FILE = "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"
BEFORE, AFTER = f"def f({MID}):\n    ", "\n    return x"


def jobs(encoder: PromptEncoder) -> JobBuilder:
    info = replace(INFO, vocab_size=encoder.tokenizer.num_ids)
    return JobBuilder(encoder, info, Config(model=ModelConfig(model=str(GOLDEN))), lambda *_: None)


def test_a_prompt_has_the_marks_around_plain_texts(tmp_path: Path) -> None:
    encoder = PromptEncoder(added_tokenizer(tmp_path, (PRE, SUF, MID, FILE)))
    ids = encoder.tokenizer.control_tokens
    found = encoder.encode_infill(BEFORE, AFTER)
    assert encoder.tokenizer.decode(found, skip_hidden=False) == PRE + BEFORE + SUF + AFTER + MID
    assert [i for i in found if i in {ids[PRE], ids[SUF], ids[MID]}] == [ids[PRE], ids[SUF], ids[MID]], "one of each"
    empty = encoder.encode_infill("", AFTER)
    assert empty[:2] == [ids[PRE], ids[SUF]]
    asked = {"prompt": BEFORE, "suffix": AFTER, "max_tokens": 5}
    job = jobs(encoder).build_completion(parse_body(CompletionBody, json.dumps(asked).encode()))
    assert job.requests.prompts[0].tolist() == found
    assert {ids[FILE], ids[PRE]} < set(job.requests.eos_token_ids)
    asked = {"prompt": BEFORE, "suffix": AFTER, "options": {"num_predict": 5}}
    told = jobs(encoder).build_ollama(parse_body(OllamaGenerateBody, json.dumps(asked).encode()))
    assert told.requests.prompts[0].tolist() == found
    plain = jobs(encoder).build_completion(parse_body(CompletionBody, b'{"prompt": "x", "suffix": ""}'))
    assert ids[FILE] not in plain.requests.eos_token_ids


def test_every_family_has_its_order() -> None:
    for marks in MARKS:
        assert find_marks(dict.fromkeys(marks.texts, 1)) == marks
        text = "".join(segment.text for segment in marks.prompt("A", "B"))
        first, second = (marks.prefix + "A", marks.suffix + "B")
        assert text == (first + second + marks.middle if marks.middle else second + first)
    assert find_marks({PRE: 1, SUF: 2}) is None


def test_models_without_marks_and_contradictions_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="suffix: not supported: the model's tokenizer has no marks"):
        PromptEncoder(golden_tokenizer()).encode_infill("a", "b")
    for body, text in (
        (b'{"prompt": [5], "suffix": "x"}', "suffix: expected only with a prompt that is text, got token ids"),
        (b'{"prompt": "a", "suffix": "x", "echo": true}', "suffix: expected only without echo, got both"),
    ):
        with pytest.raises(BadRequest, match=text):
            parse_body(CompletionBody, body)
    with pytest.raises(BadRequest, match="system: expected only without suffix, got both"):
        parse_body(OllamaGenerateBody, b'{"prompt": "a", "suffix": "x", "system": "y"}')


def test_editors_name_other_files_and_what_has_been_begun(tmp_path: Path) -> None:
    """With marks of files in front of each, else as plain text."""
    repository = "<|repo_name|>"
    files = [{"filename": "a.py", "text": f"A = {MID}", "time": 1}, {"text": "B = 2"}]
    asked = {"input_prefix": BEFORE, "input_suffix": AFTER, "prompt": "x = ", "input_extra": files, "n_predict": 5}
    for number, (marks, expected) in enumerate(
        (
            ((repository, FILE), f"{repository}myproject\n{FILE}a.py\nA = {MID}{FILE}tmp\nB = 2{FILE}filename\n"),
            ((), f"\n\n--- snippet ---\n\nA = {MID}\n\n--- snippet ---\n\nB = 2\n"),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        encoder = PromptEncoder(added_tokenizer(folder, (PRE, SUF, MID, *marks)))
        job = jobs(encoder).build_infill(parse_body(InfillBody, json.dumps(asked).encode()))
        found = job.requests.prompts[0].tolist()
        text = encoder.tokenizer.decode(found, skip_hidden=False)
        assert text == expected + PRE + BEFORE + SUF + AFTER + MID + "x = "
        assert found.count(encoder.tokenizer.control_tokens[MID]) == 1
        assert job.requests.max_tokens == (5,)
    suffix_first = MARKS[-1]
    assert "".join(s.text for s in suffix_first.prompt("A", "B", "C")) == "[SUFFIX]B[PREFIX]AC"


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("n_probs", 1, "n_probs: not supported: /v1/completions has logprobs"),
        ("lora", [{"id": 0, "scale": 1}], "lora: not supported"),
        ("mirostat", 2, "mirostat: not supported: only 0 is"),
        ("input_extra", [{"filename": "a"}], "input_extra"),
        ("input_prefix", 3, "input_prefix"),
        ("n", 2, "n: not supported: an answer has one text"),
        ("extra", [], "extra: unknown field"),
        ("samplers", ["top_k", "mirostat"], "samplers: expected a list of at most 64 of penalties, temperature,"),
        ("samplers", "kp", "samplers: expected a list"),
        ("n_indent", -1, "n_indent: expected an integer in 0..2147483647, got -1"),
        ("t_max_predict_ms", 0.5, "t_max_predict_ms: expected an integer in -1..2147483647, got 0.5"),
        ("response_fields", [3], "response_fields[0]"),
    ],
)
def test_what_llama_cpp_has_besides_is_refused_by_name(field: str, value: object, text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_body(InfillBody, json.dumps({"input_prefix": "a", field: value}).encode())
    assert caught.value.message.startswith(text)


def infill(**fields: object) -> InfillBody:
    return parse_body(InfillBody, json.dumps({"input_prefix": "a"} | fields).encode())


def test_what_editors_send_is_taken() -> None:
    sent = {"id_slot": 0, "t_max_prompt_ms": 500, "cache_prompt": True, "stream": False, "stop": ["\n\n"]}
    sent |= {"samplers": ["top_k", "top_p", "infill"], "top_k": 40, "top_p": 0.9, "n_predict": 128}
    sent |= {"n_indent": 4, "t_max_predict_ms": 1000, "response_fields": ["content", "timings/prompt_n"]}
    body = infill(**sent)
    params = body.sampling_params()
    assert (params.top_k, params.top_p, params.stop, params.max_tokens) == (40, 0.9, ("\n\n",), 128)
    assert body.line_limits == LineLimits(4, 1000)
    fills_the_cache = infill(n_predict=0, samplers=[], temperature=0.0, t_max_predict_ms=-1, response_fields=[""])
    assert fills_the_cache.sampling_params().max_tokens == 0
    assert fills_the_cache.line_limits is None
    assert infill(n_predict=-1).sampling_params().max_tokens is None


def test_options_that_no_named_sampler_reads_are_left_to_the_server() -> None:
    sent = {"top_k": 40, "top_p": 0.9, "min_p": 0.1, "temperature": 0.2, "repeat_penalty": 1.1, "presence_penalty": 1.0}
    defaults = {"temperature": 0.6, "top_k": 20}
    every = infill(**sent).sampling_params(defaults)
    assert (every.top_k, every.temperature, every.min_p, every.repetition_penalty) == (40, 0.2, 0.1, 1.1)
    named = infill(**sent, samplers=["top_p", "infill"]).sampling_params(defaults)
    assert named == SamplingParams(top_p=0.9, temperature=0.6, top_k=20)
    penalised = infill(**sent, samplers=["penalties"]).sampling_params()
    assert penalised == SamplingParams(repetition_penalty=1.1, presence_penalty=1.0)


def test_an_answer_has_the_fields_that_were_asked_for(tmp_path: Path) -> None:
    """llama.vim reads those of `timings` by their whole paths."""
    encoder = PromptEncoder(added_tokenizer(tmp_path, (PRE, SUF, MID)))
    ended = Completion(0, "x", (5,), (0,), None, FinishReason.LENGTH, None, 0, RequestMetrics(1.0, 2.0, 3.0, 4.0))
    paths = ["content", "timings/predicted_n", "timings/none", "content/x", "stop_type", ""]
    for fields, expected in ((paths, {"content": "x", "timings/predicted_n": 1, "stop_type": "limit"}), ([], None)):
        job = jobs(encoder).build_infill(infill(response_fields=fields))
        form = InfillFormat(job, encoder.tokenizer)
        usage = form.usage_counter()
        usage.add(0, TextDelta("x", (5,), finish_reason=FinishReason.LENGTH))
        answer = form.whole([ended], usage)
        assert answer == expected or (expected is None and {"timings", "model", "stop"} < set(answer))
