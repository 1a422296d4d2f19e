"""Counter-based draws: the same numbers in any batch and engine."""

from __future__ import annotations

_MASK64 = (1 << 64) - 1


def mix64(value: int) -> int:
    """The finaliser of splitmix64 (Steele et al., 2014): a 64-bit integer from any integer."""
    z = (value + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def uniform(seed: int, sample_index: int, step: int) -> float:
    """The draw in [0, 1) that decides one step of one sample: a row stops if it is below pi.

    It depends on nothing else, so that a row's decisions are the same in any batch and engine.

    Args:
        seed: the policy's seed.
        sample_index: the row's index among all rows of the run.
        step: the step's index, from 0.
    """
    return (
        mix64(mix64(mix64(seed) ^ (sample_index & _MASK64)) ^ (step & _MASK64)) >> 11
    ) * 2.0**-53
