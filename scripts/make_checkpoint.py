"""Write a checkpoint of a real model's exact shape with random weights.

Usage: python scripts/make_checkpoint.py SHAPE OUT_DIR [--seed N] [--tokenizer DIR] [--mtp]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fastdeploy_sd.bench.checkpoint import SHAPES, add_mtp_layer, make_checkpoint
from fastdeploy_sd.errors import ConfigError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", metavar="SHAPE", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("out", metavar="OUT_DIR", type=Path, help="directory to create")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    parser.add_argument("--tokenizer", metavar="DIR", type=Path, help="checkpoint to copy the tokenizer of")
    text = "also write OUT_DIR/mtp: one multi-token-prediction layer, for the methods that draft with it"
    parser.add_argument("--mtp", action="store_true", help=text)
    args = parser.parse_args()
    try:
        make_checkpoint(args.shape, args.out, args.seed, args.tokenizer)
        if args.mtp:
            add_mtp_layer(args.out, args.seed + 1)
    except ConfigError as error:
        print(f"make_checkpoint: {error.message}", file=sys.stderr)
        return 2
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
