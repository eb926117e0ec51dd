"""Runs llama.cpp's converter on a checkpoint whose tokenizer it does not know by its hash.

The converter tells how a tokenizer splits text from a hash of its output, and refuses one it has never seen. The
bundled tokenizer splits as Qwen2's does but for contractions, and prompts are token ids here, so only a name depends on
it.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

_SPLIT = "qwen2"


def main(source: Path, checkpoint: Path, out: Path) -> None:
    """Convert `checkpoint` to a bfloat16 GGUF file with the converter in `source`."""
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    from conversion import base

    def split_of(model: Any, tokenizer: Any) -> str:
        del model, tokenizer
        return _SPLIT

    base.TextModel.get_vocab_base_pre = split_of
    sys.argv = ["convert", str(checkpoint), "--outtype", "bf16", "--outfile", str(out)]
    runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
