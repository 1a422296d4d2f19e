"""Bad inputs on the command line: each ends with a clear error, never with a trace.

`bad_inputs.txt` holds a command a line, its exit status, and the words that matter. What stands in
braces is made below. A line may hold several cases, behind "for": `{v}` is each of these, and
`{name}` and `{value}` are what stands before and behind its "=". "rows" is `ospruner label` on a
file of what follows.
"""

import gzip
import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

import ospruner.cli
from ospruner.demo import REASONER
from ospruner.demo.shipped import FORMAT, Reasoner, draw_split
from ospruner.provenance import provenance
from ospruner.train.labels.folder import MANIFEST
from ospruner.train.untrained import untrained

from ..broken_tensors import drop, edit, pickle_only, put

GOOD = {"id": "a", "problem": "What is 1 + 1?", "answer": "2"}
LINE = json.dumps(GOOD)
FILES = {
    "good.jsonl": LINE.encode(),
    "long.jsonl": json.dumps(GOOD | {"problem": "What is 1 + 1? " * 300}).encode(),
    "reasoning.jsonl": json.dumps(GOOD | {"reasoning": 3}).encode(),
    "latin.jsonl": LINE.encode() + b'\n{"problem": "caf\xe9", "answer": "2"}\n',
    "utf16.jsonl": LINE.encode("utf-16"),
    "cut.jsonl.gz": gzip.compress(LINE.encode() * 99)[:-20],
    "plain.jsonl.gz": LINE.encode(),
    "text.txt": LINE.encode(),
    "broken.parquet": b"PAR1 nothing PAR1",
    "format_list.json": b"[1]",
    "format_cut.json": b"{",
    "format_latin.json": b'{"name": "\xe9"}',
    "format_lacks.json": b'{"name": "x"}',
}


POLICIES = {
    "no_tokenizer": drop("tokenizer.json"),
    "cut_tokenizer": put("tokenizer.json", b"{"),
    "layers": edit("text_config", num_hidden_layers=4),
    "layers_both": edit("text_config", num_hidden_layers=4, layer_types=["full_attention"] * 4),
    "hidden": edit("text_config", hidden_size=96),
    "no_base": edit(base_model_name_or_path="/nowhere/base"),
    "no_text": edit(text_config=None),
    "type": edit(num_policy_layers="2"),
    "nan": edit(price=float("nan")),
    "list": put("config.json", b"[]"),
    "cut_config": put("config.json", b"{"),
    "latin_config": put("config.json", b'{"model_type": "\xe9"}'),
    "no_weights": drop("model.safetensors"),
    "cut_weights": put("model.safetensors", b"\x00" * 1000),
    "pickled": pickle_only,
    "other_record": put("provenance.json", b'{"seed": 1}'),
    "cut_record": put("provenance.json", b"{"),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, reasoner: Reasoner) -> dict[str, Path]:
    """Files and folders to be refused, and good labels and a good policy."""
    folder = tmp_path_factory.mktemp("bad")
    labels, policy = folder / "labels", folder / "policy"
    reasoner.label(draw_split("train", 10, 7), labels, 7)
    fields: dict[str, Any] = {"tuning": "layers", "reasoning_format": FORMAT}
    untrained(reasoner.model, reasoner.tokenizer, **fields).save_pretrained(policy)
    provenance(policy, seed=0)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    nothing = pa.array([], pa.string())
    pq.write_table(pa.table({"problem": nothing, "answer": nothing}), folder / "none.parquet")
    for empty in ("nothing", "folder.jsonl"):
        (folder / empty).mkdir()
    for kind, source, changes in (
        ("policy", policy, POLICIES),
        ("labels", labels, {"cut": put(MANIFEST, b"{"), "list": put(MANIFEST, b"[]")}),
        ("base", REASONER, {name: POLICIES[name] for name in ("no_tokenizer", "no_weights")}),
    ):
        for name, change in changes.items():
            change(Path(shutil.copytree(source, folder / f"{kind}_{name}")))
    good = {"base": REASONER, "labels": labels, "policy": policy}
    return {**good, "f": folder, "gone": folder / "gone", "file": folder / "text.txt"}


def cases() -> Iterator[str]:
    """Every case in words of its own."""
    for line in Path(__file__).with_name("bad_inputs.txt").read_text("utf-8").splitlines():
        command, _, expected = line.partition(" => ")
        command, _, given = command.partition(" for ")
        for one in given.split(";"):
            name, _, value = one.partition("=")
            case = f"{command} => {expected}"
            for brace, text in (("{v}", one), ("{name}", name), ("{value}", value)):
                case = case.replace(brace, text)
            yield case


@pytest.mark.parametrize("case", [*cases()])
def test_a_bad_input_is_refused_in_clear_words(
    case: str,
    places: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, _, expected = case.partition(" => ")
    status, _, words = expected.partition(" ")
    rows = tmp_path / "rows.jsonl"
    names = {"out": tmp_path / "out", "rows": rows, "line": LINE, **places}
    if command.startswith("rows "):
        text = command.removeprefix("rows ").format(**names)
        rows.write_text(text.replace("\\n", "\n"))
        command = "label --base {base} --dataset {rows} --out {out}"
    monkeypatch.setenv("COLUMNS", "600")
    monkeypatch.setenv("TERMINAL_WIDTH", "600")
    argv = [part.format(**names) for part in shlex.split(command)]
    monkeypatch.setattr(sys, "argv", ["ospruner", *argv])
    with pytest.raises(SystemExit, match=f"^{status}$"):
        ospruner.cli.main()
    printed = capsys.readouterr()
    assert words.format(**names) in " ".join(printed.err.split())
    assert "Traceback" not in printed.err + printed.out
