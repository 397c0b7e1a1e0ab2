"""Cache groups: each has one backend, a layer one group of each kind, and drafts need groups that can follow them.

Whatever is wrong is found wherever it stands in the list, and an engine that cannot work is not built.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from oracles.speculation import WAYS, Folders, load, tokens
from oracles.tiny import TINY, write_folder

from skipstone import SamplingParams
from skipstone.attention.backend import AttentionGroups, SparseSettings, check_groups
from skipstone.core.kv_cache import CacheMemory, CacheSpec, CacheTensorSpec, KVCache
from skipstone.errors import ConfigError, UnsupportedError
from skipstone.registry import ATTENTION

KV = (CacheTensorSpec("k", 2, 16), CacheTensorSpec("v", 2, 16))
INDEX = (CacheTensorSpec("index_k", 1, 16),)
MEMORY = CacheMemory(4, 8, torch.float32, torch.device("cpu"))
SPARSE = SparseSettings(unit=8, budget=3, groups=2)
# The backends that each proposer's own layers read their caches with.
DRAFT_BACKENDS = {
    ("m3", "mtp"): ("msa", "msa_index"),
    ("m3", "mtp3"): ("msa", "msa_index"),
    ("dsa", "mtp"): ("dsa", "dsa_index"),
    ("m3", "eagle3"): ("dense",),
    ("m3", "dflash"): ("dense",),
    ("m3", "draft"): ("dense", "msa", "msa_index"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("groups"))


def groups_of(specs: list[CacheSpec]) -> AttentionGroups:
    """The groups over caches of their own."""
    return AttentionGroups(specs, KVCache(specs, MEMORY), 0.25, SPARSE, exact=False)


@pytest.mark.parametrize("offending", [0, 1, 2])
def test_a_layer_that_cannot_serve_is_found_wherever_its_group_is_named(offending: int) -> None:
    """The other layers of the group have a backend that can."""
    specs = [CacheSpec(layer, "draft K/V", "msa" if layer == offending else "dense", KV) for layer in range(3)]
    for order in itertools.permutations(specs):
        with pytest.raises(UnsupportedError, match="missing in group 'draft K/V' with backend 'msa'; backends that"):
            check_groups(order, "in_block", "dflash")
        check_groups(order, "advance", "dflash")


@pytest.mark.parametrize("other", ["msa", "msa_index"])
def test_a_group_with_two_backends_is_refused(other: str) -> None:
    """The last layer does not decide for the others."""
    own = [CacheTensorSpec("index_k", 1, 16)] if other == "msa_index" else KV
    specs = [CacheSpec(0, "all", "dense", KV), CacheSpec(1, "all", other, tuple(own)), CacheSpec(2, "all", "dense", KV)]
    for order in itertools.permutations(specs):
        with pytest.raises(UnsupportedError, match="cache group 'all' is given two backends") as caught:
            groups_of(list(order))
        assert f"'{other}'" in str(caught.value)
        assert "'dense'" in str(caught.value)
    groups_of([specs[0], specs[2]])


def test_a_layer_with_two_groups_of_a_kind_is_refused() -> None:
    """Only the last would be read."""
    dense, sparse = CacheSpec(0, "dense K/V", "dense", KV), CacheSpec(0, "sparse K/V", "msa", INDEX)
    keys, more = CacheSpec(0, "index keys", "msa_index", INDEX), CacheSpec(0, "more keys", "msa_index", KV)
    for first, second in [(dense, sparse), (sparse, dense), (keys, more), (more, keys)]:
        with pytest.raises(UnsupportedError, match=f"layer 0 .*'{first.group}' and '{second.group}'"):
            groups_of([first, second])
    groups_of([dense, keys])


def test_a_tensor_that_two_groups_name_is_refused() -> None:
    """The caches of one would be those of the other."""
    for specs in itertools.permutations([CacheSpec(3, "a", "dense", KV), CacheSpec(3, "b", "msa_index", KV[:1])]):
        with pytest.raises(UnsupportedError, match="layer 3 caches 'k' in two groups"):
            KVCache(list(specs), MEMORY)


@pytest.mark.parametrize(
    ("name", "proposer", "backend"), [(*pair, backend) for pair, all_ in DRAFT_BACKENDS.items() for backend in all_]
)
def test_no_engine_is_built_whose_drafts_a_group_cannot_serve(
    name: str, proposer: str, backend: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever group it is, and whatever drafts."""
    way = WAYS[proposer]
    monkeypatch.setattr(ATTENTION.load(backend), "features", frozenset())
    with pytest.raises(UnsupportedError, match=f"with backend '{backend}'"):
        load(folders.target(name, way.modules), folders.spec(way, name, 2))


def test_blocks_hold_whole_sparse_blocks_of_both_models(tmp_path: Path) -> None:
    """Sparse blocks of 8 and of 12 tokens: neither is a multiple of the other."""
    other = TINY["m3_flat"]()
    other.text["sparse_attention_config"]["sparse_block_size"] = 12
    target, draft = write_folder(TINY["m3"](), tmp_path / "m3"), write_folder(other, tmp_path / "draft")
    llm = load(target, f"draft:{draft}:2", block_size=None)
    assert llm.engine.caches.block_size == 48
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    texts = [
        one.generate([tokens(70, 1)], params, progress=False)[0].outputs[0].token_ids for one in (llm, load(target))
    ]
    assert texts[0] == texts[1]
    with pytest.raises(ConfigError, match=r"block_size=16 must be a multiple of 24, .*block 8 and .*'s 12"):
        load(target, f"draft:{draft}:2", block_size=16)


def test_what_stands_in_for_a_backend_can_do_as_much() -> None:
    """Groups are checked by the name that the model gives."""
    for other in ("msa_paged", "msa_aiter"):
        assert ATTENTION.load(other).features >= ATTENTION.load("msa").features
