"""Which tokens end a text."""

from __future__ import annotations

from transformers import GenerationConfig, PreTrainedTokenizerBase

__all__ = ["base_end_ids", "end_ids"]


def end_ids(config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that end a text, by a base's generation config and its tokenizer.

    Raises:
        ValueError: neither names one.
    """
    configured = None if config is None else config.eos_token_id
    ids = [configured] if isinstance(configured, int) else list(configured or [])
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise ValueError(
            "neither the model's generation config nor the tokenizer names a token that ends a "
            "text; set tokenizer.eos_token"
        )
    return frozenset(ids)


def base_end_ids(
    base: str, revision: str | None, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """The same for a base that is not loaded here, by its folder or Hub id."""
    try:
        config = GenerationConfig.from_pretrained(base, revision=revision or "main")
    except OSError:  # a base may come without one
        config = None
    return end_ids(config, tokenizer)
