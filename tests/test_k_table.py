"""Tables of k by batch size: read, refused with a reason, and followed by the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from oracles.tiny import Tiny, write_folder
from oracles.tiny_heads import with_mtp

from skipstone import LLM, SamplingParams
from skipstone.errors import ConfigError
from skipstone.runtime.k_table import KTable, read_k_table, with_table
from skipstone.spec_config import SpecConfig

RANGES = [[1, 1, 3], [2, 4, 1], [5, 8, 0]]


@pytest.fixture(scope="module")
def model(tiny: Callable[[str], Tiny], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(with_mtp(tiny("m3"), 1), tmp_path_factory.mktemp("table") / "m3")


def written(folder: Path, ranges: Any = RANGES, spec: str = "mtp", **more: Any) -> str:
    file = folder / "table.json"
    file.write_text(json.dumps({"spec": spec, "num_speculative_tokens_per_batch_size": ranges, **more}))
    return str(file)


@pytest.mark.parametrize(
    ("ranges", "more", "words"),
    [
        ([], {}, ["has no range", "[[1, 64, 3]]"]),
        ([[2, 4, 1]], {}, ["[2, 4, 1] must start at 1"]),
        ([[1, 4, 1], [6, 8, 1]], {}, ["[6, 8, 1] must start at 5"]),
        ([[1, 4, 1], [4, 8, 1]], {}, ["[4, 8, 1] must start at 5"]),
        ([[1, 0, 1]], {}, ["[1, 0, 1] must start at 1 and not end before"]),
        ([[1, 4, 99]], {}, ["k=99 in [1, 4, 99] must be between 0 and 64"]),
        ([[1, 4]], {}, ["is not a table of drafts", "skipstone tune"]),
        (RANGES, {"speck": 1}, ["is not a table of drafts", "speck"]),
        (RANGES, {"spec": "mtp:3"}, ["spec='mtp:3' must name a proposer without a number of drafts"]),
        (RANGES, {"spec": "off"}, ["spec='off' must name a proposer"]),
        (RANGES, {"spec": "magic"}, ["'magic' is not a proposer"]),
    ],
)
def test_a_bad_table(tmp_path: Path, ranges: Any, more: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_k_table(written(tmp_path, ranges, **more))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_table_that_is_not_there_or_not_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json cannot be read"):
        read_k_table(str(tmp_path / "absent.json"))
    (tmp_path / "bad.json").write_bytes(b"\xff{")
    with pytest.raises(ConfigError, match="is not a table of drafts"):
        read_k_table(str(tmp_path / "bad.json"))


def test_k_by_batch_size(tmp_path: Path) -> None:
    table: KTable = read_k_table(written(tmp_path))
    assert [table.most_drafts(n) for n in (1, 2, 4, 5, 8, 100)] == [3, 1, 1, 0, 0, 0]


def verified(llm: LLM, requests: int, **params: Any) -> list[int]:
    """Drafts verified per position when so many requests run side by side."""
    llm.generate(
        [[5, 6, number] for number in range(requests)],
        SamplingParams(temperature=5.0, seed=1, max_tokens=12, ignore_eos=True, **params),
        progress=False,
    )
    return llm.engine.scheduler.stats.speculation.drafted_per_position


@pytest.mark.parametrize("spec", ["mtp", "mtp:auto"])
def test_the_engine_follows_it(model: Path, tmp_path: Path, spec: str) -> None:
    options = {"model": str(model), "spec": spec, "k_table": written(tmp_path)}
    with LLM(**options) as llm:
        assert llm.engine.speculation.k == 3
        assert "mtp, k up to 3 by batch size" in dict(llm.card)["speculation"]
        assert len(verified(llm, 1)) == 3
    with LLM(**options) as llm:
        assert len(verified(llm, 4)) <= 3  # the last of them runs alone
        assert llm.engine.scheduler.stats.speculation.drafted_per_position[0] > 10
    with LLM(**options) as llm:
        plan = llm.engine.scheduler.most_drafts
        assert plan is not None and plan(6) == 0


def test_a_request_asks_for_fewer_and_the_spec_for_a_limit(model: Path, tmp_path: Path) -> None:
    table = written(tmp_path)
    with LLM(str(model), k_table=table) as llm:
        assert len(verified(llm, 1, num_speculative_tokens=2)) == 2
    with LLM(str(model), k_table=table, spec="mtp:1") as llm:
        assert len(verified(llm, 1)) == 1


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("off", ["spec='off' and k_table exclude each other"]),
        ("ngram:3", ["spec='ngram:3'", "made for 'mtp'"]),
    ],
)
def test_a_table_for_something_else(model: Path, tmp_path: Path, spec: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(model), spec=spec, k_table=written(tmp_path))
    assert all(word in str(caught.value) for word in words)


def test_auto_without_a_table(model: Path) -> None:
    with pytest.raises(ConfigError, match="takes k from a table; pass --k-table FILE"):
        LLM(str(model), spec="mtp:auto")


def test_a_table_of_zeros_is_no_speculation(model: Path, tmp_path: Path) -> None:
    with LLM(str(model), k_table=written(tmp_path, [[1, 9, 0]])) as llm:
        assert llm.engine.speculation.proposer is None


@pytest.mark.parametrize("spec", ["mtp:2", "ngram:2"])
def test_requests_without_drafts_cost_nothing(model: Path, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    with LLM(str(model), spec=spec) as llm:
        proposer = llm.engine.speculation.proposer
        monkeypatch.setattr(type(proposer), "propose", lambda *_: pytest.fail("the proposer ran"))
        verified(llm, 3, num_speculative_tokens=0)
        assert llm.engine.stats.rows == 3 * 3 + 3 * 11  # prompts, then a row for each further token


def test_a_table_keeps_what_its_proposer_was_made_with() -> None:
    """Of an `auto` spec only what was asked for replaces it."""
    made = '{"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 4}'
    table = KTable(spec=made, num_speculative_tokens_per_batch_size=[(1, 1, 4), (2, 8, 2)])
    spec = with_table(SpecConfig(method="auto", acceptance_rates=[0.5]), table, "auto")
    assert (spec.method, spec.min_match, spec.max_match) == ("ngram", 3, 4)
    assert (spec.k, spec.acceptance_rates) == (4, [0.5])
