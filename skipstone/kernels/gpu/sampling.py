"""Sampling in Triton: the same noise, bit for bit, and the same choice as `kernels.reference.sampling`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from skipstone.core.batch import SamplingRows
from skipstone.kernels.gpu.gemm import counters
from skipstone.kernels.reference.sampling import GUMBEL_STREAM, LARGEST, MIN_TEMPERATURE, process_logits

BLOCK = 2048
STREAM = tl.constexpr(GUMBEL_STREAM)
LARGEST_LOGIT = tl.constexpr(LARGEST)
COLDEST = tl.constexpr(MIN_TEMPERATURE)
STEP = tl.constexpr(2.0**-52)
LAST_BITS = tl.constexpr((1 << 52) - 1)


@triton.jit
def _mix64(value):
    """A bijection of uint64, see the reference's function of this name."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _noise_bits(seed, position, token):
    """The 52 random bits of tokens (int64), a function of the int64 scalars seed and position. int64."""
    stream = tl.full([], STREAM, tl.uint64)
    row_key = _mix64(_mix64(seed.to(tl.uint64, bitcast=True) ^ stream) + position.to(tl.uint64, bitcast=True))
    token_key = _mix64((token + 1).to(tl.uint64, bitcast=True))
    return (_mix64(row_key ^ token_key) >> 12).to(tl.int64)


@triton.jit
def _gumbel(bits):
    """Standard Gumbel noise, float32, by way of float64."""
    uniform = (bits.to(tl.float64) + 0.5) * STEP  # one half can be added to 52 bits exactly
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def _nearly_gumbel(bits):
    """`_gumbel` to within 1e-4, in float32."""
    uniform = bits.to(tl.float32) * STEP + STEP
    rest = (bits ^ LAST_BITS).to(tl.float32) * STEP + 0.5 * STEP  # 1 - uniform, but exact where that is small
    exponential = tl.where(rest < 0.015625, rest * (1.0 + rest * (0.5 + rest * 0.33333333)), -tl.log(uniform))
    return -tl.log(exponential)


@triton.jit
def _noisy_best(score, token, seed, position):
    """The largest score + noise of a tile, and its token (the lowest of equal ones); -inf and the first token if none.

    Logarithms in float64 are slow, so only tokens that could win are given exact noise: nearly always one.
    """
    near = score + _nearly_gumbel(_noise_bits(seed, position, token))
    top = tl.max(near, axis=0)
    absorbed = tl.abs(top) > 2147483648.0  # such scores are too large for noise to change them
    margin = tl.where(absorbed, 0.0, 1e-3 + tl.abs(top) * 1e-6)
    candidate = (near >= top - margin) & (score > float("-inf"))
    left = tl.sum(candidate.to(tl.int32), axis=0)
    left = tl.where(absorbed, tl.minimum(left, 1), left)
    best = tl.full([], float("-inf"), tl.float32)
    winner = tl.min(token, axis=0)
    while left > 0:
        first = tl.min(tl.where(candidate, token, 0x4000000000000000), axis=0)
        value = tl.sum(tl.where(token == first, score, 0.0), axis=0)
        value += _gumbel(_noise_bits(seed, position, first))
        winner = tl.where(value > best, first, winner)
        best = tl.maximum(best, value)
        candidate = candidate & (token != first)
        left -= 1
    return best, winner


@triton.jit
def _sample_kernel(
    logits_ptr,  # [L, VOCAB]
    seed_ptr,  # [L] int64
    position_ptr,  # [L] int64
    temperature_ptr,  # [L] float32
    best_ptr,  # [L, TILES] float32
    best_id_ptr,  # [L, TILES] int32
    counter_ptr,  # [L] int32, zero before and after
    out_ptr,  # [L] int64
    row_stride,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    NOISE: tl.constexpr,
    SCALED: tl.constexpr,
):
    """One program per (vocabulary tile, row); the last one of a row picks the best tile.

    `SCALED`: temperature is in the logits already.
    """
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    token = tile * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits_ptr + row * row_stride + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    score = tl.where(score == score, score, float("-inf"))
    score = tl.minimum(score, LARGEST_LOGIT)
    noisy = False
    if NOISE:
        temperature = tl.load(temperature_ptr + row)
        if temperature != 0:
            if not SCALED:
                score = tl.minimum(tl.div_rn(score, tl.maximum(temperature, COLDEST)), LARGEST_LOGIT)
            seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
            best, winner = _noisy_best(score, token.to(tl.int64), seed, position)
            tl.store(best_ptr + row * TILES + tile, best)
            tl.store(best_id_ptr + row * TILES + tile, winner.to(tl.int32))
            noisy = True
    if not noisy:
        best, place = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(best_ptr + row * TILES + tile, best)
        tl.store(best_id_ptr + row * TILES + tile, tile * BLOCK + place)
    tl.debug_barrier()  # both stores come before the count
    arrived = tl.atomic_add(counter_ptr + row, 1, sem="acq_rel")
    if arrived == TILES - 1:
        other = tl.arange(0, BLOCK_TILES)
        inside = other < TILES
        bests = tl.load(best_ptr + row * TILES + other, mask=inside, other=float("-inf"), cache_modifier=".cg")
        best, winner = tl.max(bests, axis=0, return_indices=True, return_indices_tie_break_left=True)
        token_id = tl.load(best_id_ptr + row * TILES + winner, cache_modifier=".cg")
        tl.store(out_ptr + row, token_id.to(tl.int64))
        tl.store(counter_ptr + row, 0)


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Choose one token per row. logits [L, V] float32 or bfloat16 -> [L] int64. See the reference's `sample`.

    One launch where no row has bias, penalties, a grammar, top-k, top-p or min-p. Those go through the reference's
    `process_logits`, which reads sizes back to the host.
    """
    features = (rows.top_k, rows.top_p, rows.min_p, rows.penalties, rows.bias, rows.allowed)
    scaled = any(feature is not None for feature in features)
    if scaled:
        logits = process_logits(logits.float(), rows)
    count, vocab = logits.shape
    out = torch.empty(count, dtype=torch.int64, device=logits.device)
    if count == 0:
        return out
    tiles = triton.cdiv(vocab, BLOCK)
    best = torch.empty(count, tiles, dtype=torch.float32, device=logits.device)
    best_id = torch.empty(count, tiles, dtype=torch.int32, device=logits.device)
    _sample_kernel[(tiles, count)](
        logits, rows.seed, rows.position, rows.temperature, best, best_id, counters(logits.device), out,
        logits.stride(0), VOCAB=vocab, TILES=tiles, BLOCK=BLOCK, BLOCK_TILES=triton.next_power_of_2(tiles),
        NOISE=not rows.all_greedy, SCALED=scaled, num_warps=4,
    )  # fmt: skip
    return out
