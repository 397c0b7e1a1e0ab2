"""Keys of config.json: each is obeyed as the other library obeys it, refused by name, or listed with its reason.

A tiny checkpoint of each model is run under hundreds of changes of single keys by both. The error is that of
`test_models`.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.reference import Reference, relative_error
from oracles.tiny import VOCAB, Tiny
from torch import Tensor
from transformers import AutoConfig
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

from skipstone import LLM, SamplingParams
from skipstone.errors import CheckpointError, ConfigError, SkipstoneError
from skipstone.llm import GenerationConfig
from skipstone.models.config_reader import ConfigReader
from skipstone.models.draft_layers import read_draft_layer
from skipstone.models.loader import read_model_info
from skipstone.registry import MODELS

TOLERANCE = 5e-6
PROMPT = torch.randint(0, VOCAB - 3, (60,), generator=torch.Generator().manual_seed(11)).tolist()
ABSENT = object()
Raw = dict[str, Any]
Path_ = tuple[str, ...]

# Keys that change nothing here or there, and why. Any other key that is accepted must change the numbers.
HARMLESS = {
    **dict.fromkeys(("transformers_version", "dtype", "torch_dtype"), "what the files are, which headers say"),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), "where texts begin and end"),
    **dict.fromkeys(("attention_dropout", "initializer_range"), "training"),
    **dict.fromkeys(("router_aux_loss_coef", "router_jitter_noise"), "training"),
    **dict.fromkeys(("use_cache", "output_router_logits"), "what a call of the other library returns"),
    **dict.fromkeys(("image_token_index", "video_token_index"), "pictures"),
    **dict.fromkeys(("projector_hidden_size", "merged_hidden_size"), "pictures"),
    **dict.fromkeys(("num_mtp_modules", "num_nextn_predict_layers"), "how many draft modules the files may hold"),
    "max_position_embeddings": "a limit of the context, which only YaRN without an original length computes with",
    "sparse_disable_index_value": "which layers have no index values; none may have them",
    "index_skip_topk_offset": "where skipping begins, which index_topk_freq=1 never does",
}
# The ramp begins below the first frequency of so small a model; `ROTARY` moves it.
BELOW_ITS_RANGE = {"beta_fast"}
# Of DeepSeek-V3.2 alone: the other library sets it to qk_rope_head_dim, whatever a file says.
DERIVED = {"head_dim"}
NOT_CHANGED = ("architectures", "model_type", "vision_config", "text_config")  # other models, not other keys

# Keys of relatives and of other engines, which no file of these models has: what they say here, and what is refused.
FOREIGN: dict[str, dict[str, tuple[Any, Any]]] = {
    "m3": {
        "swiglu_beta": (1.0, 1.5), "use_index_cache": (False, True), "index_topk_freq": (1, 4), "num_experts": (8, 6),
        "index_topk_pattern": (None, "FSFS"), "mlp_bias": (None, True), "attention_bias": (None, True),
        "index_init_blocks": (None, 1), "sparse_stride": (None, 2), "n_shared_experts": (1, 2),
        "use_qk_norm": (True, False), "use_routing_bias": (True, False), "attention_output_gate": (False, True),
        "sliding_window": (None, 64), "final_logit_softcapping": (None, 30.0),
    },
    "dsa": {
        "index_topk_freq": (1, 4), "index_topk_pattern": (None, "FSFS"), "index_k_norm_type": ("layer", "rms"),
        "index_share_for_mtp_iteration": (False, True), "indexer_rope_interleave": (False, True),
        "rope_interleave": (True, False), "indexer_types": (["full"] * 4, ["full", "shared", "full", "full"]),
        "num_experts": (16, 8), "num_local_experts": (16, 8), "index_init_tokens": (None, 16),
        "mlp_bias": (False, True),
        "partial_rotary_factor": (1.0, 0.5), "swiglu_limit": (None, 7.0), "scoring_func": ("sigmoid", "softmax"),
        "topk_method": ("noaux_tc", "greedy"), "moe_layer_freq": (1, 2), "qk_head_dim": (32, 48),
        "num_key_value_heads": (6, 1), "index_skip_topk_offset": (2, None),
    },
}  # fmt: skip


def saved(raw: Raw, folder: Path) -> Raw:
    """The configuration as transformers 5 saves what it has read."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "config.json").write_text(json.dumps(raw))
    reader = AutoConfig if "model_type" in raw else MiniMaxM3VLTextConfig
    reader.from_pretrained(folder / "in").save_pretrained(folder / "out")
    found: Raw = json.loads((folder / "out" / "config.json").read_text())
    return found


class Oracle:
    """Both engines on the weights of one tiny checkpoint under any configuration."""

    def __init__(self, tiny: Tiny, weights: Path, root: Path) -> None:
        self.tiny, self.weights, self.root, self.count = tiny, weights, root, 0
        self.config: Any = None
        self.base = self.ours(tiny.config)
        self.config = read_model_info(weights).config

    def folder(self, raw: Raw) -> Path:
        """The weights beside another config.json."""
        self.count += 1
        folder = self.root / str(self.count)
        folder.mkdir(parents=True)
        for file in self.weights.glob("model*"):
            (folder / file.name).symlink_to(file)
        (folder / "config.json").write_text(json.dumps(raw))
        return folder

    def ours(self, raw: Raw) -> Tensor:
        """Log-probabilities [n, V] of the prompt's rows but the last."""
        folder = self.folder(raw)
        config = read_model_info(folder).config
        if config == self.config:
            return self.base  # the same model: nobody reads the file but the reader of its keys
        llm = LLM(str(folder), dtype="float32", num_blocks=20, max_num_batched_tokens=64, max_num_seqs=1)
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, ignore_eos=True)
        (out,) = llm.generate([PROMPT], params, progress=False)
        rows = torch.empty(len(PROMPT) - 1, VOCAB)
        for row, entry in zip(rows, out.prompt_logprobs[1:], strict=True):
            row[torch.tensor(entry.top_ids)] = torch.tensor(entry.top_logprobs)
        return rows

    def theirs(self, raw: Raw) -> Tensor:
        """The same of the other library."""
        config = copy.deepcopy(self.tiny.config)
        if self.tiny.name == "m3":  # a key that the library does not know: the oracle adds it
            given = raw.get("text_config", raw).get("sparse_attention_config", {})
            config["text_config"]["sparse_attention_config"]["sparse_init_block"] = given.get("sparse_init_block", 0)
        return Reference(replace(self.tiny, config=config), self.folder(raw)).logprobs(PROMPT)[:-1]

    def differs(self, raw: Raw, rows: Tensor) -> str:
        """How our rows of a configuration differ from theirs, or nothing."""
        try:
            error = relative_error(rows, self.theirs(raw)).max().item()
        except Exception as problem:  # whatever the library makes of a key
            return f"accepted, and refused there: {problem!r:.200}"
        return "" if error < TOLERANCE else f"off by {error:.1e}"


@pytest.fixture(scope="module")
def oracle(
    tiny: Callable[[str], Tiny], folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Oracle]:
    """The oracle of that model."""
    return cache(lambda name: Oracle(tiny(name), folder(name), tmp_path_factory.mktemp(name)))


def leaves(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Every key, with the objects that hold it; objects themselves as well."""
    for key, inner in value.items():
        yield (*path, key), inner
        if isinstance(inner, dict) and key != "vision_config":
            yield from leaves(inner, (*path, key))


def changed(raw: Raw, path: Path_, value: Any) -> Raw:
    """A copy with one key set, or taken out."""
    out = copy.deepcopy(raw)
    place = out
    for key in path[:-1]:
        place = place[key]
    place.pop(path[-1], None)
    if value is not ABSENT:
        place[path[-1]] = value
    return out


def others(value: Any) -> list[Any]:
    """Other values of a key."""
    swaps = {0: 1, 1: 0, "dense": "sparse", "sparse": "dense", "full_attention": "minimax_m3_sparse"}
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value // 2, 0]
    if isinstance(value, float):
        return [1.25 * value, 0.0]
    if isinstance(value, list):
        return [[swaps.get(value[0], "other"), *value[1:]], value[1:]]
    return [{}] if isinstance(value, dict) else ["other", 2]


@pytest.mark.parametrize("generation", ["released", pytest.param("saved", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["m3", "dsa"])
def test_every_key_is_obeyed_or_refused(
    name: str, generation: str, oracle: Callable[[str], Oracle], tmp_path: Path
) -> None:
    """A change of one key gives the other library's numbers, or an error that names the key.

    A key without a value may be refused by one side alone: there are no numbers to differ.
    """
    both = oracle(name)
    raw = both.tiny.config if generation == "released" else saved(both.tiny.config, tmp_path / "saved")
    assert both.differs(raw, both.ours(raw)) == ""
    wrong, effects = [], {}
    for path, value in leaves(raw):
        key = path[-1]
        known = key in HARMLESS or (name == "dsa" and key in DERIVED)
        names = (key, *value) if isinstance(value, dict) else (key,)
        for other in [] if key in NOT_CHANGED else [*others(value), None, ABSENT]:
            given = other is not None and other is not ABSENT
            what = f"{'.'.join(path)}={'absent' if other is ABSENT else other!r:.60}"
            try:
                rows = both.ours(changed(raw, path, other))
            except SkipstoneError as error:
                unfit = isinstance(error, CheckpointError) and "tensors" in str(error)
                named = unfit or any(name in str(error) for name in names)
                wrong += [] if named else [f"{what} is refused without its name: {error}"]
                continue
            same = torch.equal(rows, both.base)
            if known:
                wrong += [] if same else [f"{what} changes the numbers"]
                continue
            problem = both.differs(changed(raw, path, other), rows)
            wrong += [f"{what} {problem}"] if problem and (given or "off by" in problem) else []
            if given:
                effects[key] = effects.get(key, False) or not same
    assert wrong == []
    assert {key for key, changes in effects.items() if not changes} <= BELOW_ITS_RANGE
    assert len(effects) >= 9


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in FOREIGN.items() for key in keys])
def test_keys_of_relatives_are_refused_unless_they_say_nothing(
    name: str, key: str, oracle: Callable[[str], Oracle]
) -> None:
    both = oracle(name)
    place = ("text_config", key) if name == "m3" else (key,)
    said, refused = FOREIGN[name][key]
    assert both.ours(changed(both.tiny.config, place, said)) is both.base
    if key not in HARMLESS:
        with pytest.raises(ConfigError, match=rf"{key}\b.*{re.escape(repr(refused))}"):
            both.ours(changed(both.tiny.config, place, refused))


def test_keys_of_other_programs_are_left_alone(oracle: Callable[[str], Oracle]) -> None:
    both = oracle("dsa")
    keys = {"auto_map": {"AutoConfig": "x.Y"}, "_name_or_path": "/x", "id2label": {"0": "a"}, "ep_size": 1}
    assert both.ours(both.tiny.config | keys) is both.base


YARN = {"rope_type": "yarn", "factor": 10.0, "original_max_position_embeddings": 64}
ROTARY: dict[str, Raw] = {
    "plain": {"rope_type": "default"},
    "no mscale": YARN,
    "far": YARN | {"factor": 40.0, "original_max_position_embeddings": 4096},
    "mscale alone": YARN | {"mscale": 0.7},
    "all dims alone": YARN | {"mscale_all_dim": 0.7},
    "both": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "no dims": YARN | {"mscale": 1.0, "mscale_all_dim": 0},
    "nothing": YARN | {"mscale": 0, "mscale_all_dim": 0},
    "nulls": YARN | {"mscale": None, "mscale_all_dim": None, "attention_factor": None, "beta_fast": None},
    "factor named": YARN | {"attention_factor": 1.5, "mscale": 1.0, "mscale_all_dim": 1.0},
    "not truncated": YARN | {"truncate": False},
    "truncated": YARN | {"truncate": True},
    "ramp": YARN | {"beta_fast": 8, "beta_slow": 0.5, "truncate": False},
    "ends that cross": YARN | {"original_max_position_embeddings": 2, "truncate": False},
    "shrunk": YARN | {"factor": 0.5},
    "no original": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "other base": YARN | {"rope_theta": 500.0},
}


def with_rotary(raw: Raw, keys: Raw, old: bool) -> Raw:
    """The configuration with other rotary keys, of the older or of the newer generation."""
    text = dict(raw.get("text_config", raw))
    partial, theta = text.pop("partial_rotary_factor", None), keys.get("rope_theta", 20000.0)
    for key in ("rope_scaling", "rope_parameters", "rope_theta"):
        text.pop(key, None)
    keys = {key: value for key, value in keys.items() if key != "rope_theta"}
    if old:
        text |= {"rope_theta": theta, "rope_scaling": {"type": keys.pop("rope_type"), **keys}}
        text |= {} if partial is None else {"partial_rotary_factor": partial}
    else:
        text["rope_parameters"] = {"rope_theta": theta, **keys}
        text["rope_parameters"] |= {} if partial is None else {"partial_rotary_factor": partial}
    return raw | {"text_config": text} if "text_config" in raw else text


@pytest.mark.parametrize("case", ROTARY)
@pytest.mark.parametrize("name", ["m3", "dsa"])
def test_rotary_keys_of_both_generations(name: str, case: str, oracle: Callable[[str], Oracle]) -> None:
    both = oracle(name)
    new, old = (with_rotary(both.tiny.config, ROTARY[case], old) for old in (False, True))
    rows = both.ours(new)
    assert not torch.equal(rows, both.base)
    assert both.differs(new, rows) == ""
    assert torch.equal(both.ours(old), rows)


def test_an_extended_head_is_read_by_the_same_keys(tmp_path: Path) -> None:
    layer = {
        "hidden_size": 64, "intermediate_size": 8, "num_attention_heads": 4, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 640, "num_hidden_layers": 1, "rope_parameters": YARN | {"rope_theta": 7.0},
    }  # fmt: skip
    rotary = read_draft_layer(ConfigReader(layer, "head")).rotary
    assert rotary.theta == 7.0
    assert rotary.yarn is not None
    assert rotary.yarn.amplitude == pytest.approx(1 + 0.1 * math.log(10))
    with pytest.raises(ConfigError, match=r"head.rope_parameters: partial_rotary_factor=0.5 is not supported"):
        read_draft_layer(ConfigReader(layer | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "head"))
    for key, value in (
        ("rotary_dim", 8),
        ("layer_types", ["sliding_attention"]),
        ("qk_norm", True),
        ("swiglu_limit", 7),
    ):
        with pytest.raises(ConfigError, match=rf"head: {key}={re.escape(repr(value))}"):
            read_draft_layer(ConfigReader(layer | {key: value}, "head"))


SCALING = {"type": "yarn", **{key: value for key, value in YARN.items() if key != "rope_type"}}
# Keys of a flat configuration, and what the error must name.
CONFLICTS: dict[str, tuple[Raw, str]] = {
    "types": ({"rope_scaling": SCALING | {"rope_type": "default"}}, "rope_scaling: rope_type=.*rope_scaling: type="),
    "factors": (
        {"rope_scaling": SCALING, "rope_parameters": YARN | {"factor": 4.0}},
        r"rope_parameters: factor=4.0 .*rope_scaling: factor=10.0",
    ),
    "one side only": (
        {"rope_scaling": SCALING, "rope_parameters": YARN | {"truncate": False}},
        r"rope_parameters: truncate=False .*rope_scaling: truncate=None",
    ),
    "other side only": (
        {"rope_scaling": SCALING | {"mscale": 1.0}, "rope_parameters": YARN},
        r"rope_scaling: mscale=1.0 .*rope_parameters: mscale=None",
    ),
    "kinds": (
        {"rope_scaling": SCALING, "rope_parameters": {"rope_type": "default"}},
        r"rope_type='default' .*rope_scaling: type='yarn'",
    ),
    "theta above": (
        {"rope_theta": 10000.0, "rope_parameters": YARN | {"rope_theta": 5e6}},
        r"config.json.rope_parameters: rope_theta=5000000.0 .*config.json: rope_theta=10000.0",
    ),
    "theta in the older place": (
        {"rope_theta": 10000.0, "rope_scaling": SCALING | {"rope_theta": 5e6}},
        r"config.json.rope_scaling: rope_theta=5000000.0 .*config.json: rope_theta=10000.0",
    ),
    "original length": (
        {"original_max_position_embeddings": 128, "rope_scaling": SCALING},
        r"rope_scaling: original_max.*=64 .*config.json: original_max.*=128",
    ),
    "unknown key": ({"rope_scaling": SCALING | {"short_factor": [1.0]}}, r"rope_scaling: short_factor=\[1.0\] is not"),
    "yarn without a type": ({"rope_parameters": {"factor": 4.0}}, "factor=4.0 is not supported with rope_type='defa"),
    "other kind": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: type='linear' is not supported"),
    "no factor": ({"rope_scaling": {"type": "yarn"}}, r"rope_scaling: key 'factor' is missing"),
    "truth value": ({"rope_scaling": SCALING | {"truncate": None}}, "truncate=None is not supported"),
    "no object": ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
    "no base": ({"rope_theta": 0}, "rope_theta=0 must be a positive number"),
    "base of one": ({"rope_theta": 1, "rope_scaling": SCALING}, "config.json: rope_theta=1.0 must be above 1"),
}


@pytest.mark.parametrize("case", CONFLICTS)
@pytest.mark.parametrize("name", ["m3_flat", "dsa"])
def test_conflicts_of_rotary_keys_name_both_places(name: str, case: str, tiny: Callable[[str], Tiny]) -> None:
    keys, words = CONFLICTS[case]
    raw = {key: value for key, value in tiny(name).config.items() if not key.startswith("rope_")}
    with pytest.raises(ConfigError, match=words):
        MODELS.load(raw["architectures"][0]).read_config(raw | keys)


def test_a_null_beside_the_older_keys_says_nothing(oracle: Callable[[str], Oracle]) -> None:
    for name in ("m3", "dsa"):
        both = oracle(name)
        place = ("text_config", "rope_parameters") if name == "m3" else ("rope_parameters",)
        assert both.ours(changed(both.tiny.config, place, None)) is both.base
    twice = oracle("dsa").tiny.config
    twice = twice | {"rope_parameters": twice["rope_scaling"] | {"rope_type": "yarn", "rope_theta": 10000.0}}
    assert oracle("dsa").ours(twice) is oracle("dsa").base


TWICE: dict[str, tuple[str, Path_, Any, str]] = {
    "rotary dims": ("m3", ("text_config", "rotary_dim"), 4, "rotary_dim=4 .*head_dim x partial_rotary_factor=8"),
    "rotary part": ("m3", ("text_config", "partial_rotary_factor"), 0.25, "rotary_dim=8 .*partial_rotary_factor=4"),
    "no part": ("m3", ("text_config", "partial_rotary_factor"), ABSENT, "'partial_rotary_factor' is missing"),
    "layers": ("m3", ("text_config", "layer_types"), ["full_attention"] * 4, "layer_types=.*sparse_attention_freq="),
    "experts": ("m3", ("text_config", "mlp_layer_types"), ["dense"] * 4, "mlp_layer_types=.*moe_layer_freq="),
    "budget": ("m3", ("text_config", "index_topk_blocks"), 4, "index_topk_blocks=4 .*sparse_topk_blocks=3"),
    "block": ("m3", ("text_config", "index_block_size"), 4, "index_block_size=4 .*sparse_block_size=8"),
    "outside": ("m3", ("rope_theta",), 5e6, "config.json: rope_theta=5000000.0 .*text_config: rope_theta=10000.0"),
    "only outside": ("m3", ("rope_scaling",), SCALING, "config.json: rope_scaling=.*text_config: rope_scaling=None"),
    "mechanism outside": ("m3", ("index_topk_freq",), 4, "config.json: index_topk_freq=4 .*text_config"),
    "relative's outside": (
        "m3",
        ("index_topk_pattern",),
        "FS",
        "config.json: index_topk_pattern='FS' is not supported",
    ),
    "tied outside": ("m3", ("tie_word_embeddings",), True, "config.json: tie_word_embeddings=True .*text_config"),
    "dense layers": ("dsa", ("mlp_layer_types",), ["dense"] * 4, "mlp_layer_types=.*first_k_dense_replace="),
}


@pytest.mark.parametrize("case", TWICE)
def test_other_keys_said_twice_must_agree(case: str, oracle: Callable[[str], Oracle]) -> None:
    name, path, value, words = TWICE[case]
    both = oracle(name)
    with pytest.raises(ConfigError, match=words):
        both.ours(changed(both.tiny.config, path, value))


@pytest.mark.parametrize("name", ["m3", "m3_flat", "m3_mixed", "dsa"])
def test_what_transformers_saves_is_the_same_model(
    name: str, tiny: Callable[[str], Tiny], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """config.json read and saved by transformers 5 holds the same model, and both say the same of its texts' end."""
    found = MODELS.load(tiny(name).config["architectures"][0]).read_config(saved(tiny(name).config, tmp_path / "saved"))
    assert found == read_model_info(folder(name)).config


@pytest.mark.parametrize("name", ["m3", "dsa"])
def test_a_checkpoint_that_transformers_saved_whole(
    name: str, oracle: Callable[[str], Oracle], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Weights and configuration through the other library and back: the same bits."""
    both = oracle(name)
    Reference(both.tiny, folder(name)).model.save_pretrained(tmp_path / "whole")
    llm = LLM(str(tmp_path / "whole"), dtype="float32", num_blocks=20)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (one,) = llm.generate([PROMPT], params, progress=False)
    (other,) = LLM(str(folder(name)), dtype="float32", num_blocks=20).generate([PROMPT], params, progress=False)
    assert one.outputs[0].token_ids == other.outputs[0].token_ids


def test_the_norms_inside_latent_attention_keep_their_own_eps(oracle: Callable[[str], Oracle]) -> None:
    """`rms_norm_eps` is of the others alone, as there; the key's change shows, so that a mix-up would."""
    both = oracle("dsa")
    for eps in (1e-2, 1e-3):
        raw = both.tiny.config | {"rms_norm_eps": eps}
        rows = both.ours(raw)
        assert relative_error(rows, both.base.double()).max() > 100 * TOLERANCE
        assert both.differs(raw, rows) == ""


ENDS: dict[str, tuple[Any, Any, Any, list[int]]] = {
    "generation_config.json first": ({"eos_token_id": 3}, 4, 5, [3]),
    "several": ({"eos_token_id": [3, 4]}, 4, 5, [3, 4]),
    "config.json next": ({}, 4, 5, [4]),
    "the language model's own": (None, None, 5, [5]),
    "none": ({"eos_token_id": None}, 4, 5, []),
}


@pytest.mark.parametrize("case", ENDS)
def test_where_the_end_of_a_text_is_named(case: str, oracle: Callable[[str], Oracle]) -> None:
    """generation_config.json, then config.json, then its text_config."""
    file, outer, inner, expected = ENDS[case]
    both = oracle("m3")
    raw = changed(both.tiny.config, ("eos_token_id",), ABSENT if outer is None else outer)
    folder = both.folder(changed(raw, ("text_config", "eos_token_id"), inner))
    if file is not None:
        (folder / "generation_config.json").write_text(json.dumps(file))
    info = read_model_info(folder)
    assert sorted(GenerationConfig(folder).eos_token_ids(info)) == expected


def test_layers_behind_the_draft_modules_are_unexpected(oracle: Callable[[str], Oracle]) -> None:
    """Too small a `num_hidden_layers` would drop trained layers as if they were draft modules."""
    with pytest.raises(CheckpointError, match=r"unexpected: model.layers.3"):
        oracle("dsa").ours(oracle("dsa").tiny.config | {"num_hidden_layers": 2})
