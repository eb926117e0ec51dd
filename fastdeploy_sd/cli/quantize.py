"""`fastdeploy-sd quantize`: writes a checkpoint that is quantised already."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from fastdeploy_sd.cli.arguments import Parser
from fastdeploy_sd.cli.new_folder import new_folder, verify_new
from fastdeploy_sd.config import load_config
from fastdeploy_sd.hub import located
from fastdeploy_sd.hub.selection import is_of_checkpoint, is_weights

_PROG = "fastdeploy-sd quantize"
_FORMATS = ("wint8", "wint4")
# What is written anew, or describes other weights.
_LEFT_OUT = (
    "config.json", "model.safetensors.index.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Write the checkpoint; a folder that is not whole is removed.

    Raises:
        ConfigError: an argument is wrong, the target exists, or there is too little room.
        CheckpointError: the model cannot be read.
    """
    parser = Parser(
        _PROG,
        "Write a checkpoint with the weights that `serve --quantization` makes at every start.",
        "Options of `serve` that say where a model is, as --revision and --download-dir, are taken too.",
    )
    parser.add_argument("model", help="a folder, a GGUF file, or the name of a repository")
    parser.add_argument("target", type=Path, help="the folder to make")
    parser.add_argument("--format", choices=_FORMATS, required=True, help="as --quantization of `serve`")
    args, options = parser.parse_known_args(argv)
    target: Path = args.target
    verify_new(target)
    model = located(load_config(["--model", args.model, *options], _PROG)).model.path
    from fastdeploy_sd.worker.loading.quantized_folder import QuantizedFolder

    folder = QuantizedFolder(model, args.format)
    with new_folder(target, folder.num_bytes):
        folder.write(target)
        for name in filter(is_of_checkpoint, (str(path.relative_to(model)) for path in sorted(model.rglob("*")))):
            if name not in _LEFT_OUT and (not is_weights(name) or "/" in name):
                (target / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(model / name, target / name)
    print(f"{target}: {folder.num_bytes / 1e9:.2f} GB of weights in {args.format}")
    return 0
