"""Labels of models whose thinking ends with several tokens, and the same in generate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.eval.schema import LabelSettings
from ospruner.formats import follow
from ospruner.rules import Budget
from ospruner.rules.live import generate_with_rule
from ospruner.train.labels.making import Labeller, label_problems

SETTINGS = LabelSettings(
    base_model="toy", temperature=0.0, max_new_tokens=300, max_answer_tokens=12
)


WORDS: dict[str, dict[str, Any]] = {
    "marker": {"think_end": "That gives", "closing": "That gives "},
    "phrase": {
        **{"think_end": "", "think_start": "", "answer_phrase": "That gives"},
        "closing": "So.\n\nThat gives ",
    },
}


@pytest.fixture(scope="module", params=WORDS)
def fmt(request: pytest.FixtureRequest, reasoner: Reasoner) -> TokenFormat:
    """The reasoner's own last words, taken for an end marker or for those of its answer."""
    form = replace(reasoner.token_format.format, name="last", **WORDS[request.param])
    return TokenFormat.compile(form, reasoner.tokenizer)


def test_labels_and_generate_end_at_the_same_token(
    reasoner: Reasoner, fmt: TokenFormat, tmp_path: Path
) -> None:
    problems = draw_split("test", 4, 0)
    labeller = Labeller(reasoner.tokenizer, fmt, SETTINGS)
    rows = list(label_problems(problems, reasoner.engine, labeller, tmp_path / "l"))
    natural = 0
    for row in rows:
        prompt = row["prompt_ids"]
        ids = torch.tensor([prompt])
        output, (record,) = generate_with_rule(
            reasoner.model,
            reasoner.tokenizer,
            Budget(10_000),
            ids,
            fmt,
            max_new_tokens=SETTINGS.max_new_tokens,
            do_sample=False,
        )
        written = output[0, len(prompt) :].tolist()
        trace = row["trace_ids"]
        assert written[: len(trace)] == trace
        assert "That gives" not in reasoner.tokenizer.decode(trace)
        assert row["step_ends"] == fmt.step_ends(trace)
        if row["ended"] == "cap":
            continue
        assert (record.reason, record.thinking_tokens) == ("natural", len(trace))
        text = str(reasoner.tokenizer.decode(written))
        if "That gives" not in text:
            continue
        natural += 1
        assert (
            record.step_ends[: len(row["step_ends"])] == row["step_ends"][: len(record.step_ends)]
        )
        # The marker and what follows it are the answer's, in generate and in the labels.
        state = follow(fmt, prompt, written)
        after = len(trace) + state.end_tokens
        assert str(reasoner.tokenizer.decode(written[len(trace) : after])).endswith("That gives")
        assert str(reasoner.tokenizer.decode(written[after:])).startswith(" \\boxed{")
        assert row["natural_answer_ids"]
        assert row["natural_answer"], "its own box stands after the marker"
    assert natural >= 2
