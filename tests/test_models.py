"""The engine's models against another library's, on tiny checkpoints whose budgets are far below the context.

Error: per position, the largest difference of log-probabilities over the vocabulary, relative to the largest
log-probability of that position (`relative_error`). Both sides compute in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from oracles.flaws import INDEX_FLAWS, MODEL_FLAWS, Flaw
from oracles.reference import Reference, relative_error
from oracles.sampling import Row, process
from oracles.tiny import EOS, TINY, VOCAB, Tiny, write_folder
from torch import Tensor

from skipstone import LLM, SamplingParams
from skipstone.kernels.reference.sampling import gumbel_noise

TOLERANCE = 1e-4
MODELS = ["m3", "m3_mixed", "m3_init", "dsa"]
LENGTHS = [1, 5, 17, 40, 150]
LONG = 600  # many times the budget, and more keys than attention handles in one piece
CLEAR = 1e-3  # a greedy token must lead by more than rounding could take away


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Uniform token ids; the ids that end a text or stand for pictures are left out."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, VOCAB - 3, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def reference(tiny: Callable[[str], Tiny], folder: Callable[[str], Path]) -> Callable[..., Reference]:
    """The reference of that name, loaded once."""
    return cache(lambda name: Reference(tiny(name), folder(name)))


@pytest.fixture(scope="module")
def expected(reference: Callable[..., Reference]) -> Callable[[str, int], Tensor]:
    """Log-probabilities [n, V] of the random prompt of length n."""
    return cache(lambda name, length: reference(name).logprobs(random_prompt(length)))


class TestReference:
    """The reference itself: it agrees with the library, is stable, and notices every mistake we could think of."""

    @pytest.mark.parametrize("name", MODELS)
    def test_index_equations_are_the_librarys(
        self, name: str, tiny: Callable[[str], Tiny], folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With the library's treatment of ties and without leading blocks, our indexers choose what its own choose."""
        prompt = random_prompt(150)
        theirs = Reference(tiny(name), folder(name))
        for indexer in theirs.indexers():
            del indexer.forward
        monkeypatch.setattr("oracles.reference.best_first", lambda s: s.topk(min(16, s.shape[-1])).indices)
        ours = Reference(tiny(name), folder(name), "no init")
        assert relative_error(ours.logprobs(prompt), theirs.logprobs(prompt)).max() < TOLERANCE

    @pytest.mark.parametrize("name", MODELS)
    def test_rounding_decides_nothing(
        self, name: str, tiny: Callable[[str], Tiny], folder: Callable[[str], Path], expected: Callable[..., Tensor]
    ) -> None:
        """In float64 the same keys and experts are chosen, so a larger error of the engine is not bad luck."""
        double = Reference(tiny(name), folder(name))
        double.model.double()
        for length in (*LENGTHS, LONG):
            error = relative_error(double.logprobs(random_prompt(length)), expected(name, length))
            assert error.max() < TOLERANCE / 10, length

    @pytest.mark.parametrize(("name", "flaw"), INDEX_FLAWS)
    def test_index_mistakes_show_beyond_the_budget_only(
        self, name: str, flaw: str, tiny: Callable[[str], Tiny], folder: Callable[[str], Path], expected: Callable
    ) -> None:
        """A dense implementation, or a wrong selection, is far outside the tolerance; short prompts do not show it."""
        wrong = Reference(tiny(name), folder(name), flaw).logprobs(random_prompt(150))
        error = relative_error(wrong, expected(name, 150))
        assert error[: tiny(name).budget].max() < TOLERANCE / 10
        assert error.max() > 1000 * TOLERANCE

    @pytest.mark.parametrize(("name", "flaw"), MODEL_FLAWS)
    @torch.no_grad()
    def test_other_mistakes_show_at_once(
        self, name: str, flaw: Flaw, tiny: Callable[[str], Tiny], folder: Callable[[str], Path], expected: Callable
    ) -> None:
        wrong = Reference(tiny(name), folder(name))
        flaw(wrong)
        error = relative_error(wrong.logprobs(random_prompt(40)), expected(name, 40))
        assert error.max() > 100 * TOLERANCE


def load(folder: Path, **options: object) -> LLM:
    """The engine on a tiny checkpoint, small and in float32."""
    defaults = {"dtype": "float32", "max_num_batched_tokens": 64, "max_num_seqs": 16, "num_blocks": 300}
    return LLM(model=str(folder), **(defaults | options))


def full_distribution(entry: object) -> Tensor:
    """[V] log-probabilities of one position, from an entry that lists the whole vocabulary."""
    out = torch.full((VOCAB,), float("nan"))
    out[torch.tensor(entry.top_ids)] = torch.tensor(entry.top_logprobs)
    assert not out.isnan().any()
    assert entry.logprob == pytest.approx(out[entry.token_id].item(), abs=1e-6)
    assert entry.rank == 1 + int((out > out[entry.token_id]).sum())
    return out


def engine_logprobs(llm: LLM, prompts: list[list[int]]) -> list[Tensor]:
    """Per prompt: [n, V], the distribution after each of its tokens; the last one comes from the first new token."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, prompt_logprobs=-1, ignore_eos=True)
    results = []
    for prompt, out in zip(prompts, llm.generate(prompts, params, progress=False), strict=True):
        assert list(out.prompt_token_ids) == prompt
        entries = out.prompt_logprobs
        assert len(entries) == len(prompt)
        assert entries[0] is None
        assert [e.token_id for e in entries[1:]] == prompt[1:]
        (choice,) = out.outputs
        assert [e.token_id for e in choice.logprobs] == list(choice.token_ids)
        results.append(torch.stack([full_distribution(e) for e in [*entries[1:], *choice.logprobs]]))
    return results


@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities(name: str, chunk: int, folder: Callable[[str], Path], expected: Callable) -> None:
    """Every position of prompts below and far above the budget, one after the other, in chunks of any size."""
    llm = load(folder(name), max_num_batched_tokens=chunk, max_num_seqs=1)
    for length in LENGTHS if chunk > 1 else (5, 110):
        (got,) = engine_logprobs(llm, [random_prompt(length)])
        assert relative_error(got, expected(name, length)).max() < TOLERANCE, length


@pytest.mark.parametrize("chunk", [60, 512])
@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_of_a_batch(name: str, chunk: int, folder: Callable, expected: Callable) -> None:
    """Prompts of all lengths at once; padding to a common length would shift blocks or leak."""
    llm = load(folder(name), max_num_batched_tokens=chunk)
    order = [40, 1, 150, 5, 17, 5, LONG]
    for length, got in zip(order, engine_logprobs(llm, [random_prompt(n) for n in order]), strict=True):
        assert relative_error(got, expected(name, length)).max() < TOLERANCE, length


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_greedy_text(name: str, folder: Callable[[str], Path], reference: Callable[..., Reference]) -> None:
    """64 greedy tokens, as the reference finds them token by token, with its cache and without."""
    prompts = [random_prompt(length, seed=5) for length in (3, 90)]
    llm = load(folder(name), max_num_batched_tokens=48)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outs = llm.generate(prompts, params, progress=False)
    for prompt, out in zip(prompts, outs, strict=True):
        tokens, lead = reference(name).greedy(prompt, 64, cached=True)
        assert lead > CLEAR, "choose another prompt: two tokens are nearly equally likely"
        assert list(out.outputs[0].token_ids) == tokens
    assert reference(name).greedy(prompts[0], 64, cached=False)[0] == list(outs[0].outputs[0].token_ids)


def settings_of(params: SamplingParams, prompt: list[int], output: list[int]) -> Row:
    """The request's parameters as the loops take them."""
    return Row(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        bias=params.logit_bias,
        prompt=prompt,
        output=output,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {9: 3.0, 60: -100.0}},
        {"temperature": 1.0},
        {"temperature": 1.0, "repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 1.5},
        {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "logit_bias": {EOS: 6.0}, "min_tokens": 20},
        {"temperature": 2.5, "top_p": 0.6, "repetition_penalty": 1.2, "logit_bias": {5: float("-inf")}},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["m3", "dsa"])
def test_sampled_text(name: str, settings: dict, folder: Callable[[str], Path], reference: Callable) -> None:
    """Each token is the noisy maximum of the reference's logits, processed by the loops: penalties see prompt and
    output as they should, and the noise is that of the token's own position."""
    prompt, seed = [*random_prompt(20), 3, 3, 4, 5], 91
    params = SamplingParams(**settings, max_tokens=24, seed=seed)
    (out,) = load(folder(name), max_num_batched_tokens=9).generate([prompt], params, progress=False)
    tokens = list(out.outputs[0].token_ids)
    assert len(tokens) > 15
    logits = reference(name).logits(prompt + tokens)
    for i, token in enumerate(tokens):
        row = settings_of(params, prompt, tokens[:i])
        if i < params.min_tokens:
            row.bias = row.bias | {EOS: float("-inf")}
        scores = torch.tensor(process(logits[len(prompt) + i - 1].tolist(), row))
        if row.temperature:
            scores += gumbel_noise(torch.tensor([seed]), torch.tensor([len(prompt) + i]), VOCAB)[0]
        assert scores[token] > scores.max() - CLEAR, i


def test_flat_and_nested_exports_are_one_model(folder: Callable[[str], Path]) -> None:
    """The same weights with and without prefix and nesting: the same bits."""
    prompts = [random_prompt(n) for n in (5, 150)]
    nested, flat = (engine_logprobs(load(folder(name)), prompts) for name in ("m3", "m3_flat"))
    assert all(torch.equal(a, b) for a, b in zip(nested, flat, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_inexact_mode_is_close(name: str, folder: Callable[[str], Path], expected: Callable) -> None:
    """Without the promise of equal bits the numbers are still right."""
    llm = load(folder(name), exact=False)
    order = [40, LONG, 150, 5]
    for length, got in zip(order, engine_logprobs(llm, [random_prompt(n) for n in order]), strict=True):
        assert relative_error(got, expected(name, length)).max() < TOLERANCE, length


def written(tiny: Tiny, folder: Path, scales: dict[str, float], rope: dict[str, float | None] | None = None) -> Tiny:
    """Write the checkpoint with tensors multiplied whose name holds a key of `scales`, and other YaRN keys.

    None removes a key.
    """
    tensors = {
        name: tensor * next((factor for part, factor in scales.items() if part in name), 1.0)
        for name, tensor in tiny.tensors.items()
    }
    config = dict(tiny.config)
    if rope is not None:
        yarn = config["rope_scaling"] | rope
        config["rope_scaling"] = {key: value for key, value in yarn.items() if value is not None}
    changed = replace(tiny, tensors=tensors, config=config)
    write_folder(changed, folder)
    return changed


def check_agreement(tiny: Tiny, folder: Path, length: int = 40) -> None:
    """The engine and the reference on that folder."""
    prompt = random_prompt(length)
    (got,) = engine_logprobs(load(folder), [prompt])
    assert relative_error(got, Reference(tiny, folder).logprobs(prompt)).max() < TOLERANCE


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("dsa", ["q_a_proj"]), ("dsa", ["kv_a_proj_with_mqa"]), ("dsa", ["indexer.wk"]), ("dsa", ["embed_tokens"]),
        ("dsa", ["embed_tokens", "o_proj", "down_proj"]), ("m3", [".q_proj"]), ("m3", [".k_proj"]),
        ("m3", ["index_k_proj"]), ("m3", ["embed_tokens"]), ("m3", ["embed_tokens", "o_proj", "down_proj", ".w2."]),
    ],
    ids=str,
)  # fmt: skip
def test_every_norm_adds_its_epsilon(name: str, parts: list[str], tiny: Callable, tmp_path: Path) -> None:
    """Inputs of a norm so small that the number that keeps it from dividing by zero decides."""
    check_agreement(written(tiny(name), tmp_path, dict.fromkeys(parts, 1e-3)), tmp_path)


@pytest.mark.parametrize(("mscale", "all_dim"), [(0.7, 1.3), (1.3, 0.7)])
def test_yarn_amplitudes(mscale: float, all_dim: float, tiny: Callable, tmp_path: Path) -> None:
    """Cosines and sines are multiplied by one ratio, the softmax scale by another, and the indexer sees the first."""
    rope = {"mscale": mscale, "mscale_all_dim": all_dim}
    check_agreement(written(tiny("dsa"), tmp_path, {}, rope), tmp_path)


def test_yarn_without_amplitudes(tmp_path: Path) -> None:
    """Scores of rotated dims grow by 0.1 ln(factor) + 1 squared, wherever the two factors are put."""
    model = TINY["dsa"]()
    nope, rope = model.config["qk_nope_head_dim"], model.config["qk_rope_head_dim"]
    for name, tensor in model.tensors.items():
        if "q_b_proj" in name:  # no score comes of dims that are not rotated
            tensor.view(-1, nope + rope, tensor.shape[1])[:, :nope] = 0
    absent = written(model, tmp_path, {}, {"mscale": None, "mscale_all_dim": None})
    check_agreement(absent, tmp_path, length=model.budget)
