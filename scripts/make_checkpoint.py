"""Write a checkpoint of a real model's exact shape with random weights.

Usage: python scripts/make_checkpoint.py SHAPE OUT_DIR [--seed N] [--tokenizer DIR]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fastdeploy_sd.bench.checkpoint import SHAPES, make_checkpoint
from fastdeploy_sd.errors import ConfigError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", metavar="SHAPE", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("out", metavar="OUT_DIR", type=Path, help="directory to create")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    parser.add_argument("--tokenizer", metavar="DIR", type=Path, help="checkpoint to copy the tokenizer of")
    args = parser.parse_args()
    try:
        make_checkpoint(args.shape, args.out, args.seed, args.tokenizer)
    except ConfigError as error:
        print(f"make_checkpoint: {error.message}", file=sys.stderr)
        return 2
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
