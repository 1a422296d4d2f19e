"""How tokens are chosen.

Draws are counter-based, and a row's tokens do not depend on its batch: a batch moves the logits by
a few roundings, so a choice that roundings could turn is made again from the row run alone.
"""

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from ospruner.bases import input_device

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


def is_close(logits: torch.Tensor, noise: float, among: Sequence[int] = ()) -> torch.Tensor:
    """Whether noise could turn the most likely token of logits (..., V), or of some: (...)."""
    if not noise:
        return torch.zeros(logits.shape[:-1], dtype=torch.bool, device=logits.device)
    best = (logits[..., list(among)] if among else logits).topk(2, dim=-1).values
    return best[..., 0] - best[..., 1] < 2 * noise * _largest(logits)


def choose(
    logits: torch.Tensor, draws: torch.Tensor, settings: SamplingSettings, noise: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples one token a row by inverting the CDF of the warped distribution.

    Temperature, then top-k, then top-p, as transformers orders them; the nucleus is the smallest
    set of most likely tokens whose mass reaches `top_p`.

    Where logs move by up to e, the odds s / (1 - s) of a share s move by a factor of exp(2 e) at
    most. To move the draw and `top_p` by that in their place, both down or both up, finds the first
    and the last token that could be chosen.

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
    probabilities = torch.softmax(scaled, dim=-1)  # (B, V)
    vocabulary = probabilities.shape[-1]
    sides = torch.tensor([0.0, -1.0, 1.0] if noise else [0.0], dtype=torch.float64)
    sides = sides.to(logits.device)
    error = noise * _largest(scaled)[:, None]  # (B, 1), of logs
    factors = torch.exp(2 * error * sides)  # (B, 3)
    rounding = 8 * torch.finfo(torch.float32).eps * sides

    def moved(shares: torch.Tensor | float) -> torch.Tensor:
        return shares * factors / (1 + shares * (factors - 1)) + rounding

    targets, top_p = moved(draws.to(logits.device)[:, None]), moved(settings.top_p)
    top_p = top_p.masked_fill(top_p >= 1, torch.inf)
    if settings.top_k == 0 and settings.top_p == 1:
        index = _invert(probabilities, targets, top_p)
        return index[:, 0], (index != index[:, :1]).any(-1)
    kept = min(settings.top_k or _FEW, vocabulary)
    # Descending, with the first that is not kept: it may be as likely as the last that is.
    values, ids = probabilities.topk(min(kept + 1, vocabulary), dim=-1)
    weights = values[:, :kept]
    if settings.top_k:
        weights = weights / weights.sum(-1, keepdim=True)
    elif kept < vocabulary and bool((weights.sum(-1, keepdim=True) < top_p).any()):
        values, ids = probabilities.sort(dim=-1, descending=True)
        weights = values
    index = _invert(weights, targets, top_p)
    close, index = (index != index[:, :1]).any(-1), index[:, :1]
    if noise:  # its neighbours may take its place
        logs = torch.nn.functional.pad(values.log(), (1, 1), value=torch.inf)
        around = logs.gather(-1, index + torch.arange(3, device=index.device))
        close |= ((around - around[:, 1:2]).abs()[:, ::2] < 2 * error).any(-1)
    return ids.gather(-1, index)[:, 0], close


def _largest(logits: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of logits (..., V): (...)."""
    low, high = logits.aminmax(dim=-1)
    return torch.maximum(-low, high)


def _invert(weights: torch.Tensor, draws: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Where the running share of the weights (B, K) in each nucleus passes each draw: (B, n)."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    inside = torch.searchsorted(cumulative - weights, top_p).clamp(min=1)
    total = cumulative.gather(-1, inside - 1)
    index = torch.searchsorted(cumulative, draws * total, right=True)
    return torch.minimum(index, torch.searchsorted(cumulative, total))  # the last with weight
