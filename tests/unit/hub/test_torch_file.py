"""Files of PyTorch are read without running them. The files are written here, as torch.save does it."""

from __future__ import annotations

import json
import pickletools
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_sd.cli import WRONG_USAGE, main
from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.hub.torch_file import MAX_ENTRIES, TorchFile
from fastdeploy_sd.models.drafters.drafter_kind import open_drafter
from fastdeploy_sd.models.weights.safetensors import SafetensorsFile

OPS = {op.name: op.code.encode("latin-1") for op in pickletools.opcodes}
BASE = np.arange(48, dtype=np.float32).reshape(6, 8)
STORAGES = {"0": BASE.tobytes(), "1": np.arange(5).tobytes()}


def text(value: str) -> bytes:
    return OPS["BINUNICODE"] + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    return OPS["BININT"] + struct.pack("<i", value)


def numbers(*values: int) -> bytes:
    return OPS["MARK"] + b"".join(map(number, values)) + OPS["TUPLE"]


def named(name: str) -> bytes:
    module, _, function = name.rpartition(".")
    return OPS["GLOBAL"] + f"{module}\n{function}\n".encode()


def tensor(kind: str, key: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """The call that makes a tensor."""
    storage = (
        OPS["MARK"] + text("storage") + named(f"torch.{kind}") + text(key) + text("cpu") + number(9) + OPS["TUPLE"]
    )
    hooks = named("collections.OrderedDict") + OPS["EMPTY_TUPLE"] + OPS["REDUCE"]
    arguments = (
        storage + OPS["BINPERSID"] + number(offset) + numbers(*shape) + numbers(*strides) + OPS["NEWFALSE"] + hooks
    )
    return named("torch._utils._rebuild_tensor_v2") + OPS["MARK"] + arguments + OPS["TUPLE"] + OPS["REDUCE"]


def dictionary(items: Mapping[str, bytes]) -> bytes:
    made = named("collections.OrderedDict") + OPS["EMPTY_TUPLE"] + OPS["REDUCE"]
    return made + OPS["MARK"] + b"".join(text(name) + value for name, value in items.items()) + OPS["SETITEMS"]


def write(path: Path, program: bytes, storages: Mapping[str, bytes] = STORAGES, **more: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", OPS["PROTO"] + b"\x02" + program + OPS["STOP"])
        for name, data in [*((f"data/{key}", data) for key, data in storages.items()), *more.items()]:
            archive.writestr(f"archive/{name}", data)
    return path


TENSORS = {
    "whole": tensor("FloatStorage", "0", 0, (6, 8), (8, 1)),
    "turned": tensor("FloatStorage", "0", 0, (8, 6), (1, 8)),
    "part": tensor("FloatStorage", "0", 10, (2, 3), (8, 1)),
    "ids": tensor("LongStorage", "1", 0, (5,), (1,)),
    "none": tensor("FloatStorage", "0", 48, (0, 3), (3, 1)),
    "scalar": tensor("FloatStorage", "0", 7, (), ()),
}


def test_tensors_come_out_as_safetensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parameter = named("torch._utils._rebuild_parameter") + OPS["MARK"] + TENSORS["part"] + OPS["NEWTRUE"] + OPS["TUPLE"]
    inner = dictionary({"p": parameter + OPS["REDUCE"]})
    program = dictionary({**TENSORS, "epoch": number(3), "inner": inner}) + OPS["EMPTY_DICT"] + OPS["BUILD"]
    source = tmp_path / "heads"
    source.mkdir()
    write(source / "medusa_lm_head.pt", program, byteorder=b"little")
    (source / "config.json").write_text("{}")
    assert main(["drafter", "convert", str(source), str(tmp_path / "out")]) == 0
    assert "medusa_lm_head.pt: left out 'epoch', a int and no tensor" in capsys.readouterr().out
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    found = SafetensorsFile(tmp_path / "out" / "medusa_lm_head.safetensors")
    expected = {
        "whole": BASE, "turned": BASE.T, "part": BASE[1:3, 2:5], "ids": np.arange(5), "scalar": BASE[0, 7],
        "none": np.zeros((0, 3), np.float32), "inner.p": BASE[1:3, 2:5],
    }  # fmt: skip
    assert found.entries.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found.tensor(name), values, strict=True)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (named("os.system") + text("true") + OPS["TUPLE1"] + OPS["REDUCE"], "a call of os.system"),
        (named("builtins.eval") + text("1") + OPS["TUPLE1"] + OPS["REDUCE"], "a call of builtins.eval"),
        (named("collections.OrderedDict") + numbers(1) + OPS["REDUCE"], "a call of collections.OrderedDict"),
        (named("torch.nn.Linear") + OPS["EMPTY_TUPLE"] + OPS["NEWOBJ"], "got NEWOBJ of torch.nn.Linear"),
        (named("os.x") + OPS["EMPTY_DICT"] + OPS["BUILD"], "expected a dict to be changed, got os.x"),
        (
            dictionary({"a": tensor("FloatStorage", "0", 0, (49,), (1,))}),
            "'a': expected 196 bytes of storage '0', got 192",
        ),
        (dictionary({"a": tensor("FloatStorage", "0", 0, (999, 999), (0, 0))}), "expected 3992004 bytes"),
        (
            dictionary({"a": tensor("FloatStorage", "../x", 0, (1,), (1,))}),
            "expected 4 bytes of storage '../x', got none",
        ),
        (dictionary({"a": tensor("FloatStorage", "0", -1, (1,), (1,))}), "expected a shape and strides"),
        (dictionary({"a": tensor("FloatStorage", "0", 0, (1, 1), (1,))}), "expected a shape and strides"),
        (dictionary({"a": tensor("QInt8Storage", "0", 0, (1,), (1,))}), "expected storages of torch.DoubleStorage"),
        (OPS["EMPTY_DICT"] + number(1) + number(2) + OPS["SETITEM"], "expected names in the dictionaries, got 1"),
        (OPS["EMPTY_LIST"], "expected a dictionary of tensors, got"),
        (OPS["TUPLE3"] + OPS["SETITEMS"], "expected a description of tensors"),
        (text("a")[:-1], "expected a description of tensors"),
        (b"\xff", "expected a description of tensors"),
    ],
)
def test_what_is_more_than_tensors_is_refused(program: bytes, reason: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as raised:
        TorchFile(write(tmp_path / "a.bin", program))
    assert reason in str(raised.value)


def test_a_dictionary_that_contains_itself_many_times_ends(tmp_path: Path) -> None:
    names = b"".join(text(f"{i}") + OPS["BINGET"] + b"\x00" for i in range(100))
    with pytest.raises(CheckpointError, match=f"expected at most {MAX_ENTRIES} entries"):
        TorchFile(
            write(
                tmp_path / "a.bin", OPS["EMPTY_DICT"] + OPS["BINPUT"] + b"\x00" + OPS["MARK"] + names + OPS["SETITEMS"]
            )
        )


def test_other_files_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, big, packed, out = (tmp_path / name for name in ("plain.bin", "big.bin", "packed.bin", "out"))
    plain.write_bytes(b"no archive")
    write(big, dictionary(TENSORS), byteorder=b"big")
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 20))
    reasons = {
        plain: "a file that torch.save of PyTorch 1.6 or later wrote", big: "little-endian", packed: "not compressed",
        tmp_path / "none.bin": "found none", tmp_path: "big.bin: expected numbers",
    }  # fmt: skip
    for path, reason in reasons.items():
        assert main(["drafter", "convert", str(path), str(out)]) == WRONG_USAGE
        assert reason in capsys.readouterr().err
        assert not out.exists()
    out.mkdir()
    write(plain, dictionary(TENSORS))
    assert main(["drafter", "convert", str(plain), str(out)]) == WRONG_USAGE
    (tmp_path / "two").mkdir()
    write(tmp_path / "two" / "a.bin", dictionary(TENSORS))
    write(tmp_path / "two" / "b.bin", dictionary({"whole": TENSORS["whole"]}))
    assert main(["drafter", "convert", str(tmp_path / "two"), str(tmp_path / "out2")]) == WRONG_USAGE
    assert "got 'whole' again" in capsys.readouterr().err


def test_converted_heads_are_found(tmp_path: Path) -> None:
    """Medusa's and Hydra's published files, whose names say what they are."""
    heads = {"medusa": "0.0.linear.weight", "hydra": "hydra_mlp.0.0.linear.weight"}
    for kind, name in heads.items():
        source = tmp_path / kind
        source.mkdir()
        write(source / f"{kind}_lm_head.pt", dictionary({name: TENSORS["whole"]}))
        (source / "config.json").write_text(json.dumps({f"{kind}_num_heads": 1}))
        assert main(["drafter", "convert", str(source), str(tmp_path / f"{kind}-out")]) == 0
        assert open_drafter(str(tmp_path / f"{kind}-out"), kind).shape(name) == (6, 8)
