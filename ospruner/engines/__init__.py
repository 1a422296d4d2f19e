"""Engines that run a reasoning model: sampling traces and forking answers off them."""

from .interface import (
    ENTROPY_TOKENS,
    AnswerStop,
    Engine,
    ForkedAnswer,
    ForkRequest,
    Sampled,
    SamplingSettings,
    TokenCount,
)
from .transformers.engine import TransformersEngine

__all__ = [
    "ENTROPY_TOKENS",
    "AnswerStop",
    "Engine",
    "ForkRequest",
    "ForkedAnswer",
    "Sampled",
    "SamplingSettings",
    "TokenCount",
    "TransformersEngine",
]
