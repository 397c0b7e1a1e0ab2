"""EAGLE-3 and DFlash heads against the papers' equations, written out here over the whole sequence without caches.

The target's states come from the other library. What is compared are the logits that each draft was chosen from, at
every step of real runs: chunked prompts, several requests, accepted and rejected drafts. Then draft models, and what
the loader says of damaged folders.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from oracles.reference import Reference
from oracles.tiny import VOCAB, Tiny, write_folder
from oracles.tiny_heads import AUX_LAYERS, BLOCK, HEADS, MASK_TOKEN, Head, with_mtp, write_head
from safetensors.torch import load_file, save_file
from torch import Tensor

from skipstone import LLM, SamplingParams
from skipstone.cli import main as cli
from skipstone.core.sequence_table import SlotRows
from skipstone.errors import CheckpointError, ConfigError, SkipstoneError, UnsupportedError
from skipstone.spec.proposer import DraftStep

TOLERANCE = 1e-4
TARGETS = ["m3", "dsa"]
EAGLE3 = ["eagle3", "eagle3_wide", "eagle3_speculators"]


class Weights:
    """A head's tensors in float32, and the few operations that its equations use."""

    def __init__(self, head: Head):
        self.config = head.config
        self.layer = head.config.get("transformer_layer_config", head.config)
        self.tensors = {n: t.float() if t.is_floating_point() else t for n, t in head.tensors.items()}

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Root-mean-square norm times the weight."""
        return x * (x.square().mean(-1, keepdim=True) + self.layer["rms_norm_eps"]).rsqrt() * self[name]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"]

    def heads(self, name: str, x: Tensor) -> Tensor:
        """A projection split into heads, [heads, S, D]."""
        return (x @ self[name].T).unflatten(-1, (-1, self.layer["head_dim"])).transpose(0, 1)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Halves of each head rotate together."""
        dim = self.layer["head_dim"]
        angle = positions[:, None] * self.layer["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """Queries [heads, S, D] over keys [kv_heads, S', D] where `seen` [S, S']: [S, heads * D]."""
        group = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = (q @ k.transpose(1, 2)) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        return (weights @ v).transpose(0, 1).flatten(1)

    def mlp(self, name: str, x: Tensor) -> Tensor:
        """down(silu(gate x) * up x)."""
        return (F.silu(x @ self[f"{name}.gate_proj"].T) * (x @ self[f"{name}.up_proj"].T)) @ self[f"{name}.down_proj"].T


class Target(NamedTuple):
    """What a head takes from its target."""

    reference: Reference
    embed: Tensor
    head: Tensor

    @torch.no_grad()
    def taps(self, token_ids: list[int]) -> Tensor:
        """The residual streams that enter layers AUX_LAYERS, side by side: [S, 3H]."""
        layers, streams = self.reference.layers, {}

        def entering(layer: int) -> Callable[..., None]:
            def hook(_: object, args: tuple, kwargs: dict) -> None:
                streams[layer] = (args[0] if args else kwargs["hidden_states"])[0]

            return hook

        def leaving(_: object, __: object, output: Tensor | tuple) -> None:
            streams[len(layers)] = (output if isinstance(output, Tensor) else output[0])[0]

        handles = [layer.register_forward_pre_hook(entering(i), with_kwargs=True) for i, layer in enumerate(layers)]
        handles.append(layers[-1].register_forward_hook(leaving))
        self.reference.logits(token_ids)
        for handle in handles:
            handle.remove()
        return torch.cat([streams[layer] for layer in AUX_LAYERS], dim=-1)


def eagle3_layer(w: Weights, embedded: Tensor, hidden: Tensor) -> Tensor:
    """The decoder layer over a whole sequence [S, H] -> [S, H]."""
    name = "layers.0" if "layers.0.hidden_norm.weight" in w.tensors else "midlayer"
    positions = torch.arange(len(hidden))
    normed = w.norm(f"{name}.hidden_norm", hidden)
    both = torch.cat([w.norm(f"{name}.input_layernorm", embedded), normed], dim=-1)
    q, k, v = (w.heads(f"{name}.self_attn.{part}_proj", both) for part in "qkv")
    seen = positions[:, None] >= positions
    attended = w.attention(w.rotate(q, positions), w.rotate(k, positions), v, seen)
    residual = normed if w.config.get("norm_before_residual") else hidden
    x = residual + attended @ w[f"{name}.self_attn.o_proj"].T
    return x + w.mlp(f"{name}.mlp", w.norm(f"{name}.post_attention_layernorm", x))


def eagle3_logits(w: Weights, target: Target, taps: Tensor, committed: list[int], drafts: list[int]) -> Tensor:
    """Logits [V] of the next draft: rows 0 to N - 2 from the target's states, one more per draft from its own."""
    embed = w.tensors.get("embed_tokens.weight", target.embed)
    hidden = taps[: len(committed) - 1] @ w["fc"].T
    tokens = [*committed, *drafts]
    for _ in drafts:  # each pass over the sequence yields one more state that is fed back
        out = eagle3_layer(w, embed[tokens[1 : len(hidden) + 1]], hidden)
        last = w.norm("norm", out[-1:]) if w.config.get("norm_output") else out[-1:]
        hidden = torch.cat([hidden, last])
    out = eagle3_layer(w, embed[tokens[1:]], hidden)
    logits = w.norm("norm", out[-1]) @ w["lm_head"].T
    if "d2t" not in w.tensors:
        return logits
    full = torch.full((VOCAB,), -math.inf)
    for draft_id, offset in enumerate(w.tensors["d2t"].tolist()):
        full[draft_id + offset] = logits[draft_id]
    return full


def dflash_logits(w: Weights, target: Target, taps: Tensor, committed: list[int], count: int) -> Tensor:
    """Logits [count, V] of all drafts of a block, from one pass over features and block together."""
    context = len(committed) - 1
    features = w.norm("hidden_norm", taps[:context] @ w["fc"].T)
    block = torch.arange(context, context + 1 + count)
    places = torch.arange(context + 1 + count)
    x = target.embed[[committed[-1], *[MASK_TOKEN] * count]]
    for layer in range(w.config["num_hidden_layers"]):
        name = f"layers.{layer}"
        normed = w.norm(f"{name}.input_layernorm", x)
        both = torch.cat([features, normed])
        q = w.norm(f"{name}.self_attn.q_norm", w.heads(f"{name}.self_attn.q_proj", normed))
        k = w.norm(f"{name}.self_attn.k_norm", w.heads(f"{name}.self_attn.k_proj", both))
        v = w.heads(f"{name}.self_attn.v_proj", both)
        seen = torch.ones(len(x), len(both), dtype=torch.bool)
        attended = w.attention(w.rotate(q, block), w.rotate(k, places), v, seen)
        x = x + attended @ w[f"{name}.self_attn.o_proj"].T
        x = x + w.mlp(f"{name}.mlp", w.norm(f"{name}.post_attention_layernorm", x))
    return w.norm("norm", x[1:]) @ target.head.T


class Choice(NamedTuple):
    """Where a draft was chosen, and from which logits."""

    committed: list[int]
    drafts: list[int]  # before it, of the same run
    logits: Tensor


def record(llm: LLM) -> list[Choice]:
    """Every draft choice that the engine makes from now on."""
    choices: list[Choice] = []
    proposer = llm.engine.runner.proposer
    assert proposer is not None
    propose = proposer.propose

    def recording(step: DraftStep) -> Tensor | None:
        texts = [
            step.table.tokens[slot, : newest + 1].tolist()
            for slot, newest in zip(step.draft_slots.tolist(), step.newest.tolist(), strict=True)
        ]
        # Past the end of what a request may write, its row is padding.
        wanted = torch.minimum(step.wanted, step.draft_at.limit - step.newest - 1).tolist()
        drafts: list[list[int]] = [[] for _ in texts]
        sample = step.sampler.sample

        def recorded(logits: Tensor, at: SlotRows, slots: Tensor, position: Tensor, depth: int) -> Tensor:
            chosen = sample(logits, at, slots, position, depth)
            for i, (committed, values, token) in enumerate(zip(texts, logits, chosen.tolist(), strict=True)):
                if depth < wanted[i]:
                    choices.append(Choice(committed, list(drafts[i]), values.clone()))
                drafts[i].append(token)
            return chosen

        object.__setattr__(step.sampler, "sample", recorded)
        return propose(step)

    proposer.propose = recording  # type: ignore[method-assign]
    return choices


def tap_finder(target: Target, choices: list[Choice]) -> Callable[[list[int]], Tensor]:
    """From committed tokens to the taps of all but the last; each text's are computed once, as they are causal."""
    known: list[tuple[list[int], Tensor]] = []

    def find(committed: list[int]) -> Tensor:
        text = committed[:-1]
        return next(taps for longer, taps in known if longer[: len(text)] == text)[: len(text)]

    for choice in sorted(choices, key=lambda choice: -len(choice.committed)):
        text = choice.committed[:-1]
        if not any(longer[: len(text)] == text for longer, _ in known):
            known.append((text, target.taps(text)))
    return find


def tokens(length: int, seed: int) -> list[int]:
    """Uniform token ids."""
    return torch.randint(0, VOCAB - 3, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(llm: LLM, count: int = 14) -> None:
    """Prompts of several lengths, two with one beginning; temperature 5 has drafts accepted and rejected."""
    shared = tokens(40, 9)
    prompts = [tokens(1, 1), tokens(23, 2), shared, [*shared, 5, 6], [*shared[:33], 7]]
    settings = [{"temperature": 5.0}, {"temperature": 5.0, "presence_penalty": 0.5}, {"temperature": 0.0}]
    params = [SamplingParams(max_tokens=count, seed=i, ignore_eos=True, **settings[i % 3]) for i in range(len(prompts))]
    llm.generate(prompts, params, progress=False)
    llm.engine.scheduler.check()


@pytest.fixture(scope="module")
def target(tiny: Callable[[str], Tiny], folder: Callable[[str], Path]) -> Callable[[str], Target]:
    """The tiny target of that name in the other library."""

    def load(name: str) -> Target:
        checkpoint = tiny(name)
        prefix = "language_model." if "text_config" in checkpoint.config else ""
        embed, head = (checkpoint.tensors[f"{prefix}{n}.weight"] for n in ("model.embed_tokens", "lm_head"))
        return Target(Reference(checkpoint, folder(name)), embed.float(), head.float())

    return cache(load)


def error(got: Tensor, expected: Tensor) -> float:
    """Largest difference, in units of the largest logit; infinite where only one side excludes a token."""
    finite = expected.isfinite()
    if not torch.equal(finite, got.isfinite()):
        return math.inf
    return float((got[finite] - expected[finite]).abs().max() / expected[finite].abs().max())


CHUNKS = [{}, {"max_num_batched_tokens": 16, "block_size": 8}]


@pytest.mark.parametrize("options", CHUNKS, ids=["whole", "chunked"])
@pytest.mark.parametrize("kind", EAGLE3)
@pytest.mark.parametrize("name", TARGETS)
def test_eagle3_drafts_come_from_the_papers_logits(
    name: str,
    kind: str,
    options: dict,
    tiny: Callable[[str], Tiny],
    folder: Callable[[str], Path],
    target: Callable[[str], Target],
    tmp_path: Path,
) -> None:
    head = HEADS[kind](tiny(name))
    llm = LLM(str(folder(name)), spec=f"eagle3:{head.write(tmp_path / kind)}:3", **options)
    choices = record(llm)
    run(llm)
    assert len(choices) > 80 and llm.engine.scheduler.stats.speculation.accepted
    weights, states = Weights(head), tap_finder(target(name), choices)
    for choice in choices:
        expected = eagle3_logits(weights, target(name), states(choice.committed), choice.committed, choice.drafts)
        assert error(choice.logits, expected) < TOLERANCE, (len(choice.committed), len(choice.drafts))


@pytest.mark.parametrize("options", CHUNKS, ids=["whole", "chunked"])
@pytest.mark.parametrize("k", [1, BLOCK - 1])
@pytest.mark.parametrize("name", TARGETS)
def test_dflash_drafts_come_from_the_papers_logits(
    name: str,
    k: int,
    options: dict,
    tiny: Callable[[str], Tiny],
    folder: Callable[[str], Path],
    target: Callable[[str], Target],
    tmp_path: Path,
) -> None:
    head = HEADS["dflash"](tiny(name))
    llm = LLM(str(folder(name)), spec=f"dflash:{head.write(tmp_path / 'head')}:{k}", **options)
    choices = record(llm)
    run(llm, 36)
    assert len(choices) > 40 and llm.engine.scheduler.stats.speculation.accepted
    weights, states = Weights(head), tap_finder(target(name), choices)
    blocks: dict[tuple[int, ...], list[Choice]] = {}
    for choice in choices:
        blocks.setdefault(tuple(choice.committed), []).append(choice)
    whole = 0
    for committed, block in blocks.items():
        fewest = max(len(choice.drafts) for choice in block) + 1
        # A whole block runs however few drafts are wanted; it is shorter only where the text's cache blocks end.
        errors = {}
        for count in range(BLOCK - 1, fewest - 1, -1):
            expected = dflash_logits(weights, target(name), states(list(committed)), list(committed), count)
            errors[count] = max(error(choice.logits, expected[len(choice.drafts)]) for choice in block)
            if errors[count] < TOLERANCE:
                break
        assert min(errors.values()) < TOLERANCE, (len(committed), errors)
        whole += errors[BLOCK - 1] < TOLERANCE
    assert whole > 0.75 * len(blocks)


def test_a_dflash_block_is_chosen_alike_at_once_and_step_by_step(
    tiny: Callable[[str], Tiny], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """A request with penalties in the batch makes all drafts be chosen one after the other."""
    llm = LLM(str(folder("m3")), spec=f"dflash:{write_head('dflash', tiny('m3'), tmp_path / 'head')}:5")
    plain = [SamplingParams(temperature=t, max_tokens=40, seed=3, min_tokens=40) for t in (0.0, 5.0, 5.0)]
    prompts = [tokens(12, 1), tokens(20, 2), tokens(5, 3)]
    ends = SamplingParams(temperature=5.0, max_tokens=200, seed=4, presence_penalty=0.1, ignore_eos=True)
    seen = []
    for further in ([], [(tokens(9, 4), ends)]):
        jobs = [*zip(prompts, plain, strict=True), *further]
        outs = llm.generate([prompt for prompt, _ in jobs], [params for _, params in jobs], progress=False)
        counts = [out.outputs[0].speculation for out in outs[:3]]
        seen.append([(count.drafted_per_position, count.accepted_per_position) for count in counts if count])
    assert sum(map(sum, seen[0][1][1:])) > 5
    assert seen[0] == seen[1]


MISTAKES: dict[str, tuple[str, Callable[[dict], object]]] = {
    "taps": ("eagle3", lambda config: config["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[0, 1, 3])),
    "residual normed": ("eagle3", lambda config: config.update(norm_before_residual=True)),
    "recycled normed": ("eagle3", lambda config: config.update(norm_output=True)),
    "rotary base": ("eagle3", lambda config: config.update(rope_theta=500.0)),
    "DFlash taps": ("dflash", lambda config: config["dflash_config"].update(target_layer_ids=[0, 1, 2])),
    "DFlash mask": ("dflash", lambda config: config["dflash_config"].update(mask_token_id=MASK_TOKEN - 1)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_notices_a_wrong_convention(
    mistake: str,
    tiny: Callable[[str], Tiny],
    folder: Callable[[str], Path],
    target: Callable[[str], Target],
    tmp_path: Path,
) -> None:
    kind, change = MISTAKES[mistake]
    head = HEADS[kind](tiny("m3"))
    path = head.write(tmp_path / "head")
    edit(path, change)
    llm = LLM(str(folder("m3")), spec=f"{kind}:{path}:3")
    choices = record(llm)
    llm.generate(tokens(30, 3), SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True), progress=False)
    weights, errors, states = Weights(head), [], tap_finder(target("m3"), choices)
    for committed, drafts, logits in choices:
        if kind == "eagle3":
            expected = eagle3_logits(weights, target("m3"), states(committed), committed, drafts)
        else:
            expected = dflash_logits(weights, target("m3"), states(committed), committed, 3)[len(drafts)]
        errors.append(error(logits, expected))
    assert max(errors) > 10 * TOLERANCE


class TestDraftModel:
    """An independent draft model: its drafts are its own continuation, and a perfect one is always right."""

    @pytest.mark.parametrize("options", CHUNKS, ids=["whole", "chunked"])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("name", TARGETS)
    def test_the_target_itself_is_never_rejected(
        self, name: str, temperature: float, options: dict, folder: Callable[[str], Path]
    ) -> None:
        llm = LLM(str(folder(name)), spec=f"draft:{folder(name)}:3", **options)
        params = SamplingParams(temperature=temperature, max_tokens=1 + 4 * 6, seed=1, ignore_eos=True)
        llm.generate([tokens(n, n) for n in (1, 20, 45)], params, progress=False)
        stats = llm.engine.scheduler.stats.speculation
        assert stats.acceptance_length == 4.0
        assert stats.accepted == stats.drafted == 3 * 3 * 6

    @pytest.mark.parametrize(("name", "other"), [("m3", "dsa"), ("dsa", "m3"), ("m3", "m3_mixed")])
    def test_drafts_are_the_draft_models_own_continuation(
        self, name: str, other: str, folder: Callable[[str], Path]
    ) -> None:
        llm = LLM(str(folder(name)), spec=f"draft:{folder(other)}:3", draft_sampling="greedy")
        choices = record(llm)
        run(llm)
        alone = LLM(str(folder(other)), spec="off")
        for choice in choices[::5]:
            text = choice.committed + choice.drafts
            params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1, ignore_eos=True)
            entry = alone.generate(text, params, progress=False)[0].outputs[0].logprobs[0]
            expected = torch.empty(VOCAB).index_copy_(0, torch.tensor(entry.top_ids), torch.tensor(entry.top_logprobs))
            got = choice.logits.log_softmax(-1)
            assert float((got - expected).abs().max() / expected.abs().max()) < TOLERANCE

    def test_blocks_fit_both_models(self, folder: Callable[[str], Path]) -> None:
        llm = LLM(str(folder("dsa")), spec=f"draft:{folder('m3')}:2")
        assert llm.engine.caches.block_size % 8 == 0
        with pytest.raises(ConfigError, match=r"block_size=12 must be a multiple of 8.*block 1 .*draft model's 8"):
            LLM(str(folder("dsa")), spec=f"draft:{folder('m3')}:2", block_size=12)

    def test_another_vocabulary_is_refused(
        self, tiny: Callable[[str], Tiny], folder: Callable[[str], Path], tmp_path: Path
    ) -> None:
        other = write_folder(tiny("dsa"), tmp_path / "other")
        edit(other, lambda config: config.update(vocab_size=VOCAB + 1))
        with pytest.raises(ConfigError, match=r"draft model other and target m3 have different vocabularies.*129 and"):
            LLM(str(folder("m3")), spec=f"draft:{other}:2")

    def test_another_tokenizer_is_refused(self, tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
        one, two = (write_folder(tiny(name), tmp_path / name) for name in ("m3", "dsa"))
        vocab = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}, "added_tokens": []}
        (two / "tokenizer.json").write_text(json.dumps(vocab))
        with pytest.raises(ConfigError, match=r"dsa and target m3 cannot be compared: .*m3/tokenizer.json is missing"):
            LLM(str(one), spec=f"draft:{two}:2")
        vocab["model"]["vocab"] = {"b": 0, "a": 1}
        shutil.copy(Path(__file__).parent.parent / "checkpoints" / "demo" / "tokenizer.json", one)
        with pytest.raises(ConfigError, match="dsa and target m3 have different tokenizers"):
            LLM(str(one), spec=f"draft:{two}:2")


def edit(folder: Path, change: Callable[[dict], object]) -> None:
    """Change config.json of a folder."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the weights of a folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})


class Damage(NamedTuple):
    """A head folder that cannot serve: what is done to it, and what the error must say."""

    kind: str
    config: Callable[[dict], object]
    tensors: Callable[[dict[str, Tensor]], object]
    message: str


def nothing(_: object) -> None:
    """No change."""


def absolute(t: dict[str, Tensor]) -> None:
    """Ids in place of offsets."""
    t["d2t"] = t["d2t"] + torch.arange(len(t["d2t"]))


def layer(key: str, value: object) -> Callable[[dict], object]:
    """A change of one key of a speculators config's layer."""
    return lambda config: config["transformer_layer_config"].update({key: value})


def twice(t: dict[str, Tensor]) -> None:
    """The second draft token is the first one again, and nothing says which tokens are drafted."""
    del t["t2d"]
    t["d2t"][1] = t["d2t"][0] - 1


def key(name: str, value: object) -> Callable[[dict], object]:
    """A change of one key."""
    return lambda config: config.update({name: value})


def taps(ids: list[int]) -> Callable[[dict], object]:
    """Other layers for a head in the hub's layout."""
    return lambda config: config["eagle_config"].update(eagle_aux_hidden_state_layer_ids=ids)


def option(name: str, value: object) -> Callable[[dict], object]:
    """A change of one key of `dflash_config`."""
    return lambda config: config["dflash_config"].update({name: value})


DAMAGES = {
    "no lm_head": Damage("eagle3", nothing, lambda t: t.pop("lm_head.weight"), "lack lm_head.weight.*draft_vocab_size"),
    "no d2t": Damage("eagle3", nothing, lambda t: t.pop("d2t"), "draft_vocab_size=96.*vocab_size=128.*d2t"),
    "d2t names a token twice": Damage("eagle3", nothing, twice, "d2t does not hold offsets.* to different tokens"),
    "d2t holds ids": Damage("eagle3", nothing, absolute, "d2t does not hold offsets"),
    "no embedding": Damage(
        "eagle3_wide", nothing, lambda t: t.pop("embed_tokens.weight"), "hidden_size=48.*target's 64.*embed_tokens"
    ),
    "no norm": Damage("eagle3", nothing, lambda t: t.pop("norm.weight"), "1 tensors missing: norm.weight"),
    "wrong shape": Damage(
        "eagle3",
        nothing,
        lambda t: t.update({"fc.weight": torch.zeros(64, 3 * 32)}),
        r"another shape: fc.weight \[64, 96\], expected \[64, 192\].*for this model",
    ),
    "stray tensor": Damage("eagle3", nothing, lambda t: t.update({"extra": torch.zeros(1)}), "unexpected: extra"),
    "two layers": Damage(
        "eagle3", key("num_hidden_layers", 2), nothing, "num_hidden_layers=2 is not supported, only 1"
    ),
    "tap out of range": Damage("eagle3", taps([1, 2, 5]), nothing, r"eagle_aux_hidden.*\[1, 2, 5\].*0 to 4"),
    "tap twice": Damage("eagle3", taps([1, 2, 2]), nothing, r"eagle_aux_hidden.*different layers"),
    "taps unknown": Damage("eagle3", taps([]), nothing, r"eagle_aux_hidden.* is missing.*\[2, 2, 1\]"),
    "last state only": Damage(
        "eagle3", lambda c: c["eagle_config"].update(use_aux_hidden_state=False), nothing, "use_aux_hidden_state=False"
    ),
    "no object": Damage("eagle3", key("eagle_config", [1, 2, 4]), nothing, "eagle_config must be an object"),
    "other vocabulary": Damage("eagle3", key("vocab_size", 200), nothing, "vocab_size=200 differs from.*128"),
    "larger vocabulary": Damage("eagle3", key("draft_vocab_size", 200), nothing, "draft_vocab_size=200.*128"),
    "other target": Damage("eagle3", key("target_hidden_size", 32), nothing, "target_hidden_size=32.*64"),
    "other architecture": Damage(
        "eagle3", key("architectures", ["Foo"]), nothing, r"architectures=\['Foo'\].*spec=eagl"
    ),
    "a DFlash head": Damage(
        "eagle3", key("architectures", ["DFlashDraftModel"]), nothing, "use dflash:FOLDER:K for it"
    ),
    "a language model": Damage(
        "eagle3", key("architectures", ["DeepseekV32ForCausalLM"]), nothing, "use draft:FOLDER:K for it"
    ),
    "other speculator": Damage("eagle3_speculators", key("speculators_model_type", "peagle"), nothing, "='peagle'"),
    "nested rope": Damage(
        "eagle3_speculators",
        layer("rope_scaling", {"rope_type": "llama3"}),
        nothing,
        "_config.rope_scaling: rope_type='llama3'",
    ),
    "nested size": Damage("eagle3_speculators", layer("hidden_size", None), nothing, "_config: key 'hidden_size' is m"),
    "speculators k": Damage(
        "eagle3_speculators",
        lambda c: c["speculators_config"]["proposal_methods"][0].update(speculative_tokens="many"),
        nothing,
        "speculative_tokens='many'",
    ),
    "DFlash hidden size": Damage("dflash", key("hidden_size", 48), nothing, "hidden_size=48.*only 64"),
    "DFlash layers": Damage(
        "dflash", option("target_layer_ids", [0, 4]), nothing, r"target_layer_ids=\[0, 4\].*0 to 3"
    ),
    "DFlash mask": Damage("dflash", option("mask_token_id", 128), nothing, "mask_token_id=128.*0 to 127"),
    "DFlash causal": Damage("dflash", option("causal", True), nothing, "dflash_config: causal=True is not supported"),
    "DFlash window": Damage("dflash", key("layer_types", ["sliding_attention"] * 2), nothing, "layer_types=.*sliding"),
    "DFlash block": Damage("dflash", key("block_size", 1), nothing, "block_size=1.*at least 2"),
    "DFlash depth": Damage("dflash", key("num_target_layers", 6), nothing, "num_target_layers=6.*4"),
    "DFlash weights": Damage(
        "dflash", nothing, lambda t: t.pop("layers.1.self_attn.k_norm.weight"), "missing: layers.1"
    ),
}


class TestFolders:
    """Each layout, and what is said of folders that cannot serve."""

    @pytest.fixture
    def head(self, tiny: Callable[[str], Tiny], tmp_path: Path) -> Iterator[Callable[[str], Path]]:
        yield lambda kind: write_head(kind, tiny("m3"), tmp_path / "head")

    @pytest.mark.parametrize("name", DAMAGES)
    def test_damage_is_named(
        self,
        name: str,
        head: Callable[[str], Path],
        folder: Callable[[str], Path],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        damage = DAMAGES[name]
        path = head(damage.kind)
        edit(path, damage.config)
        edit_tensors(path, damage.tensors)
        method = damage.kind.split("_")[0]
        with pytest.raises((ConfigError, CheckpointError), match=damage.message) as caught:
            LLM(str(folder("m3")), spec=f"{method}:{path}:2")
        assert "head" in str(caught.value)
        if "architectures" in damage.message or ":FOLDER:K" in damage.message or "peagle" in damage.message:
            return  # `inspect` takes it for what its config.json says
        code = cli.run(["inspect", str(path), "--target", str(folder("m3"))])
        assert code == (0 if name.startswith("d2t ") else 3)  # which no header tells
        assert code == 0 or re.search(damage.message, "".join(capsys.readouterr()))

    @pytest.mark.parametrize("method", ["eagle3", "dflash", "draft"])
    def test_a_folder_must_be_named(self, method: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=f"spec={method} needs a folder: pass {method}:FOLDER:K"):
            LLM(str(folder("m3")), spec=f"{method}:2")
        with pytest.raises(SkipstoneError, match=f"spec={method}.*absent"):
            LLM(str(folder("m3")), spec=f"{method}:{tmp_path / 'absent'}:2")

    def test_a_head_beside_the_model_is_found(self, tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
        model = write_folder(tiny("m3"), tmp_path / "tiny")
        write_head("dflash", tiny("m3"), tmp_path / "tiny-dflash")
        assert LLM(str(model), spec="dflash").engine.speculation.k == BLOCK - 1

    def test_k_of_the_speculators_config_is_the_default(
        self, head: Callable[[str], Path], folder: Callable[[str], Path]
    ) -> None:
        path = head("eagle3_speculators")
        assert LLM(str(folder("m3")), spec=f"eagle3:{path}").engine.speculation.k == 5
        assert LLM(str(folder("m3")), spec=f"eagle3:{path}:2").engine.speculation.k == 2

    def test_two_modules_bound_the_default_k(self, tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
        model = write_folder(with_mtp(tiny("dsa"), 2), tmp_path / "model")
        assert LLM(str(model), spec="auto").engine.speculation.k == 2

    def test_a_block_bounds_k(self, head: Callable[[str], Path], folder: Callable[[str], Path]) -> None:
        with pytest.raises(ConfigError, match=f"k={BLOCK} is more than dflash can draft at once; at most {BLOCK - 1}"):
            LLM(str(folder("m3")), spec=f"dflash:{head('dflash')}:{BLOCK}")

    def test_whole_vocabulary_heads_may_share_the_targets_product(
        self, tiny: Callable[[str], Tiny], folder: Callable[[str], Path], tmp_path: Path
    ) -> None:
        head = HEADS["eagle3"](tiny("m3"))
        config = head.config | {"draft_vocab_size": VOCAB}
        kept = {n: t for n, t in head.tensors.items() if n not in ("lm_head.weight", "d2t", "t2d")}
        path = Head(config, kept).write(tmp_path / "head")
        run(LLM(str(folder("m3")), spec=f"eagle3:{path}:2"), count=4)

    def test_drafting_ends_where_the_head_does(
        self, head: Callable[[str], Path], folder: Callable[[str], Path]
    ) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        expected = LLM(str(folder("m3")), spec="off").generate(tokens(30, 1), params, progress=False)
        for kind in ("eagle3", "dflash"):
            path = head(kind)
            edit(path, key("max_position_embeddings", 45))
            llm = LLM(str(folder("m3")), spec=f"{kind}:{path}:3")
            got = llm.generate(tokens(30, 1), params, progress=False)
            assert got[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
            assert 0 < llm.engine.scheduler.stats.speculation.steps < 20


def test_unsupported_groups_are_refused() -> None:
    """A block head over a sparse backend: its rows could not see each other."""
    from skipstone.attention.backend import check_groups
    from skipstone.core.kv_cache import CacheSpec

    specs = [CacheSpec(0, "draft K/V", "dense", ()), CacheSpec(1, "sparse K/V", "msa", ())]
    with pytest.raises(UnsupportedError, match="'sparse K/V' with backend 'msa'; backends that have it: dense"):
        check_groups(specs, "in_block", "dflash")
