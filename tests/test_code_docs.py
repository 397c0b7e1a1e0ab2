"""docs/code.md says what to read first: its files and names exist, its counts hold, and the engine stays small."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from test_imports import imported_modules

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "skipstone"
TEXT = (ROOT / "docs" / "code.md").read_text()
FIRST, BESIDE = (
    [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    for table in re.findall(r"(?:^\|.*\|$\n)+", TEXT, flags=re.M)[:2]
)
LIMIT = 10_000
SLACK = 0.1  # a count may be that far off before the page must be written anew


def files_of(cell: str) -> set[Path]:
    """The files behind `core/`, `llm.py` or `kernels/*.py`. Each must exist."""
    found: set[Path] = set()
    for name in re.findall(r"`([^`]+)`", cell):
        files = set(PACKAGE.glob(name + ("**/*.py" if name.endswith("/") else "")))
        assert files, name
        found |= files
    return found


def count(files: set[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


ENGINE = set().union(*(files_of(row[1]) for row in FIRST))


def test_the_engine_fits_a_head() -> None:
    assert count(ENGINE) <= LIMIT


def test_the_engine_imports_nothing_else() -> None:
    """What registries name is loaded when it is asked for."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in ENGINE}
    for path in sorted(ENGINE):
        for _, name in imported_modules(ast.parse(path.read_text()), "", "skipstone"):
            if name.startswith("skipstone."):
                assert {name, name.rpartition(".")[0]} & modules, f"{path.name} imports {name}"


def test_every_file_has_a_place() -> None:
    beside = set().union(*(files_of(row[0]) for row in BESIDE))
    named = {path for path in PACKAGE.rglob("*.py") if path.name not in ("__init__.py", "__main__.py")}
    assert named <= ENGINE | beside


@pytest.mark.parametrize("row", [*(row[1:3] for row in FIRST), *(row[:2] for row in BESIDE)], ids=lambda row: row[0])
def test_counts(row: list[str]) -> None:
    files = files_of(row[0])
    if row[0] not in [first[1] for first in FIRST]:
        files -= ENGINE
    assert abs(count(files) - int(row[1])) <= SLACK * int(row[1])


def test_names_exist() -> None:
    """Every `Name`, `Name.method` and path in the text is somewhere in the sources."""
    sources = "\n".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))
    body = TEXT[TEXT.index("## A request's way") :]
    for name in re.findall(r"`([^`]+)`", body):
        if "/" in name or name.endswith(".py"):
            places = [PACKAGE / name, PACKAGE / "runtime" / name, ROOT / name]
            assert any(place.exists() for place in places), name
            continue
        owner, _, member = name.partition(".")
        assert re.search(rf"^(class {owner}\b|{owner}(:| =)|    def {owner}\()", sources, flags=re.M), name
        assert not member or re.search(rf"^    def {member}\(", sources, flags=re.M), name
