"""Who may import whom, and how long files and functions may be: read from the sources, so no branch hides anything."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "skipstone"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120
FORBIDDEN_NAMES = ("utils", "util", "helpers", "common", "misc")

BASE = ("errors", "config", "spec_config", "registry")
DATA = (*BASE, "core", "outputs")
# What each part may import besides itself. A longer name wins over its prefix; "models" covers all of models.
ALLOWED: dict[str, tuple[str, ...]] = {
    "errors": (),
    "config": ("errors", "spec_config"),
    "spec_config": ("errors", "registry"),
    "registry": ("errors",),
    "core": BASE,
    "outputs": (*BASE, "core"),
    "kernels": (*BASE, "core"),
    "layers": (*BASE, "core", "kernels"),
    "attention": (*BASE, "core", "kernels"),
    "models": (*BASE, "core", "kernels", "layers", "attention.backend"),
    "spec": (*BASE, "core", "kernels", "attention.backend", "models.base"),
    "runtime": (*BASE, "core", "kernels", "layers", "attention", "models", "spec"),
    "text": (*BASE, "core"),
    "session": (*DATA, "kernels.reference.sampling", "runtime", "text"),
    "llm": (*DATA, "attention", "models", "spec", "runtime", "text", "session"),
    "cli": (*DATA, "kernels.dispatch", "models", "runtime.k_table", "llm", "text", "server.config"),
    "server": (*DATA, "kernels.dispatch", "runtime", "models.base", "llm", "session", "text", "cli.output"),
    "cli.serve": (*DATA, "models.locate", "server"),
    # Programs about the kernels themselves.
    **dict.fromkeys(
        (
            "tools.doctor.op_inputs",
            "tools.doctor.op_cases",
            "tools.doctor.op_run",
            "tools.bench.kernel_run",
            "tools.bench.kernel_peer",
        ),
        (*DATA, "kernels"),
    ),
    "tools.doctor.report": (*DATA, "kernels", "attention.msa_aiter", "runtime"),
    "tools.bench.decode_run": (*DATA, "kernels.ops", "layers.feed_forward", "runtime"),
    "tools.inspect.heads": (*DATA, "kernels.dispatch", "models", "runtime"),
    "tools": (
        *DATA,
        "kernels.dispatch",
        "runtime",
        "models.base",
        "models.loader",
        "models.locate",
        "models.mtp",
        "models.stored",
        "spec.ngram",
        "spec.proposer",
        "llm",
        "session",
        "text",
        "cli",
        "server",
    ),
    "__init__": ("config", "core.request", "llm"),
    "__main__": ("cli.main",),
}
# Packages for accelerators: their absence must not matter anywhere else.
ACCELERATOR_PACKAGES = ("triton", "aiter", "flashinfer", "deep_gemm", "flash_mla")
ACCELERATOR_PLACES = ("kernels", "attention.msa_aiter")
IMPORTERS_BY_NAME = ("registry", "__init__")  # who may turn a string into a module


def within(module: str, prefix: str) -> bool:
    """Whether a dotted name is the prefix or lies below it."""
    return module == prefix or module.startswith(prefix + ".")


def module_name(package: Path, path: Path) -> str:
    """Dotted name below the package; `__init__` of a subpackage is the subpackage."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imported_modules(tree: ast.AST, module: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of every import, wherever it stands in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = [package, *module.split(".")][: -node.level] or [package]
                base = ".".join([*parents, base] if base else parents)
            # `from a.b import c` may name a module c or an attribute of a.b: the longer name is judged.
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def rule_for(module: str) -> str | None:
    """The longest key of the table that covers a module."""
    keys = [key for key in ALLOWED if within(module, key)]
    return max(keys, key=len, default=None)


def import_faults(package: Path) -> list[str]:
    """Every import that the table forbids, as file:line and names."""
    faults = []
    for path in sorted(package.rglob("*.py")):
        module, tree = module_name(package, path), ast.parse(path.read_text())
        rule = rule_for(module)
        if rule is None:
            faults.append(f"{path.name}: {module} has no place in the table of ranks")
            continue
        own = rule if rule in BASE else rule.split(".")[0]
        for line, name in imported_modules(tree, module, package.name):
            fault = _judge(module, rule, own, name, package.name)
            if fault:
                faults.append(f"{path.relative_to(package)}:{line}: {fault}")
        faults += [f"{path.relative_to(package)}:{line}: {fault}" for line, fault in _dynamic_imports(tree, module)]
    return faults


def _judge(module: str, rule: str, own: str, name: str, package: str) -> str | None:
    root = name.split(".")[0]
    if root in ACCELERATOR_PACKAGES and not any(within(module, place) for place in ACCELERATOR_PLACES):
        return f"{module} imports {root}, an accelerator package"
    if root != package:
        return None
    target = name.removeprefix(package).lstrip(".") or "__init__"
    if target == "__init__":
        return f"{module} imports the package itself; import the module that is meant"
    if any(within(target, allowed) for allowed in (*ALLOWED[rule], own, rule)):
        return None
    return f"{module} may not import {target}"


def _dynamic_imports(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    if module in IMPORTERS_BY_NAME:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield node.lineno, f"{module} imports by name; only registry does that"


def size_faults(package: Path) -> list[str]:
    """Files and functions that are too long, and modules whose name says nothing."""
    faults = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        where = path.relative_to(package)
        if text.count("\n") > MAX_FILE_LINES:
            faults.append(f"{where}: {text.count(chr(10))} lines, at most {MAX_FILE_LINES}")
        if path.stem in FORBIDDEN_NAMES:
            faults.append(f"{where}: name it after what it does")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                limit = MAX_KERNEL_LINES if _is_kernel(node) else MAX_FUNCTION_LINES
                if lines > limit:
                    faults.append(f"{where}:{node.lineno}: {node.name} has {lines} lines, at most {limit}")
    return faults


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_ranks_hold() -> None:
    assert import_faults(PACKAGE) == []


def test_files_and_functions_are_short() -> None:
    assert size_faults(PACKAGE) == []


BROKEN = {
    "core/batch.py": "from skipstone.kernels.reference import gemm",
    "core/plan.py": "def f():\n    import skipstone.runtime.engine",
    "core/request.py": "from ..models import base",
    "kernels/gpu/gemm.py": "if TYPE_CHECKING:\n    from skipstone.layers.linear import Linear",
    "layers/linear.py": "from skipstone.attention.backend import Backends",
    "attention/dense.py": "import skipstone.layers.linear",
    "attention/msa.py": "import triton",
    "models/qwen3.py": "from skipstone.attention.dense import DenseBackend",
    "models/base.py": "from skipstone.attention import dense",
    "spec/mtp.py": "from skipstone.models.minimax_m3 import MiniMaxM3",
    "runtime/engine.py": "from skipstone.llm import LLM",
    "runtime/runner.py": "import importlib\nimportlib.import_module('skipstone.server')",
    "text/tokenizer.py": "from skipstone.cli.main import run",
    "server/api/app.py": "from skipstone.models.deepseek_v32 import DeepseekV32",
    "tools/check/command.py": "from skipstone.kernels.reference.gemm import linear",
    "config.py": "from skipstone.registry import MODELS",
    "errors.py": "from . import config",
    "novelty.py": "import os",
    "session.py": "from skipstone import LLM",
}
SOUND = {
    "core/batch.py": "from skipstone.errors import ShapeError",
    "kernels/gemm_sm90.py": "import triton\nfrom skipstone.core.batch import PAD",
    "attention/msa_aiter.py": "import aiter\nfrom .backend import AttentionBackend",
    "models/base.py": "from skipstone.attention.backend import Backends\nfrom skipstone.attention import backend",
    "runtime/engine.py": "from skipstone.spec.mtp import Mtp\nfrom skipstone.attention.dense import DenseBackend",
    "cli/main.py": "def f():\n    from skipstone.llm import LLM",
    "llm.py": "from skipstone.text.tokenizer import Tokenizer",
    "registry.py": "import importlib\nimportlib.import_module('skipstone.models')",
}


def write_tree(root: Path, files: dict[str, str]) -> Path:
    package = root / "skipstone"
    for name, source in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source) + "\n")
    return package


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rank_is_found(tmp_path: Path, name: str) -> None:
    faults = import_faults(write_tree(tmp_path, {name: BROKEN[name]}))
    assert len(faults) == 1 and Path(name).name in faults[0]


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_import_passes(tmp_path: Path, name: str) -> None:
    assert import_faults(write_tree(tmp_path, {name: SOUND[name]})) == []


def test_long_files_and_functions_are_found(tmp_path: Path) -> None:
    body = "\n".join(f"    x = {i}" for i in range(MAX_FUNCTION_LINES))
    kernel = "@triton.jit\ndef k():\n" + body
    package = write_tree(
        tmp_path, {"a.py": "def f():\n" + body, "b.py": "\n" * 401, "core/utils.py": "", "kernels/k.py": kernel}
    )
    assert [fault.split(":")[0] for fault in size_faults(package)] == ["a.py", "b.py", "core/utils.py"]
