"""`fastdeploy-sd perplexity`: how probable a model finds a text, and how far another format of it is from that."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from fastdeploy_sd.cli.arguments import Parser
from fastdeploy_sd.cli.perplexity.report import Report
from fastdeploy_sd.cli.perplexity.scoring import Comparer, Comparison, ScoredModel
from fastdeploy_sd.cli.perplexity.windows import Window, windows
from fastdeploy_sd.config import Config, SpeculativeConfig, config_from_kwargs, load_config, verify_offline
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.hub import located
from fastdeploy_sd.process.log_files import show_lines, worker_lines_from
from fastdeploy_sd.text.prompt_logprobs import text_offsets
from fastdeploy_sd.text.tokenizer import Tokenizer, load_tokenizer
from fastdeploy_sd.types import I32

_PROG = "fastdeploy-sd perplexity"
_CONTEXT = 512


def main(argv: Sequence[str]) -> int:
    """Score a file and print what was found.

    Raises:
        ConfigError: an option is wrong, the file is too short, or the models have not one tokenizer.
        CheckpointError: a model cannot be loaded.
    """
    args, engine_argv = _parser().parse_known_args(argv)
    given = load_config(engine_argv, _PROG)
    verify_offline(given)
    show_lines("perplexity")
    with worker_lines_from(logging.ERROR):  # warnings are about requests of servers
        config = _configured(given)
        reference = None if args.against is None else _configured(_reference(given, args))
        text = _ScoredText.read(args.file, config)
        if reference is not None:
            _verify_same_tokens(text.token_ids, _ScoredText.read(args.file, reference).token_ids)
        report = _score(args, text, config, reference)
    print(json.dumps(report.to_json(), indent=1) if args.json else report.table())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=_PROG,
        description="Print how probable a model finds a text, in nats per token and per byte, and with --against how "
        "far that is from another format of the model: KL divergence, agreement on the most likely token, difference "
        "in nats.",
        epilog="Every engine option is accepted too (--model, --quantization, --dtype, --num-threads, --config FILE, "
        "...) and holds for both models, but for --quantization, which is of --model only. Windows of --context tokens "
        "end --stride tokens apart; of each the last --stride tokens are scored, so all of them have at least "
        "--context minus --stride tokens before them, and none is scored twice. If the tokenizer of --model puts a "
        "BOS token in front of texts, every window begins with it. Margins are 1.96 standard errors over the scored "
        "tokens.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="text in UTF-8; control tokens written in it act")
    text = "tokens of a window (default: %(default)s)"
    parser.add_argument("--context", type=int, default=_CONTEXT, metavar="N", help=text)
    text = "tokens that each window scores (default: half of --context)"
    parser.add_argument("--stride", type=int, metavar="N", help=text)
    text = "the reference to compare --model with: another format of the same model, with the same tokenizer"
    parser.add_argument("--against", metavar="MODEL", help=text)
    text = "as --quantization, for --against (default: the weights as its checkpoint has them)"
    parser.add_argument("--against-quantization", metavar="NAME", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _configured(config: Config) -> Config:
    """Return what runs one prompt at a time, without drafts."""
    found = located(config)
    return replace(
        found,
        cache=replace(found.cache, enable_prefix_caching=False),
        scheduler=replace(found.scheduler, max_num_seqs=1),
        speculative=SpeculativeConfig(),
    )


def _reference(config: Config, args: argparse.Namespace) -> Config:
    given = {} if args.against_quantization is None else {"quantization": args.against_quantization}
    quantization = config_from_kwargs(model=args.against, **given).model.quantization
    return replace(config, model=replace(config.model, model=args.against, quantization=quantization))


@dataclass(frozen=True, slots=True, eq=False)
class _ScoredText:
    """A text as tokens.

    Attributes:
        token_ids: i32[n], without `start`.
        start: i32[k], what the tokenizer puts in front of a text.
        ends: i64[n+1], in bytes of the text, where tokens start, and its length.
    """

    token_ids: I32
    start: I32
    ends: Any

    @classmethod
    def read(cls, path: Path, config: Config) -> _ScoredText:
        """Read a file. Raises ConfigError: it is no text."""
        try:
            text = path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"file: expected a file with UTF-8 text, got {path}: {error}", param="file") from None
        tokenizer = load_tokenizer(config.model.tokenizer_path, config.model.tokenizer_backend)
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        whole = tokenizer.encode(text, add_special_tokens=True)
        num_added = len(whole) - len(token_ids)
        start = whole[:num_added] if whole[num_added:] == token_ids else []
        return cls(np.array(token_ids, np.int32), np.array(start, np.int32), _byte_offsets(tokenizer, text, token_ids))

    def prompt(self, window: Window) -> I32:
        """Return the tokens of a window with what stands in front."""
        return np.concatenate([self.start, self.token_ids[window.begin : window.end]])

    def num_bytes(self, window: Window) -> int:
        """Return the bytes of the tokens that a window scores."""
        return int(self.ends[window.end] - self.ends[window.first])


def _byte_offsets(tokenizer: Tokenizer, text: str, token_ids: list[int]) -> Any:
    """Return i64[n+1]; a token in the middle of a character starts where that does."""
    lengths = np.array([0, *(len(char.encode("utf-8")) for char in text)], np.int64)
    places = np.minimum([*text_offsets(tokenizer, token_ids), len(text)], len(text))
    return lengths.cumsum()[places]


def _verify_same_tokens(own: I32, theirs: I32) -> None:
    if np.array_equal(own, theirs):
        return
    n = min(len(own), len(theirs))
    place = int(np.argmax(np.append(own[:n] != theirs[:n], True)))
    shown = [str(ids[place]) if place < len(ids) else "none" for ids in (own, theirs)]
    raise ConfigError(
        f"against: expected a model with the tokenizer of --model, got another one: token {place} of the text is"
        f" {shown[1]} with it and {shown[0]} with --model",
        param="against",
    )


def _score(args: argparse.Namespace, text: _ScoredText, config: Config, reference: Config | None) -> Report:
    """Load the models and score the text window by window."""
    stride = args.context // 2 if args.stride is None else args.stride
    length = args.context - len(text.start)
    if not 1 <= stride <= length:
        raise ConfigError(f"stride: expected 1..{length} (context), got {stride}", param="stride")
    if len(text.token_ids) < length:
        got = f"one of {len(text.token_ids)}; a shorter --context takes it"
        raise ConfigError(f"file: expected a text of at least {length} tokens, got {got}", param="file")
    num_context = max(length - stride, 0 if len(text.start) else 1)
    todo = list(windows(len(text.token_ids), length, stride, num_context))
    with ExitStack() as stack:
        model = _loaded(config, args.context, "model", stack)
        comparer = None
        if reference is not None:
            other = _loaded(reference, args.context, "against", stack)
            if other.info.vocab_size != model.info.vocab_size:
                sizes = f"{model.info.vocab_size} tokens, got one of {other.info.vocab_size}"
                raise ConfigError(f"against: expected a vocabulary of {sizes}", param="against")
            comparer = Comparer(model, other, max(window.end - window.first for window in todo))
        report = Report(_named(config), None if reference is None else _named(reference), args.context, stride)
        # disable=None: no bar unless standard error is a terminal.
        for window in tqdm(todo, desc="scoring", unit="window", disable=None):
            prompt, count = text.prompt(window), window.end - window.first
            found: Comparison | None = None if comparer is None else comparer.compare(prompt, count)
            report.add(model.score(prompt, count) if found is None else found.nats, text.num_bytes(window), found)
    return report


def _named(config: Config) -> str:
    name, quantization = config.model.served_name, config.model.quantization
    return name if quantization is None else f"{name} in {quantization}"


def _loaded(config: Config, context: int, name: str, stack: ExitStack) -> ScoredModel:
    model = ScoredModel(config)
    stack.callback(model.close)
    most = model.info.max_request_tokens - 1
    if context > most:
        raise ConfigError(f"context: expected at most {most} tokens for --{name}, got {context}", param="context")
    return model
