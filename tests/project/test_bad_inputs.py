"""Bad inputs on the command line: each ends with a clear error, never with a trace.

`bad_inputs.txt` holds a case a line: the command, its exit status, and the words that matter. What
stands in braces is made below.
"""

import gzip
import json
import shlex
import shutil
import sys
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
from ..conftest import Fuzzed

CASES = Path(__file__).with_name("bad_inputs.txt").read_text("utf-8").splitlines()
GOOD = {"id": "a", "problem": "What is 1 + 1?", "answer": "2"}
LINE = json.dumps(GOOD)
ROWS = {
    "good": LINE,
    "nan": '{"problem": "p", "answer": NaN}',
    "infinite": '{"problem": "p", "answer": -Infinity}',
    "too_large": '{"problem": "p", "answer": 1e999}',
    "null": '{"problem": "p", "answer": null}',
    "list_answer": '{"problem": "p", "answer": ["2"]}',
    "bool": '{"problem": "p", "answer": true}',
    "no_answer": '{"problem": "p"}',
    "empty_answer": '{"problem": "p", "answer": "  "}',
    "no_problem": '{"answer": "2"}',
    "number_problem": '{"problem": NaN, "answer": "2"}',
    "twice": LINE + "\n" + LINE,
    "id_nan": '{"id": NaN, "problem": "p", "answer": "2"}',
    "id_list": '{"id": [1], "problem": "p", "answer": "2"}',
    "not_json": LINE + "\n{",
    "array": "[1, 2]",
    "empty": "",
    "blank": "\n\n",
    "long": json.dumps(GOOD | {"problem": "What is 1 + 1? " * 300}),
    "no_reasoning": LINE,
    "number_reasoning": json.dumps(GOOD | {"reasoning": 3}),
}
FILES = {
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
    "syntax.py": b"def (",
    "raises.py": b"1 / 0",
    "none.py": b"x = 1",
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
    for name, text in ROWS.items():
        (folder / f"{name}.jsonl").write_text(text + "\n" if text else "")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    nothing = pa.array([], pa.string())
    pq.write_table(pa.table({"problem": nothing, "answer": nothing}), folder / "none.parquet")
    for empty in ("nothing", "folder.jsonl"):
        (folder / empty).mkdir()
    copies = [(f"policy_{name}", policy, change) for name, change in POLICIES.items()]
    copies += [
        ("labels_cut", labels, put(MANIFEST, b"{")),
        ("labels_list", labels, put(MANIFEST, b"[]")),
        ("base_no_tokenizer", REASONER, drop("tokenizer.json")),
        ("base_no_weights", REASONER, drop("model.safetensors")),
    ]
    for copy, source, change in copies:
        shutil.copytree(source, folder / copy)
        change(folder / copy)
    return {
        "f": folder,
        "base": REASONER,
        "labels": labels,
        "policy": policy,
        "gone": folder / "gone",
        "file": folder / "text.txt",
    }


@pytest.mark.parametrize("case", CASES)
def test_a_bad_input_is_refused_in_clear_words(
    case: str,
    places: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fuzzed: Fuzzed,
) -> None:
    command, _, expected = case.partition(" => ")
    status, _, words = expected.partition(" ")
    names = {"out": tmp_path / "out", **places}
    monkeypatch.setenv("COLUMNS", "600")
    monkeypatch.setenv("TERMINAL_WIDTH", "600")
    argv = [part.format(**names) for part in shlex.split(command)]
    monkeypatch.setattr(sys, "argv", ["ospruner", *argv])
    with pytest.raises(SystemExit) as ended:
        ospruner.cli.main()
    printed = capsys.readouterr()
    assert str(ended.value.code) == status, printed.err
    assert words.format(**names) in " ".join(printed.err.split())
    assert "Traceback" not in printed.err + printed.out
    fuzzed("bad inputs on the command line", cases=1, refused_by_name=1)
