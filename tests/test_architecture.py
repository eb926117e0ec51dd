"""The rules of docs/development.md that a reader cannot check by looking at one file.

Who may import whom, names that never appear, file sizes and names. Adding a package means adding its row here.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import fastdeploy_sd
from fastdeploy_sd.types.draft_methods import METHODS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fastdeploy_sd"
TOP_LEVEL = ("fastdeploy_sd", "custom_ops", "benchmarks", "scripts", "tests", "docs")
GENERATED = {"__pycache__", "build", "lib", "csrc", "demo_model", "golden", "node_modules"}

# Part of the package -> our parts it may import. Values flow down; nothing calls upward: a part imports those above it.
VALUES = {"types", "errors", "sampling_params", "rules"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "sampling_params": {"errors", "rules.sampling"},
    "types": {"sampling_params"},
    "rules": {"errors", "types"},
    "config": {"errors", "types"},
    "process": {"config", "errors"},
    "metrics": VALUES,
    "wire": VALUES | {"config", "metrics", "process"},
    "text": VALUES | {"config", "process"},
    "device": VALUES,
    "ops": VALUES | {"device"},
    "models": VALUES | {"config", "device", "ops", "process"},
    "hub": {"config", "errors", "models.checkpoint", "models.drafters.drafter_kind", "models.gguf", "process", "types"},
    "spec_decode": VALUES | {"config", "device", "models", "ops", "process"},
    "engine": VALUES | {"config", "process", "wire"},
    "worker": VALUES
    | {"config", "device", "models", "ops", "process", "spec_decode"}
    | {"engine.interfaces", "engine.kvcache.prefix_cache", "text.guidance", "text.tokenizer"},
    "distributed": VALUES | {"config", "device", "engine", "models", "process", "spec_decode", "wire", "worker"},
    "disaggregation": VALUES | {"config", "device.checksum", "engine", "wire"},
    "cluster": VALUES | {"config", "engine", "metrics", "process", "wire"},
    "entrypoints": VALUES | {"cluster", "config", "distributed", "engine", "hub", "metrics", "process", "text", "wire"},
    "llm": VALUES | {"config", "distributed", "engine", "entrypoints", "hub", "process", "text"},
    "cli": VALUES
    | {"cluster", "config", "device", "distributed", "engine", "entrypoints", "hub", "ops", "process"}
    | {"spec_decode", "text", "worker"},
}
# Third-party package -> the only places that may import it; () = none, the package does without.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "paddle": (
        "device",
        "ops",
        "models",
        "spec_decode/model_based",
        "spec_decode/proposer.py",  # its types only
        "worker",
    ),
    "paddlenlp": (),
    "zmq": ("wire/channel.py", "wire/sockets.py"),
    "mooncake": ("disaggregation/transports/rdma.py",),
    "msgpack": ("wire",),
    "fastapi": ("entrypoints/openai", "cluster/router/app.py", "wire/http"),
    "starlette": ("entrypoints", "cluster/router", "wire/http"),
    "uvicorn": ("entrypoints", "wire/http"),
    "pydantic": ("entrypoints/openai", "wire/http"),
    "tokenizers": ("text",),
    "sentencepiece": ("text",),
    "google": ("text/sentencepiece_tokenizer.py",),
    "jinja2": ("text",),
    "llguidance": ("text/guidance", "worker"),
    "opentelemetry": ("wire/http/tracing.py",),
    "prometheus_client": ("metrics",),
    "yaml": ("config",),
    "httpx": ("cli",),
    "huggingface_hub": ("hub/huggingface.py",),
    "modelscope": ("hub/modelscope.py",),
    "matplotlib": (),
    "redis": ("cluster/redis/store.py",),
    "torch": (),
    "transformers": (),
}
# What the meanings of ops may know: values and NumPy's number formats, and nothing of how ops are implemented.
REFERENCE = PACKAGE / "ops" / "reference"
REFERENCES_MAY_IMPORT = {"types", "errors", "device.arrays", "ops.reference"} | {
    f"ops.{values}"
    for values in (
        *("adapter_slots", "bf16", "candidates", "delta_memory", "kv_cache", "linear_format", "mtp_batch"),
        "ngram_texts",
    )
}
PADDLE_FREE = [part for part in MAY_IMPORT if part not in ONLY_IN["paddle"]]
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.load", "os.system"}
FORBIDDEN_FILE_NAMES = re.compile(r"(utils?|helpers?|common|misc)\.\w+$|_(v\d+|impl|new|old)\.\w+$")
# Nothing of one machine: absolute paths of homes and scratch folders, paths out of the checkout.
MACHINE_PATH = re.compile(r"(?<![\w.~}$/])/(?:home|root|tmp|mnt|work|Users)/\w|\.\./shared\b|\bissue #?\d")
MAX_LINES = 300
MAX_LINES_OF_TESTS = 500


def files(*suffixes: str) -> list[Path]:
    found = [p for top in TOP_LEVEL for p in (ROOT / top).rglob("*") if p.suffix in suffixes and p.is_file()]
    found += [p for p in ROOT.iterdir() if p.suffix in suffixes and p.is_file()]
    return sorted(p for p in found if GENERATED.isdisjoint(p.relative_to(ROOT).parts))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return what rules are about, of a file: to go through all nodes takes longer than to parse."""
    kinds = (ast.Import, ast.ImportFrom, ast.ExceptHandler, ast.Call, ast.keyword)
    return [node for node in ast.walk(tree(path)) if isinstance(node, kinds)]


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Return (line, dotted name) of everything a file imports, inside functions too."""
    found: list[tuple[int, str]] = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            found.append((node.lineno, node.module))
            found += ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
    return found


def part_of(path: Path) -> str:
    """Return the part a file of the package belongs to: its first folder, or its own name at the top."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_below(name: str, allowed: str) -> bool:
    return name == allowed or name.startswith(allowed + ".")


def own_import_errors(path: Path) -> Iterator[str]:
    part = part_of(path)
    known = MAY_IMPORT | {"__init__": {"llm", "sampling_params"}}
    if part not in known:
        yield f"{path}: part '{part}' has no row in MAY_IMPORT"
        return
    allowed = known[part] | {part}
    for line, name in imports(path):
        target = name.removeprefix("fastdeploy_sd.")
        # `from fastdeploy_sd.engine import stats` is also seen as the import of fastdeploy_sd.engine itself.
        is_parent = any(a.startswith(target + ".") for a in allowed)
        is_own = name.startswith("fastdeploy_sd.") and not target.startswith("__")
        if is_own and not is_parent and not any(is_below(target, a) for a in allowed):
            yield f"{path}:{line}: {part} may not import {target}"


def call_name(node: ast.Call) -> str:
    return ast.unparse(node.func)


def forbidden_names(path: Path) -> Iterator[str]:
    for line, name in imports(path):
        if name.split(".")[0] in FORBIDDEN_MODULES:
            yield f"{path}:{line}: imports {name}"
    for node in nodes(path):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{path}:{node.lineno}: bare except"
        elif isinstance(node, ast.Call) and call_name(node) in FORBIDDEN_CALLS:
            yield f"{path}:{node.lineno}: calls {call_name(node)}"
        elif isinstance(node, ast.keyword) and node.arg in ("shell", "allow_pickle"):
            yield f"{path}:{node.lineno}: passes {node.arg}"


def test_nothing_imports_upward() -> None:
    errors = [error for path in sorted(PACKAGE.rglob("*.py")) for error in own_import_errors(path)]
    assert not errors, "\n".join(errors)


def test_the_tables_name_parts_that_exist() -> None:
    parts = {part_of(path) for path in PACKAGE.rglob("*.py")}
    order = list(MAY_IMPORT)
    assert not [
        f"{part} -> {name}"
        for part, allowed in MAY_IMPORT.items()
        for name in allowed - {"rules.sampling"} - VALUES
        if order.index(name.split(".")[0]) > order.index(part)
    ]
    named = set(MAY_IMPORT) | {name.split(".")[0] for allowed in MAY_IMPORT.values() for name in allowed}
    assert named <= parts
    assert not [place for places in ONLY_IN.values() for place in places if not (PACKAGE / place).exists()]


@pytest.mark.parametrize("library", ONLY_IN)
def test_third_party_package_stays_in_its_place(library: str) -> None:
    places = [PACKAGE / place for place in ONLY_IN[library]]
    found = [
        f"{path}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, name in imports(path)
        if is_below(name, library) and not any(path == p or p in path.parents for p in places)
    ]
    assert not found, f"{library} is imported in {sorted(set(found))}"


def test_paddle_free_parts_import_without_paddle() -> None:
    """Also through our own modules: importing Paddle costs the HTTP process a second and 300 MB."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for part in PADDLE_FREE
        for path in [*(PACKAGE / part).rglob("*.py"), PACKAGE / f"{part}.py"]
        if path.is_file() and path.name != "__main__.py"
        if not any(path.is_relative_to(PACKAGE / place) for place in ONLY_IN["paddle"])
    ]
    code = f"import sys, importlib; sys.modules['paddle'] = None\nfor m in {modules!r}: importlib.import_module(m)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_forbidden_names() -> None:
    errors = [error for path in files(".py") for error in forbidden_names(path)]
    assert not errors, "\n".join(errors)


def test_kernels_know_no_framework() -> None:
    bindings = ROOT / "custom_ops" / "bindings"
    found = [
        str(path)
        for path in files(".cc", ".h", ".cu", ".cuh")
        if bindings not in path.parents
        and re.search(r'#include\s*["<](paddle|torch)/', path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_references_know_nothing_of_implementations() -> None:
    found = [
        f"{path}:{line}: {name}"
        for path in sorted(REFERENCE.glob("*.py"))
        for line, name in imports(path)
        if is_below(name, "fastdeploy_sd")
        and not any(is_below(name.removeprefix("fastdeploy_sd."), allowed) for allowed in REFERENCES_MAY_IMPORT)
    ]
    assert not found, "\n".join(found)


def test_no_module_spells_a_struct_of_the_library() -> None:
    """They come from the library's own table."""
    spelled = [path for path in PACKAGE.rglob("*.py") if "_fields_" in path.read_text(encoding="utf-8")]
    assert spelled == [PACKAGE / "device" / "layout.py"]


def test_what_runs_ops_names_none() -> None:
    """Programs, recordings and operators work for every op: no string of device/ is the name of one."""
    headers = [path.read_text(encoding="utf-8") for path in (ROOT / "custom_ops" / "include" / "fdsd").glob("*.h")]
    ops = {camel for text in headers for camel in re.findall(r"^Error (\w+)\(const \1Params& p\);", text, re.MULTILINE)}
    names = {re.sub(r"(?<!^)([A-Z])", r"_\1", op).lower() for op in ops}
    assert len(names) > 10
    strings = {
        node.value: f"{path}:{node.lineno}"
        for path in sorted((PACKAGE / "device").rglob("*.py"))
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert not [place for text, place in strings.items() if text.removeprefix("fdsd_") in names]


def test_methods_are_known_by_name_in_their_registry_only() -> None:
    """What depends on a drafting method is asked of its entry."""
    names = set(METHODS) - {"auto"}  # which is a value of other options too
    found = [
        f"{path}:{part.lineno}: {part.value!r}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Compare | ast.Match)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and part.value in names
    ]
    assert not found, "\n".join(found)


def test_files_stay_small() -> None:
    errors = []
    for path in files(".py", ".cc", ".h", ".cu", ".cuh", ".sh"):
        name = str(path.relative_to(ROOT))
        limit = MAX_LINES_OF_TESTS if name.startswith("tests/") else MAX_LINES
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        if num_lines > limit:
            errors.append(f"{name}: {num_lines} lines, at most {limit}")
    assert not errors, "\n".join(errors)


def test_file_names_are_nouns() -> None:
    found = [str(p) for p in files(".py", ".cc", ".h", ".cu", ".cuh") if FORBIDDEN_FILE_NAMES.search(p.name)]
    assert not found


def test_no_paths_of_a_machine() -> None:
    found = [
        f"{path}:{number}: {line.strip()}"
        for path in files(".py", ".cc", ".h", ".md", ".yaml", ".yml", ".toml", ".cu", ".sh", "")
        if path != Path(__file__).resolve()
        and path.name not in (".coverage", ".git")  # .git is a file in a linked worktree
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not found, "\n".join(found)


def test_changelog_starts_with_the_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[:1] == [fastdeploy_sd.__version__]
