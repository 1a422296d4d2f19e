"""Engines that run a reasoning model: sampling traces and forking answers off them."""

from modeling_ospruner.engines.transformers.engine import TransformersEngine

from .interface import (
    ENTROPY_TOKENS,
    AnswerStop,
    Engine,
    ForkedAnswer,
    ForkRequest,
    Sampled,
    SamplingSettings,
    TokenCount,
    TokenTrie,
)

__all__ = [
    "ENTROPY_TOKENS",
    "AnswerStop",
    "Engine",
    "ForkRequest",
    "ForkedAnswer",
    "Sampled",
    "SamplingSettings",
    "TokenCount",
    "TokenTrie",
    "TransformersEngine",
]
