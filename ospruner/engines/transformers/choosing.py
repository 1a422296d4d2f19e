"""How tokens are chosen.

Draws are counter-based, and a row's tokens do not depend on its batch: a batch moves the logits by
a few roundings, so a choice that roundings could turn is made again from the row run alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from ospruner.bases import input_device
from ospruner.logits import greedy

from ..interface import SamplingSettings, TokenCount

_FEW = 64

_ROUNDINGS = 128
"""Machine epsilons of the largest logit by which a batch may move a logit; 16 is the most seen."""


def batch_noise(model: PreTrainedModel) -> float:
    """How far a row's logits may move with its batch, relative to the largest; 0 if unbounded.

    In half precision nearly every choice could turn: there it is left to the batch. A base in
    float64 still rounds some of what it computes to float32 (norms, recurrent states).
    """
    return 0.0 if _coarse(model) else _ROUNDINGS * torch.finfo(torch.float32).eps


def batch_effects(model: PreTrainedModel) -> str | None:
    """Why rows may get other tokens in another batch; None where they do not."""
    return _coarse(model) or unsteady(model)


def _coarse(model: PreTrainedModel) -> str | None:
    """What rounds more coarsely than float32; None where nothing does."""
    if model.dtype not in (torch.float32, torch.float64):
        name = str(model.dtype).removeprefix("torch.")
        return f"the base runs in {name}, which rounds differently in other batches"
    if input_device(model).type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return "the base runs in TF32, which rounds differently in other batches"
    return None


def unsteady(model: PreTrainedModel) -> str | None:
    """What lets a batch's roundings grow beyond `batch_noise`, even in float32; None if nothing.

    A rounding that turns a router's choice gives a token another expert. In recurrent states
    roundings gather over the text (up to 1,400 machine epsilons after 200 tokens were seen); those
    of short convolutions hold a few tokens only.
    """
    text = model.config.get_text_config()
    if any(name.rsplit(".", 1)[-1] == "experts" for name, _ in model.named_modules()):
        return (
            f"the base ({text.model_type}) routes tokens to experts, and a batch's roundings can "
            "choose others"
        )
    recurrent = any(
        isinstance(layer, LinearAttentionLayer) for layer in DynamicCache(config=text).layers
    )
    if recurrent and "conv" not in (vars(text).get("layer_types") or ()):
        return f"the base ({text.model_type}) has recurrent states, in which roundings gather"
    return None


@torch.inference_mode()
def run_alone(model: PreTrainedModel, token_ids: Sequence[int], count: TokenCount) -> torch.Tensor:
    """The logits (1, V) after a text that runs by itself: they depend on nothing but the text."""
    count.computed += len(token_ids)
    ids = torch.tensor([list(token_ids)], device=input_device(model))
    return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]


def greedy_alone(
    model: PreTrainedModel, token_ids: Sequence[int], count: TokenCount
) -> tuple[int, float]:
    """The most likely token after a text that runs by itself, and its log-probability."""
    token, logprob = greedy(run_alone(model, token_ids, count))
    return int(token), float(logprob)


def option_scores(
    model: PreTrainedModel,
    logits: torch.Tensor,
    options: Sequence[int],
    token_ids: Sequence[int],
    noise: float,
    count: TokenCount,
) -> list[float]:
    """The logits of options after a text; of the text run alone where noise could turn the best.

    Args:
        model: runs the text alone.
        logits: (V,), of a batch.
        options: token ids.
        token_ids: the text.
        noise: of the logits, relative to the largest; see `batch_noise`.
        count: where tokens are counted.
    """
    scores = logits[list(options)].float()
    best = scores.topk(2).values
    if noise and best[0] - best[1] < 2 * noise * _largest(logits):
        scores = run_alone(model, token_ids, count)[0, list(options)].float()
    found: list[float] = scores.tolist()
    return found


def is_close(logits: torch.Tensor, noise: float) -> torch.Tensor:
    """Whether a batch's noise could turn the most likely token of logits (..., V): (...)."""
    if not noise:
        return torch.zeros(logits.shape[:-1], dtype=torch.bool, device=logits.device)
    best = logits.topk(2, dim=-1).values
    return best[..., 0] - best[..., 1] < 2 * noise * _largest(logits)


def choose(
    logits: torch.Tensor, draws: torch.Tensor, settings: SamplingSettings, noise: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples one token a row by inverting the CDF of the warped distribution.

    Temperature, then top-k, then top-p, as transformers orders them; the nucleus is the smallest
    set of most likely tokens whose mass reaches `top_p`.

    Args:
        logits: (B, V).
        draws: uniform in [0, 1), (B,).
        settings: temperature, top_k, top_p.
        noise: of the logits, relative to the largest; see `batch_noise`.

    Returns:
        Token ids (B,), and whether the noise could turn each of them (B,).
    """
    if settings.temperature == 0:
        return logits.argmax(-1), is_close(logits, noise)
    scaled = logits.float() / settings.temperature
    largest = _largest(scaled) if noise else scaled.new_zeros(len(scaled))
    error = noise * largest[:, None]  # (B, 1), of logs
    probabilities = torch.softmax(scaled, dim=-1)  # (B, V)
    vocabulary = probabilities.shape[-1]
    if settings.top_k == 0 and settings.top_p == 1:
        index, close = _invert(probabilities, draws, error)
        return index[:, 0], close
    kept = min(settings.top_k or _FEW, vocabulary)
    values, ids = probabilities.topk(min(kept + 1, vocabulary), dim=-1)  # descending
    ranked = values  # with the first that is not kept: it may be as likely as the last that is
    values = values[:, :kept]
    if settings.top_k:
        values = values / values.sum(-1, keepdim=True)
    elif kept < vocabulary and bool((values.sum(-1) < settings.top_p + error[:, 0]).any()):
        values, ids = probabilities.sort(dim=-1, descending=True)
        ranked = values
    before = values.cumsum(-1) - values
    inside = values.masked_fill(before >= settings.top_p, 0.0)
    if not noise:
        index, close = _invert(inside, draws, error)
        return ids.gather(-1, index)[:, 0], close
    # Tokens at the nucleus' edge may fall in or out, and move all shares by theirs.
    edge = ((before - settings.top_p).abs() < _moved(before, error)) & (settings.top_p < 1)
    index, close = _invert(inside, draws, error, values.masked_fill(~edge, 0.0).sum(-1))
    logs = torch.nn.functional.pad(ranked.log(), (1, 1), value=torch.inf)
    around = [logs.gather(-1, index + place) for place in range(3)]  # the chosen's neighbours
    tied = torch.minimum(*((log - around[1]).abs() for log in around[::2])) < 2 * error
    return ids.gather(-1, index)[:, 0], close | tied[:, 0]


def _largest(logits: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of logits (..., V): (...)."""
    low, high = logits.aminmax(dim=-1)
    return torch.maximum(-low, high)


def _moved(shares: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """How far shares (B, V) of a distribution move where logs move by up to `error` (B, 1).

    Moving all logs inside the share s up and all others down multiplies its odds s / (1 - s) by
    exp(2 error): s moves by s (1 - s) (exp(2 error) - 1) at most. The shares themselves are
    rounded, too.
    """
    return shares * (1 - shares) * torch.expm1(2 * error) + 8 * torch.finfo(torch.float32).eps


def _invert(
    weights: torch.Tensor,
    draws: torch.Tensor,
    error: torch.Tensor,
    beside: torch.Tensor | float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the running share of the weights (B, V) passes the draw.

    Args:
        weights: of the tokens.
        draws: uniform in [0, 1), (B,).
        error: of the weights' logs, (B, 1).
        beside: weight that may also join or leave, (B,).

    Returns:
        The index (B, 1), and whether the error could turn it (B,).
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = draws.to(cumulative.device)[:, None] * total
    index = torch.searchsorted(cumulative, target, right=True)
    last = (weights > 0).int().cumsum(-1).argmax(-1, keepdim=True)  # the last index with weight
    index = torch.minimum(index, last)
    # Only the shares at both ends of the chosen token's can pass the draw first.
    ends = torch.cat([index - 1, index], dim=-1).clamp(min=0)  # (B, 2)
    shares = cumulative.gather(-1, ends) / total
    margin = (shares - target / total).abs() - _moved(shares, error)
    turned = margin < torch.as_tensor(beside)[..., None] / total
    return index, turned.any(-1) & (error[:, 0] > 0)
