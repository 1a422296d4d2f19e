"""Generate gives what it gave before the uploaded files were rewritten: see `goldens`."""

from __future__ import annotations

import json

import pytest
from transformers import PreTrainedTokenizerFast

from .goldens import GOLDENS, Case, cases, run

FOUND = json.loads(GOLDENS.read_text("utf-8"))


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_tokens_records_and_errors(case: Case, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    wanted, found = FOUND[case.name], run(case, tiny_tokenizer)
    assert found.get("tokens") == wanted.get("tokens")
    assert found.get("error") == wanted.get("error")
    for one, other in zip(found.get("records", []), wanted.get("records", []), strict=True):
        for name in ("probabilities", "prices"):
            measured = pytest.approx(other.pop(name), rel=1e-3, abs=2e-4, nan_ok=True)
            assert one.pop(name) == measured
        assert one == other
