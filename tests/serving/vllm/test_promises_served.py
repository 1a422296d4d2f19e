"""A real server that watches what it promises, by its control group's answers."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.serving.requests import CALIBRATION_FIELDS
from ospruner.serving.saved import saved_by

from ...own_process import needs_vllm
from .plugin_replay import make_policy
from .test_server import serving

pytestmark = [pytest.mark.slow, needs_vllm]
REQUESTS = 20


def test_answers_of_the_control_group_are_compared(reasoner: Reasoner, tmp_path: Path) -> None:
    """A policy that stops at the first step: where it would have, the answer mostly differs."""
    folder = tmp_path / "policy"
    make_policy(reasoner, folder)
    file = folder / "config.json"
    promise: dict[str, Any] = dict.fromkeys(CALIBRATION_FIELDS, 0) | {"mode": "threshold"}
    bins = {"edges": [1.0], "shares": [0.5, 0.5]}
    promise |= {"threshold": 0.0, "price": None, "max_loss": 0.02, "confidence": 0.95}
    promise |= {"disagreement": 0.01, "traffic": {"thinking_tokens": bins, "first_step": bins}}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"calibrations": [promise]}))
    instruction = reasoner.token_format.format.user_instruction
    with serving(folder, "--max-loss", "0.02", "--control", "0.7") as url:
        for number, one in enumerate(draw_split("test", REQUESTS, 0)):
            turn = {"role": "user", "content": f"{one.problem}\n\n{instruction}"}
            body = {"model": "toy", "messages": [turn], "max_tokens": 500, "temperature": 0}
            reply = httpx.post(
                f"{url}/v1/chat/completions", json=body | {"stream": number % 2 == 0}, timeout=300
            )
            assert '"ospruner":' in reply.text, reply.text
        pattern = r'^ospruner_control_answers_total\{.*differs="(\w+)".*\} (\S+)$'
        for _ in range(60):
            told = httpx.get(f"{url}/metrics").text
            found = {name: float(n) for name, n in re.findall(pattern, told, re.M)}
            if sum(found.values()) >= REQUESTS / 2:
                break
            time.sleep(1)
        assert found["yes"] > sum(found.values()) / 2
        said = saved_by(url)
    assert "promise of 2 points: of " in said
    assert "3.0% are allowed" in said
    assert "DRIFTED" in said
    assert "may no longer hold" in folder.with_suffix(".log").read_text("utf-8")
