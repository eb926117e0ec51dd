"""Checks everything that needs a GPU on this machine's, in stages of at most nine minutes, and keeps a JSON file of
findings.

Usage: [PYTHON=python3] [WHEELS=FOLDER] scripts/gpu_check.sh [--stage N ...] [--again] [--out FILE]

  1  every op against its reference, then small cases under compute-sanitizer: memory, races, barriers
  2  golden checkpoints, formats and families; the equality matrix; hand-over of KV; two GPUs, where there are two
  3  the time of every kernel, and its bound
  4  an engine: decoding, prompts, drafts, `auto` on recorded texts, what steps cost, how long the GPU waits
  5  the same work by PyTorch and FlashInfer, where they are installed
  6  servers: the same answers with every method and with a second level of the prefix cache; one under load

The kernels are compiled for this GPU before anything else. A check that fails or is cut at its limit, with all that it
started, is said so, and the others run. The file is written after each, and has what is aimed at, and what was found
(gpu_aims.py). A check that has passed with these sources is left out the next time, unless --again or --only asks for
it: so the stages may run one after the other, or again after something was mended.

Without $PYTHON, .venv is made where there is none. With it, nothing is fetched: packages that this Python lacks come
from the wheels in $WHEELS, or are named, and fail the checks that need them. Paddle is not needed.

Status 0: all passed; 1: a check failed; 2: no GPU here can be used.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import time
import tomllib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from scripts.gpu_aims import aims, summary
from scripts.gpu_stages import BUILD, STAGES, Check, checks
from scripts.served_answers import GRACE_S, ROOT, child

OUT = ROOT / "build" / "gpu-check.json"
SCHEMA_VERSION = 5  # of the file; raised when what it holds changes its meaning
_PADDLE = "paddlepaddle"
_TAIL = 4000
_REFUSAL_S = 30
_WITHOUT_PADDLE = ROOT / "fastdeploy_sd" / "device" / "without_paddle"
_SOURCES = ("fastdeploy_sd", "custom_ops", "benchmarks", "tests", "scripts")
_SUFFIXES = (".py", ".cc", ".cu", ".h")


def main(argv: Sequence[str]) -> int:
    """Run the checks; see the module."""
    args = _read(argv)
    if (reason := refusal()) is not None:
        print(f"gpu_check: {reason}", file=sys.stderr)
        return 2
    args.out.parent.mkdir(parents=True, exist_ok=True)
    missing = _provide_packages()
    num_gpus = _captured(("nvidia-smi", "-L")).count("GPU ")
    findings = _findings(args.out, gpu_name())
    findings |= {"num_gpus": num_gpus, "missing_packages": missing}
    found, digest = findings["checks"], sources_digest()
    for check in (BUILD, *_wanted(args, num_gpus)):
        if args.only is None and not args.again and check is not BUILD and _is_done(found.get(check.name), digest):
            print(f"gpu_check: {check.name}: passed before")
            continue
        found[check.name] = {**result_of(check, args.out.parent), "stage": check.stage, "sources": digest}
        findings["aims"] = aims(found)
        args.out.write_text(json.dumps(findings, indent=1) + "\n")
        if check is BUILD and not found[check.name]["passed"]:
            print(f"gpu_check: no kernels: {found[check.name]['tail']}", file=sys.stderr)
            return 2
    for line in summary(found):
        print(f"gpu_check: {line}")
    failed = ", ".join(name for name, result in found.items() if not result["passed"])
    print(f"gpu_check: {args.out}: " + (f"failed: {failed}" if failed else "all passed"))
    return 1 if failed else 0


def _read(argv: Sequence[str]) -> argparse.Namespace:
    names = [check.name for check in checks()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=OUT, metavar="FILE", help=f"findings (default: {OUT})")
    text = "some stages only: " + ", ".join(f"{number} {name}" for number, name in STAGES.items())
    parser.add_argument("--stage", type=int, nargs="+", choices=list(STAGES), metavar="N", help=text)
    text = f"some checks only, whether they passed before or not: {', '.join(names)}"
    parser.add_argument("--only", nargs="+", choices=names, metavar="CHECK", help=text)
    parser.add_argument("--again", action="store_true", help="also what passed before")
    parser.add_argument("--full", action="store_true", help="all other tests for a GPU too, which take long")
    return parser.parse_args(argv)


def _wanted(args: argparse.Namespace, num_gpus: int) -> Iterator[Check]:
    for check in checks():
        if not is_wanted(check, args.stage, args.only, is_full=args.full):
            continue
        if check.num_gpus > max(num_gpus, 1):
            print(f"gpu_check: {check.name}: left out: there are fewer than {check.num_gpus} GPUs", flush=True)
            continue
        yield check


def is_wanted(
    check: Check, stages: Sequence[int] | None = None, only: Sequence[str] | None = None, *, is_full: bool = False
) -> bool:
    """Whether a check belongs to a run: one that is named does."""
    if only is not None:
        return check.name in only
    return (is_full or not check.is_full) and (stages is None or check.stage in stages)


def _findings(path: pathlib.Path, gpu: str) -> dict[str, Any]:
    """What was found on this GPU before, or nothing yet."""
    try:
        findings: dict[str, Any] = json.loads(path.read_text())
        if (findings["schema_version"], findings["gpu"]) == (SCHEMA_VERSION, gpu):
            return findings
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass  # it is written anew
    return {"schema_version": SCHEMA_VERSION, "gpu": gpu, "checks": {}}


def _is_done(result: Mapping[str, Any] | None, digest: str) -> bool:
    return result is not None and bool(result["passed"]) and result["sources"] == digest


def sources_digest() -> str:
    """A digest of all that runs here, so that what was changed is checked again."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in _SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in _SUFFIXES):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _provide_packages() -> Sequence[str]:
    """Install the wheels in $WHEELS; name what is missing still, and let names stand in for Paddle."""
    if wheels := os.environ.get("WHEELS"):
        files = map(str, sorted(pathlib.Path(wheels).glob("*.whl")))
        subprocess.run((sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *files), check=False)
        importlib.invalidate_caches()
    missing = missing_packages()
    if missing:
        print(f"gpu_check: {sys.executable} lacks {', '.join(missing)}", flush=True)
    if _PADDLE in missing:
        paths = [str(_WITHOUT_PADDLE), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return missing


def missing_packages() -> list[str]:
    """Names of the packages that this one and its tests depend on, which this Python lacks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    missing = [] if importlib.util.find_spec("paddle") else [_PADDLE]
    for name in (re.split(r"[^\w-]", text)[0] for text in (*project["dependencies"], "pytest", "hypothesis", "gguf")):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return missing


def refusal() -> str | None:
    """Why nothing can be checked here, None if it can."""
    done = _captured(("nvidia-smi", "-L"))
    return None if done.startswith("GPU ") else "expected a GPU that nvidia-smi lists, found none"


def gpu_name() -> str:
    """What nvidia-smi says of it."""
    return _captured(("nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem", "--format=csv"))


def _figures(command: Sequence[str], out: pathlib.Path, text: str) -> Any:
    """What a command wrote to its file, or said in JSON; None where it does neither."""
    said = text[text.index("{") : text.rindex("}") + 1] if "--json" in command else "null"
    return json.loads(out.read_text() if "{out}" in command else said)


def result_of(check: Check, folder: pathlib.Path) -> dict[str, Any]:
    """Run one check: whether it passed, its seconds, its figures and the end of what it said."""
    print(f"gpu_check: {check.name}", flush=True)
    begin, figures, text = time.monotonic(), None, ""
    try:
        if check.run is not None:
            figures = check.run(check.limit_s)
        else:
            out = folder / f"gpu-check-{check.name.replace(' ', '-')}.json"
            text = _run([part.replace("{out}", str(out)) for part in check.command], check.limit_s)
            if not re.search(check.expected, text):
                raise ValueError(f"expected {check.expected!r} in what it says")
            figures = _figures(check.command, out, text)
        passed = True
    except Exception as error:
        output = getattr(error, "output", None) or ""
        passed, text = False, f"{text}{output}\n{''.join(traceback.format_exception_only(error))}"
    seconds = round(time.monotonic() - begin, 1)
    print(f"gpu_check: {check.name}: {'passed' if passed else 'failed'} in {seconds} s", flush=True)
    return {"passed": passed, "seconds": seconds, "figures": figures, "tail": text[-_TAIL:]}


def _run(command: Sequence[str], limit_s: float) -> str:
    with child(command, time.monotonic() + limit_s, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        begin = time.monotonic()
        text, _ = process.communicate(timeout=limit_s + GRACE_S)
        if time.monotonic() - begin >= limit_s:
            raise subprocess.TimeoutExpired(command, limit_s, output=text)
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, command, output=text)
    return text


def _captured(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=_REFUSAL_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
