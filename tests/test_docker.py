"""The Dockerfiles, as far as they can be checked without Docker: commands, variables, extras and files exist."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from skipstone.cli.main import load_command
from skipstone.cli.options import Parser, resolve

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_they_name_exists(file: Path) -> None:
    text = file.read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r'"/src\[(.*?)\]"', text)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    entry, command = (json.loads(re.search(rf"^{word} (\[.*\])$", text, re.M)[1]) for word in ("ENTRYPOINT", "CMD"))  # type: ignore[index]
    assert entry[0] in project["scripts"]
    given = dict(re.findall(r"(SKIPSTONE_\w+)=(\S+)", "\n".join(re.findall(r"^ENV .*$", text, re.M))))
    serve = load_command(command[0])
    settings = resolve(serve, Parser(command[0], serve).parse(command[1:]), given)
    assert settings.values["host"] == "0.0.0.0" and f"EXPOSE {settings.values['port']}\n" in text
    assert f"127.0.0.1:{settings.values['port']}/ready" in text and "\nUSER skipstone\n" in text
    assert f"-f docker/{file.name}" in text


def test_the_build_gets_what_the_wheel_needs() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / name).exists() for name in allowed)
    assert {"skipstone", "checkpoints", "pyproject.toml", "README.md"} <= set(allowed)
