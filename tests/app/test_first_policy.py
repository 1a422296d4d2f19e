"""`ospruner app` without an argument: a policy is trained, once."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from ospruner.app.page import open_source
from ospruner.demo.first_policy import first_policy, run_app


def test_a_policy_is_trained_at_the_first_start_alone(tmp_path: Path) -> None:
    printed = io.StringIO()
    console = Console(file=printed, width=200)
    folder = first_policy(tmp_path, console, {"train": 40, "validation": 8})
    assert "First start" in printed.getvalue()
    weights = folder / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert first_policy(tmp_path, console) == folder
    assert weights.stat().st_mtime_ns == before
    assert open_source(str(folder)).positions == 1024


def test_without_gradio_nothing_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(ValueError, match=r"pip install 'ospruner\[app\]'"):
        run_app(None, None, None, Console(file=io.StringIO()))
    assert not any(tmp_path.iterdir())


def test_a_revision_without_a_policy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gradio", reason="Gradio is not installed: pip install 'ospruner[app]'")
    with pytest.raises(ValueError, match="name the policy, too"):
        run_app(None, None, "main", Console(file=io.StringIO()))
