"""How a proposer is named: the short form, vLLM's keys, and every error."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from skipstone.config import make_config, read_spec
from skipstone.errors import ConfigError
from skipstone.spec_config import SpecConfig, methods, parse_spec


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", {"method": "auto"}),
        ("off", {"method": "off"}),
        ("mtp", {"method": "mtp"}),
        ("mtp:3", {"method": "mtp", "k": 3}),
        (" ngram:0 ", {"method": "ngram", "k": 0}),
        ("mtp:64", {"method": "mtp", "k": 64}),
        ("auto:2", {"method": "auto", "k": 2}),
        ("mtp:auto", {"method": "mtp", "k_from_table": True}),
        ("eagle3:folder", {"method": "eagle3", "folder": "folder"}),
        ("eagle3:a/b:5", {"method": "eagle3", "folder": "a/b", "k": 5}),
        ("eagle3:5", {"method": "eagle3", "k": 5}),
        ("dflash:/a:b/c:auto", {"method": "dflash", "folder": "/a:b/c", "k_from_table": True}),
        ("draft:C:/models/small:2", {"method": "draft", "folder": "C:/models/small", "k": 2}),
    ],
)
def test_the_short_form(text: str, expected: dict[str, Any]) -> None:
    assert parse_spec(text) == SpecConfig(**expected)


@pytest.mark.parametrize("method", methods())
def test_every_method_parses_alone(method: str) -> None:
    assert parse_spec(method).method == method


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["spec=''", "'' is not a proposer", "mtp:K"]),
        ("magic:3", ["spec='magic:3'", "'magic' is not a proposer", "ngram:K"]),
        ("mtp:65", ["k=65 must be between 0 and 64"]),
        ("mtp:-1", ["mtp takes a number of drafts only, as in mtp:3"]),
        ("mtp:folder:3", ["mtp takes a number of drafts only"]),
        ("ngram:\N{SUPERSCRIPT TWO}", ["ngram takes a number of drafts only"]),
        ("{", ["cannot be read", "known keys: method"]),
        ("[]", ["is not a proposer"]),
    ],
)
def test_a_bad_short_form(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_spec(text)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"method": "mtp", "num_speculative_tokens": 2}, {"method": "mtp", "k": 2}),
        ({"method": "deepseek_mtp", "num_speculative_tokens": 1}, {"method": "mtp", "k": 1}),
        ({"method": "minimax_m3_mtp"}, {"method": "mtp"}),
        ({"model": "small", "num_speculative_tokens": 4}, {"method": "draft", "folder": "small", "k": 4}),
        ({"method": "draft_model", "model": "small"}, {"method": "draft", "folder": "small"}),
        ({"method": "eagle3", "model": "head"}, {"method": "eagle3", "folder": "head"}),
        ({"method": "dflash", "model": "head"}, {"method": "dflash", "folder": "head"}),
        ({}, {"method": "auto"}),
        ({"method": "ngram", "prompt_lookup_max": 4}, {"method": "ngram", "min_match": 2, "max_match": 4}),
        ({"method": "ngram", "prompt_lookup_max": 1}, {"method": "ngram", "min_match": 1, "max_match": 1}),
        ({"method": "ngram", "prompt_lookup_min": 8}, {"method": "ngram", "min_match": 8, "max_match": 8}),
        ({"method": "mtp", "draft_sample_method": "greedy"}, {"method": "mtp", "draft_sampling": "greedy"}),
        ({"method": "mtp", "draft_sample_method": "probabilistic"}, {"method": "mtp", "draft_sampling": "independent"}),
        ({"method": "mtp", "rejection_sample_method": "standard"}, {"method": "mtp", "verification": "rejection"}),
        ({"method": "mtp", "rejection_sample_method": "block"}, {"method": "mtp", "verification": "block"}),
        (
            {"method": "mtp", "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.9, 0.5]},
            {"method": "mtp", "verification": "exact", "acceptance_rates": [0.9, 0.5]},
        ),
        (
            {"method": "mtp", "num_speculative_tokens": 4, "rejection_sample_method": "synthetic",
             "synthetic_acceptance_length": 3.25},
            {"method": "mtp", "k": 4, "verification": "exact", "acceptance_rates": [1.0, 1.0, 0.25, 0.0]},
        ),
    ],
)  # fmt: skip
def test_keys_of_vllm(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    assert parse_spec(json.dumps(keys)) == SpecConfig(**expected)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"methud": "mtp"}, ["methud", "known keys: method, model, num_speculative_tokens"]),
        ({"method": "mtp", "num_speculative_tokens": "two"}, ["cannot be read", "num_speculative_tokens"]),
        ({"method": "medusa"}, ["method='medusa' is not supported", "eagle3"]),
        ({"method": "mtp", "num_speculative_tokens": -1}, ["k=-1 must be between 0 and 64"]),
        ({"method": "mtp", "draft_sample_method": "best"}, ["cannot be read", "best"]),
        ({"method": "ngram", "prompt_lookup_min": 0}, ["prompt_lookup_min=0 must be at least 1"]),
        ({"method": "ngram", "prompt_lookup_max": 0}, ["prompt_lookup_max=0"]),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}, ["prompt_lookup_min=4", "max=2"]),
        ({"rejection_sample_method": "synthetic"}, ["'synthetic' and acceptance rates need each other"]),
        ({"synthetic_acceptance_rates": [0.5]}, ["'synthetic' and acceptance rates need each other"]),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": []}, ["acceptance rates"]),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 0.6]}, ["never rise"]),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1.2]}, ["between 0 and 1"]),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.2, -0.1]}, ["between 0 and 1"]),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0},
            ["synthetic_acceptance_length=2.0", "num_speculative_tokens + 1"],
        ),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 5.0, "num_speculative_tokens": 3},
            ["synthetic_acceptance_length=5.0 must be between 1"],
        ),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0, "num_speculative_tokens": 3,
             "synthetic_acceptance_rates": [0.5]},
            ["synthetic_acceptance_rates and synthetic_acceptance_length exclude each other"],
        ),
    ],
)  # fmt: skip
def test_bad_keys(keys: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_spec(json.dumps(keys))
    assert all(word in str(caught.value) for word in words), caught.value


SYNTHETIC = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5]}
TWICE: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({"draft_sampling": "greedy"}, {"draft_sample_method": "probabilistic"}, "draft_sample_method"),
    ({"draft_sampling": "coupled"}, {"draft_sample_method": "greedy"}, "draft_sample_method"),
    ({"verification": "exact"}, {"rejection_sample_method": "block"}, "rejection_sample_method"),
    ({"verification": "block"}, {"rejection_sample_method": "block"}, "rejection_sample_method"),
    ({"verification": "rejection"}, SYNTHETIC, "rejection_sample_method"),
    ({"simulate_acceptance": "0.9"}, SYNTHETIC, "synthetic_acceptance_rates"),
]


@pytest.mark.parametrize(("options", "keys", "key"), TWICE)
def test_what_is_set_twice_is_refused(options: dict[str, str], keys: dict[str, Any], key: str) -> None:
    spec = json.dumps({"method": "mtp", "num_speculative_tokens": 3} | keys)
    ((name, value),) = options.items()
    with pytest.raises(ConfigError, match=re.escape(f"{name}={value} and {key}")):
        make_config(model="demo", spec=spec, **options)
    assert read_spec(make_config(model="demo", spec=spec)).method == "mtp"
    config = make_config(model="demo", spec="mtp:3", **options)
    assert getattr(config, name) == value and read_spec(config).k == 3


def test_none_leaves_the_choice_to_the_other() -> None:
    spec = json.dumps({"method": "mtp", "draft_sample_method": "greedy"})
    config = make_config(model="demo", spec=spec, draft_sampling="none", verification=None)
    assert config.draft_sampling is None and read_spec(config).draft_sampling == "greedy"
    with pytest.raises(ConfigError, match="draft_sampling='auto' must be one of coupled, greedy, independent or none"):
        make_config(model="demo", draft_sampling="auto")


def test_a_spec_that_cannot_be_read_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="'magic' is not a proposer"):
        make_config(model="demo", spec="magic")
