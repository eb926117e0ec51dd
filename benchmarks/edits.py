"""`bench edits`: recordings of texts that are repeated with changes, for `fastdeploy-sd replay`. Knows no model.

    renames.jsonl      a piece of code, again with one name changed everywhere
    corrections.jsonl  a piece of code in which one word in 24 is wrong, again with all of them right

The pieces are the Python standard library's, so the answers are known and nothing has to be generated.
"""

from __future__ import annotations

import json
import keyword
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.command import OUTPUT_DIR, Command
from fastdeploy_sd.errors import ConfigError

_NUM_LINES = 60
_WRONG_EVERY = 24
# A name that is changed occurs so often: seldom enough that most of the text stays as it is.
_OCCURRENCES = range(4, 21)
_NEW_NAMES = ("count", "my_value", "renamed", "user_id", "NewName")
_NAME = re.compile(r"[A-Za-z_]\w{2,}")


def main(argv: Sequence[str]) -> int:
    """Write the recordings and print their paths."""
    command = Command("edits", "Write recordings of texts that are repeated with changes, for fastdeploy-sd replay.")
    command.number("--count", 40, "texts of each kind")
    command.number("--seed", 0, least=0)
    command.folder(OUTPUT_DIR / "edits", "for the recordings", "--out")
    args = command.read(argv)
    edits = {kind: make_edits(kind, args.count, args.seed) for kind in EDITS}
    args.out.mkdir(parents=True, exist_ok=True)
    for kind, conversations in edits.items():
        path = args.out / f"{kind}.jsonl"
        lines = [json.dumps(conversation) for conversation in conversations]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(path)
    return 0


def make_edits(kind: str, count: int, seed: int = 0) -> list[dict[str, object]]:
    """Return conversations of one question and its answer, as `replay` reads them; repeatable.

    Args:
        kind: one of EDITS.

    Raises:
        ConfigError: the standard library has fewer sources that are long enough.
    """
    rng = random.Random(seed)
    found: list[dict[str, object]] = []
    for piece in _pieces(rng):
        edit = EDITS[kind](piece, rng)
        if edit is None:
            continue
        question, answer = edit
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        found.append({"id": f"{kind}-{len(found)}", "messages": messages})
        if len(found) == count:
            return found
    raise ConfigError(f"count: expected at most {len(found)}, the sources found, got {count}", param="count")


def _rename(piece: str, rng: random.Random) -> tuple[str, str] | None:
    counts = Counter(name for name in _NAME.findall(piece) if not keyword.iskeyword(name))
    names = sorted(name for name, occurrences in counts.items() if occurrences in _OCCURRENCES)
    if not names:
        return None
    old, new = rng.choice(names), rng.choice(_NEW_NAMES)
    return f"Rename {old} to {new}:\n{piece}", re.sub(rf"\b{old}\b", new, piece)


def _correct(piece: str, rng: random.Random) -> tuple[str, str] | None:
    names = _NAME.findall(piece)
    if len(names) < _WRONG_EVERY:
        return None
    wrong = {begin + rng.randrange(_WRONG_EVERY) for begin in range(0, len(names), _WRONG_EVERY)}
    numbers = iter(range(len(names)))
    damaged = _NAME.sub(lambda match: rng.choice(names) if next(numbers) in wrong else match[0], piece)
    return f"Correct the wrong words:\n{damaged}", piece


EDITS: Mapping[str, Callable[[str, random.Random], tuple[str, str] | None]] = {
    "renames": _rename,
    "corrections": _correct,
}


def _pieces(rng: random.Random) -> Iterator[str]:
    """Yield some lines of every source file that is long enough."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    rng.shuffle(paths)
    for path in paths:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        if len(lines) > _NUM_LINES:
            begin = rng.randrange(len(lines) - _NUM_LINES)
            yield "\n".join(lines[begin : begin + _NUM_LINES])
