"""Sampling: from logits to token ids, row by row, with noise that is a function of (seed, position, token id).

Every row's result has the same bits whatever the other rows of the call are. That holds because each step is either
elementwise, or a reduction along the row; nothing here mixes rows or keeps state. Knows no requests and no drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skipstone.core.batch import Penalties, SamplingRows, TokenValues
from skipstone.kernels.reference.truncation import truncate

# One stream per purpose, so that values drawn for different purposes from one seed are independent. Any two distinct
# numbers below 2^63 serve.
GUMBEL_STREAM = 0x6A09E667F3BCC908
CHOICE_STREAM = 0x3B67AE8584CAA73B

# Below this temperature float32 logits cannot express the differences that noise could still overturn, and dividing
# by it could overflow.
MIN_TEMPERATURE = 1e-6
# Nearly every top-p set fits in this many tokens, and finding them is far cheaper than sorting the vocabulary.
FIRST_WIDTH = 256
LARGEST = torch.finfo(torch.float32).max


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Choose one token per row, logits [L, V] -> [L] int64. No state: equal arguments, equal tokens.

    Greedy rows take the likeliest token after bias and penalties. Others take the maximum of the processed logits plus
    Gumbel noise, which is a draw from their softmax. Equal values: the lowest id. NaN counts as -inf. A row without
    any possible token (all NaN, or all forbidden) gives token 0, so that one broken row cannot stop a batch.
    """
    if rows.all_greedy and rows.penalties is None and rows.bias is None and rows.allowed is None:
        return _clean(logits).argmax(dim=1)  # argmax documents that the first of equal maxima is returned
    return decision_scores(logits, rows).argmax(dim=1)


def decision_scores(logits: Tensor, rows: SamplingRows) -> Tensor:
    """What `sample` takes the maximum of: the processed logits, plus the noise of rows that are not greedy. [L, V]."""
    scores = process_logits(logits, rows)
    if not rows.all_greedy:
        noise = gumbel_noise(rows.seed, rows.position, logits.shape[1])
        scores += noise.masked_fill_((rows.temperature == 0)[:, None], 0.0)
    return scores


def process_logits(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Logits whose softmax a row is drawn from. [L, V] float32 -> a new [L, V] float32, excluded tokens -inf.

    Order: what a grammar forbids; logit bias and forbidden tokens; repetition, frequency, presence penalty;
    temperature; top-k; top-p among the tokens that top-k left; min-p. Bias and penalties come first as in vLLM's
    sampler, the rest follows the order of Hugging Face's `generate`. (vLLM applies min-p before top-k; the two differ
    only when top-p is set as well.)
    Rows with temperature 0 stop after the penalties.
    """
    scores = _clean(logits)
    if rows.allowed is not None:
        scores.masked_fill_(~rows.allowed, -torch.inf)
    if rows.bias is not None:
        _add_bias(scores, rows.bias)
    if rows.penalties is not None:
        _penalize(scores, rows.penalties)
    if rows.all_greedy:
        return scores
    greedy = rows.temperature == 0  # [L]
    divisor = rows.temperature.clamp(min=MIN_TEMPERATURE).masked_fill(greedy, 1.0)
    scores /= divisor[:, None]
    scores.clamp_(max=LARGEST)  # an infinity here would become NaN in the softmax of top-p
    if scores.device.type != "cpu":
        _truncate_on_device(scores, rows, greedy)
        return scores
    if rows.top_k is not None:
        _keep_top_k(scores, rows.top_k.masked_fill(greedy, 0))
    if rows.top_p is not None:
        _keep_top_p(scores, rows.top_p.masked_fill(greedy, 1.0))
    if rows.min_p is not None:
        _keep_min_p(scores, rows.min_p.masked_fill(greedy, 0.0))
    return scores


def _truncate_on_device(scores: Tensor, rows: SamplingRows, greedy: Tensor) -> None:
    top_k = None if rows.top_k is None else rows.top_k.masked_fill(greedy, 0)
    top_p = None if rows.top_p is None else rows.top_p.masked_fill(greedy, 1.0)
    min_p = None if rows.min_p is None else rows.min_p.masked_fill(greedy, 0.0)
    if not (top_k is top_p is min_p is None):
        truncate(scores, top_k, top_p, min_p)


def gumbel_noise(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, a pure function of (seed, position, token id). [L] int64 twice -> [L, V] float32.

    Always finite (about -3.6 to 36.7), with 52 bits of resolution. A prefix of a larger vocabulary's noise is the
    smaller vocabulary's noise.
    """
    row_key = _mix64(_mix64(seed ^ GUMBEL_STREAM) + position)  # [L]
    token_key = _mix64(torch.arange(1, vocab_size + 1, device=seed.device))  # [V]
    bits = _mix64(row_key[:, None] ^ token_key)  # [L, V]
    bits >>= 12
    bits &= (1 << 52) - 1
    # Half a step away from both ends: neither 0 nor 1 can occur, and n + 0.5 is exact in float64.
    uniform = bits.double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_().float()


def derive_seed(seed: int, choice: int) -> int:
    """Seed of one of n choices of a request, 0 to 2^63 - 1. Choice 0 keeps the request's own seed."""
    if choice == 0:
        return seed
    key = _mix64(_mix64(torch.tensor([seed ^ CHOICE_STREAM])) + choice)
    return int(key) & ((1 << 63) - 1)


def token_logprobs(logits: Tensor, token_ids: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of given tokens and of the `top_n` likeliest (0 to V) per row.

    logits [L, V] float32, token_ids [L] int64 -> logprob [L] float32, rank [L] int64 (1 + number of strictly likelier
    tokens), top_ids [L, top_n] int64, top_logprobs [L, top_n] float32, the likeliest first, equal ones by ascending
    id. NaN counts as -inf; in a row without any possible token all log-probabilities are -inf.
    """
    logprobs = _clean(logits).log_softmax(dim=1).nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
    chosen = logprobs.gather(1, token_ids[:, None])  # [L, 1]
    rank = 1 + (logprobs > chosen).sum(dim=1)
    top_ids = _likeliest(logprobs, top_n)
    return chosen[:, 0], rank, top_ids, logprobs.gather(1, top_ids)


def _mix64(value: Tensor) -> Tensor:
    """A bijection of 64-bit integers in which every input bit flips each output bit with probability one half.

    The shape and constants are David Stafford's variant 13 of the MurmurHash3 finalizer. int64 wraps around on
    overflow; `>>` copies the sign bit, hence the masks.
    """
    value = value ^ ((value >> 30) & ((1 << 34) - 1))
    value *= 0xBF58476D1CE4E5B9 - (1 << 64)  # as int64
    shifted = value >> 27
    value ^= shifted.bitwise_and_((1 << 37) - 1)
    value *= 0x94D049BB133111EB - (1 << 64)  # as int64
    shifted = value >> 31
    value ^= shifted.bitwise_and_((1 << 33) - 1)
    return value


def _clean(logits: Tensor) -> Tensor:
    """A copy with NaN as -inf and +inf as the largest finite number."""
    return logits.float().nan_to_num(nan=-torch.inf, posinf=LARGEST, neginf=-torch.inf)


def _add_bias(scores: Tensor, bias: TokenValues) -> None:
    """Add each value to its (row, token), in place; several values of one token add up."""
    scores.index_put_((bias.rows, bias.token_ids), bias.values, accumulate=True)


def _penalize(scores: Tensor, penalties: Penalties) -> None:
    """Apply the penalties to their rows of scores [L, V], in place.

    Repetition: positive logits of tokens in prompt or output are divided, others multiplied. Frequency and presence:
    subtracted per occurrence, and once, for tokens in the output.
    """
    vocab_size = scores.shape[1]
    column = torch.arange(penalties.tokens.shape[1], device=scores.device)
    counted = (column < penalties.length[:, None]) & (penalties.tokens >= 0)  # [P, W]
    cells = torch.where(counted, penalties.tokens, vocab_size).long()  # one column more takes what does not count
    counts = scores.new_zeros(len(penalties.rows), vocab_size + 1)  # [P, V + 1] occurrences in the output
    seen = torch.zeros_like(counts, dtype=torch.bool).scatter_(1, cells, True)[:, :vocab_size]
    counts = counts.scatter_add_(1, cells, (column >= penalties.num_prompt[:, None]).to(counts.dtype))[:, :vocab_size]

    row_scores = scores[penalties.rows]  # [P, V]
    repetition = penalties.repetition[:, None]
    repeated = torch.where(row_scores > 0, row_scores / repetition, row_scores * repetition)
    row_scores = torch.where(seen, repeated, row_scores)
    row_scores -= penalties.frequency[:, None] * counts
    row_scores -= penalties.presence[:, None] * (counts > 0)
    scores[penalties.rows] = row_scores


def _keep_top_k(scores: Tensor, top_k: Tensor) -> None:
    """Mask all but the k likeliest tokens, in place; top_k [L] int64, below 1: off. Exactly k are kept.

    Reads the largest k back to the host.
    """
    vocab_size = scores.shape[1]
    widest = min(int(top_k.max()), vocab_size) if len(top_k) else 0
    if widest < 1:
        return
    order = _likeliest(scores, widest)  # [L, W]
    kept = torch.arange(widest, device=scores.device) < top_k[:, None]
    _mask_others(scores, order, kept, off=top_k < 1)


def _keep_top_p(scores: Tensor, top_p: Tensor) -> None:
    """Mask all but the fewest likeliest tokens whose mass reaches p, in place; top_p [L] float32, 1: off.

    At least one token is kept. Reads one flag per width tried back to the host.
    """
    vocab_size = scores.shape[1]
    off = top_p >= 1
    probs = scores.softmax(dim=1)
    width = min(FIRST_WIDTH, vocab_size)
    while True:
        order = _likeliest(scores, width)  # [L, W]
        mass = probs.gather(1, order).cumsum(dim=1)
        if width == vocab_size or bool((off | (mass[:, -1] >= top_p)).all()):
            break
        width = min(8 * width, vocab_size)
    kept = torch.ones_like(mass, dtype=torch.bool)
    kept[:, 1:] = mass[:, :-1] < top_p[:, None]
    _mask_others(scores, order, kept, off)


def _keep_min_p(scores: Tensor, min_p: Tensor) -> None:
    """Mask tokens less likely than min_p times the likeliest, in place; min_p [L] float32, 0: off.

    Compared as logits, so that no rounding of a softmax decides and 1 keeps the likeliest tokens only.
    """
    threshold = scores.amax(dim=1) + min_p.log()  # [L], -inf when off
    scores.masked_fill_(scores < threshold[:, None], -torch.inf)


def _mask_others(scores: Tensor, order: Tensor, kept: Tensor, off: Tensor) -> None:
    """Mask, in place, every token that is not among the kept entries of order [L, W]; rows that are off keep all."""
    allowed = off[:, None].expand(scores.shape).clone()  # [L, V] bool
    allowed.scatter_(1, order, kept | off[:, None])
    scores.masked_fill_(allowed.logical_not_(), -torch.inf)


def _likeliest(scores: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest values of each row, largest first, equal values by ascending id. -> [L, count] int64.

    No NaN. torch.topk leaves the order of equal values open, so the id goes into the lower half of an int64 key.
    """
    vocab_size = scores.shape[1]
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0: equal values must have equal bits
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    descending_id = torch.arange(vocab_size - 1, -1, -1, device=scores.device)
    keys = (ordered.long() << 32) | descending_id  # [L, V], all different
    best = keys.topk(count, dim=1).values
    return vocab_size - 1 - (best & 0xFFFFFFFF)
