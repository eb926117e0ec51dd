"""Filling in the middle: the marks that models were trained with, and prompts made of what is before and after.

Source: Bavarian et al. 2022 (arXiv 2207.14255); the spellings are of the models' own tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastdeploy_sd.text.added_tokens import Segment


@dataclass(frozen=True, slots=True)
class InfillMarks:
    """Control tokens in front of the text before the gap, of that after it, and of what fills it.

    Attributes:
        middle: "" = the text before the gap is the last, and goes on.
    """

    prefix: str
    suffix: str
    middle: str = ""

    @property
    def texts(self) -> Sequence[str]:
        """All of them."""
        return [text for text in (self.prefix, self.suffix, self.middle) if text]

    def prompt(self, before: str, after: str, begun: str = "") -> list[Segment]:
        """Return a prompt whose continuation belongs between the two texts, in which no control token acts.

        `begun`: what fills the gap so far.
        """
        parts = [(self.prefix, before if self.middle else before + begun), (self.suffix, after)]
        parts = [*parts, (self.middle, begun)] if self.middle else parts[::-1]
        segments = [Segment(*part) for mark, text in parts for part in ((mark, True), (text, False))]
        return [segment for segment in segments if segment.text]


MARKS = (
    InfillMarks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite 4
    InfillMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite code
    InfillMarks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillMarks("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),  # Seed-Coder
    InfillMarks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
    InfillMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek  # noqa: RUF001
    InfillMarks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    InfillMarks("[PREFIX]", "[SUFFIX]"),  # Codestral
)
# In front of the names of a repository and of each of its files.
_FILE_MARKS = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"), ("<reponame>", "<file_sep>"))
# With these a model ends what fills a gap, or begins another file.
_ENDS = (
    "<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<fim_pad>", "<fim-pad>", "<file_sep>",
    "<filename>", "<reponame>", "▁<EOT>",
)  # fmt: skip


def find_marks(control_tokens: Mapping[str, int]) -> InfillMarks | None:
    """Return the marks that a tokenizer has, None = it has none of those that are known."""
    return next((marks for marks in MARKS if all(text in control_tokens for text in marks.texts)), None)


def infill_ends(marks: InfillMarks, control_tokens: Mapping[str, int]) -> tuple[int, ...]:
    """Return the ids that end what fills a gap, besides those that end any text."""
    return tuple(control_tokens[text] for text in (*marks.texts, *_ENDS) if text in control_tokens)


def files_before(files: Sequence[tuple[str, str]], control_tokens: Mapping[str, int]) -> list[Segment]:
    """Return what goes in front of an infill prompt, so that a model knows names and texts of files, or of their parts.

    Source: Hui et al. 2024 (arXiv 2409.12186), as llama.cpp lays it out; without marks of files their texts follow a
    line each. ("", text) has no name. [] = there are none.
    """
    marks = next((pair for pair in _FILE_MARKS if all(text in control_tokens for text in pair)), None)
    if not files:
        return []
    if marks is None:
        return [Segment(f"\n\n--- snippet ---\n\n{text}", False) for _, text in files] + [Segment("\n", False)]
    repository, file = (Segment(text, True) for text in marks)
    segments = [repository, Segment("myproject\n", False)]
    for name, text in files:
        segments += [file, Segment(f"{name or 'tmp'}\n{text}", False)]
    return [*segments, file, Segment("filename\n", False)]
