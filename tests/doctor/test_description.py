"""What `describe` says, and what it complains of."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.doctor.description import describe, faults
from ospruner.formats import DEEPSEEK_R1, PRESETS, named

Compiled = tuple[PreTrainedTokenizerBase, TokenFormat]


def test_describe_r1(real_r1: Compiled) -> None:
    text = describe(real_r1[1], real_r1[0])
    for line in (
        "Reasoning format 'deepseek-r1'",
        "  thinking opens with  '<think>'  151648",
        "  thinking ends with   '</think>'  151649",
        "  model's turn         '<｜Assistant｜><think>\\n'  151645 151648 198",
        "  forced at a stop     '</think>\\n\\n\\\\boxed{'  151649 271 59 79075 90",
        "  ... answer='free'    '</think>\\n\\n'  151649 271",
        "  ... at its own end   '\\n\\n\\\\boxed{'  271 59 79075 90",
        "  masked in answers    '<think>'  151648",
        "  L = 11   'First, 2 + 3 = 5.\\n\\n'",
        "  L = 24   'Let me check: 5 - 3 = 2.\\n\\n'",
        "  L = 30   'So it is 5.'",
    ):
        assert line in text.splitlines(), text
    assert "565 of 151665 tokens hold a blank line: '\\n\\n'  271" in text
    assert "within \\\\boxed{}.<｜Assistant｜><think>\\n'" in text
    assert "What is wrong" not in text


def test_describe_harmony(real_harmony: Compiled) -> None:
    lines = describe(real_harmony[1], real_harmony[0]).splitlines()
    closing = "<|end|><|start|>assistant<|channel|>final<|message|>"
    ids = "200007 200006 173781 200005 17196 200008"
    for line in (
        "  thinking opens with  '<|channel|>analysis<|message|>'  200005 35644 200008",
        "  answer opens with    '<|channel|>final<|message|>'  200005 17196 200008",
        f"  forced at a stop     '{closing}\\\\boxed{{'  {ids} 59 172278 90",
        f"  ... answer='free'    '{closing}'  {ids}",
        "  masked in answers    '<|channel|>'  200005, '<|start|>'  200006, '<|message|>'  200008",
        "  L = 14   '<|channel|>analysis<|message|>First, 2 + 3 = 5.\\n\\n'",
    ):
        assert line in lines, lines


@pytest.mark.parametrize(
    ("template", "changes", "complaint"),
    [
        (None, {}, "the tokenizer has no chat template"),
        ("{{ messages[0].content }}<think></think>\n\n", {}, "already closes the thinking"),
        ("{{ messages[0].content }}", {}, "appends nothing that opens the model's turn"),
        ("", {"box_prefix": "The answer is "}, "does not leave one brace open"),
        ("", {"think_start": "</think>"}, "think_start '</think>' has no marker"),
        ("", {}, None),
    ],
)
def test_what_does_not_fit_is_told(
    tiny_tokenizer: PreTrainedTokenizerFast,
    template: str | None,
    changes: dict[str, Any],
    complaint: str | None,
) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    if template != "":
        tokenizer.chat_template = template
    chosen = dataclasses.replace(DEEPSEEK_R1, **changes)
    found = faults(TokenFormat.compile(chosen, tokenizer), tokenizer)
    text = describe(TokenFormat.compile(chosen, tokenizer), tokenizer)
    if complaint is None:
        assert found == []
        assert "What is wrong" not in text
    else:
        assert len(found) == 1
        assert complaint in found[0]
        assert f"What is wrong\n  {found[0]}" in text


def test_formats_by_name(tmp_path: Path) -> None:
    for name, preset in PRESETS.items():
        assert named(name) == preset
    custom = dataclasses.replace(DEEPSEEK_R1, name="mine", box_prefix="So \\boxed{")
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(custom.to_dict()), encoding="utf-8")
    assert named(str(path)) == custom
