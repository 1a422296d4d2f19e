"""The public API: at most twelve names, each with its use, and light to import."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import ospruner

LIGHT = """
import contextlib, io, sys
import ospruner, ospruner.demo
assert ospruner.demo.REASONER.joinpath("config.json").is_file()
heavy = {"torch", "transformers", "datasets", "numpy", "huggingface_hub"} & set(sys.modules)
assert not heavy, heavy
import ospruner.durable, ospruner.optional, ospruner.provenance, ospruner.cli
import ospruner.train, ospruner.eval
for flag, words in (("--help", "label"), ("--version", "0.1.0")):
    sys.argv[1:] = [flag]
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        ospruner.cli.main()
    assert words in said.getvalue()
assert not {"torch", "transformers", "datasets"} & set(sys.modules)
"""


def test_importing_is_light() -> None:
    """A package's `__init__` loads nothing, nor do `ospruner --help` and `--version`."""
    command = [sys.executable, "-c", LIGHT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ospruner.__all__)
def test_each_public_name_is_there_and_shows_its_use(name: str) -> None:
    found = getattr(ospruner, name)
    assert re.search(r"ospruner\.|\.from_pretrained\(|stop_policy=", found.__doc__ or ""), name


def test_there_are_few_and_they_are_typed(repo_dir: Path) -> None:
    assert len(ospruner.__all__) <= 12
    assert dir(ospruner) == ospruner.__all__
    text = (repo_dir / "ospruner" / "__init__.py").read_text("utf-8")
    typed = text[text.index("if TYPE_CHECKING") : text.index("__all__")]
    assert all(re.search(rf"\b{name}\b", typed) for name in ospruner.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ospruner.nothing
