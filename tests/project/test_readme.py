"""The README's Python blocks, run as they stand but for their sizes."""

from pathlib import Path

import pytest

from ..pages import blocks

# Two hundred traces and forty passes would take minutes.
SMALL = {
    '("train", 200), ("test", 60)': '("train", 30), ("test", 16)',
    'StopConfig("policy")': 'StopConfig("policy", num_train_epochs=2)',
}


def test_the_three_programs_run_as_written(
    repo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    stop, make, compare = blocks(repo_dir / "README.md", "python")
    monkeypatch.chdir(tmp_path)
    exec(stop, {})
    plain, stopped = capsys.readouterr().out.split("<|im_end|>")
    assert "48+54=102. Good." in plain
    assert stopped.strip().endswith("\\boxed{16}\npolicy 36")
    assert "policy 36" in (repo_dir / "README.md").read_text("utf-8")
    for old, new in SMALL.items():
        assert old in make
        make = make.replace(old, new)
    names: dict[str, object] = {}
    exec(make, names)
    exec(compare, names)
    printed = capsys.readouterr().out
    for method in ("full trace", "OS-Pruner, one policy  price=3e-4", "fixed budget"):
        assert method in printed
    assert Path("pareto.png").is_file()
