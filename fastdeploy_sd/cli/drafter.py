"""`fastdeploy-sd drafter`: prepares and checks drafters."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from fastdeploy_sd.cli import drafter_check
from fastdeploy_sd.cli.arguments import Parser
from fastdeploy_sd.cli.new_folder import new_folder, verify_new
from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.hub.torch_file import TorchFile
from fastdeploy_sd.process.safetensors_writer import Entries, num_bytes_of, write_safetensors

_PROG = "fastdeploy-sd drafter"
_SUFFIXES = (".bin", ".pt")
# What such a folder may hold besides weights: small files that describe the model.
_COPIED = (".json", ".model", ".txt", ".jinja")


def main(argv: Sequence[str]) -> int:
    """Run the command that is named first.

    Raises:
        ConfigError: an argument is wrong, or the target exists or cannot be written.
        CheckpointError: the source cannot be read.
    """
    parser = Parser(_PROG, "Prepare and check drafters.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    convert = commands.add_parser(
        "convert",
        description="Write the tensors of PyTorch's files (.bin, .pt) as safetensors. Nothing in the files is run: one "
        "that asks for more than dictionaries of tensors is refused.",
        help="write PyTorch's files as safetensors",
    )
    convert.add_argument("source", type=Path, help="a folder with such files, or one of them")
    convert.add_argument("target", type=Path, help="the folder to make")
    text = "say what a drafter is worth with a model, and which reading of its files is right"
    commands.add_parser("check", description=text, help=text)
    if argv[:1] == ["check"]:
        return drafter_check.main(argv[1:])
    args = parser.parse_args(argv)
    _convert(args.source, args.target)
    return 0


def _convert(source: Path, target: Path) -> None:
    verify_new(target)
    paths = [source] if not source.is_dir() else sorted(path for path in source.iterdir() if path.suffix in _SUFFIXES)
    if not paths:
        raise CheckpointError(f"{source}: expected files that end with {' or '.join(_SUFFIXES)}, found none")
    files = [TorchFile(path) for path in paths]
    entries = _entries(files)
    name = "model" if len(paths) > 1 or paths[0].stem == "pytorch_model" else paths[0].stem
    num_bytes, weights = num_bytes_of(entries), target / f"{name}.safetensors"
    with new_folder(target, num_bytes):
        with tqdm(total=num_bytes, desc="converting", unit="B", unit_scale=True, disable=None) as bar:
            write_safetensors(weights, entries, (array for file in files for _, array in file.arrays()), bar.update)
        shutil.copymode(paths[0], weights)
        for path in sorted(paths[0].parent.iterdir()):
            if path.suffix in _COPIED and path.is_file() and not path.name.endswith(".index.json"):
                shutil.copyfile(path, target / path.name)
    for file in files:
        for left, kind in file.left_out.items():
            print(f"{file.path.name}: left out {left!r}, a {kind} and no tensor")
    print(f"{target}: {len(entries)} tensors of {num_bytes / 1e9:.2f} GB")


def _entries(files: Sequence[TorchFile]) -> Entries:
    """Return the type and the shape of every tensor, in the order in which the files give them."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in files:
        for name, tensor in file.in_order():
            if name in found:
                raise CheckpointError(f"{file.path}: expected tensors of other names than before, got {name!r} again")
            found[name] = tensor.dtype, tensor.shape
    if not found:
        raise CheckpointError(f"{files[0].path}: expected tensors, found none")
    return found
