"""Formats made by hand, of tokens that no tokenizer has."""

from collections.abc import Sequence
from typing import Any

from modeling_ospruner.formats_ospruner import Marker, ReasoningFormat, TokenFormat
from ospruner.formats import DEEPSEEK_R1


def made_format(
    kinds: bytes, literals: ReasoningFormat = DEEPSEEK_R1, **fields: Any
) -> TokenFormat:
    """A format of nothing but the kinds of its tokens, and what is given."""
    empty: dict[str, Any] = dict.fromkeys(("closing_ids", "box_prefix_ids", "eos_ids"), ())
    empty |= {"think_end_id": -1, "added_ids": frozenset(), "texts": ()}
    return TokenFormat(format=literals, kinds=kinds, **(empty | fields))


def made_marker(literal: str, texts: Sequence[str]) -> Marker:
    """A marker of tokens with these texts."""
    return Marker(literal, list(texts))


def boundaries(fmt: TokenFormat, ids: Sequence[int]) -> list[bool]:
    """For each thinking token, whether it ends a step."""
    state = fmt.boundary_state()
    return [state.push(i) for i in ids]
