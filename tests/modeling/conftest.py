"""What the model's tests share: the real tokenizers, loaded and compiled once a process."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from modeling_ospruner.reasoning_format import TokenFormat, guess

Compiled = tuple[PreTrainedTokenizerBase, TokenFormat]


def _compiled(folder: Path) -> Compiled:
    if not folder.is_dir():
        pytest.skip(f"{folder} does not exist")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer, TokenFormat.compile(guess(tokenizer), tokenizer)


@pytest.fixture(scope="session")
def real_r1(shared_dir: Path) -> Compiled:
    """R1-Distill-Qwen's tokenizer, and the format guessed from it."""
    return _compiled(shared_dir / "data" / "tokenizers" / "deepseek-r1-distill-qwen")


@pytest.fixture(scope="session")
def real_harmony(shared_dir: Path) -> Compiled:
    """GPT-OSS's tokenizer, and the format guessed from it."""
    return _compiled(shared_dir / "data" / "tokenizers" / "gpt-oss-o200k-harmony")
