"""Whole label runs by names, as the command line starts them, and traces that others made."""

import json
import shutil
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen2ForCausalLM

from modeling_ospruner.formats_ospruner import ReasoningFormat, TokenFormat
from ospruner.demo import REASONER
from ospruner.engines.opening import ENGINES, EngineOptions
from ospruner.eval.problems.problem import text_key
from ospruner.formats import QWEN3
from ospruner.train.labels import label as label_module
from ospruner.train.labels.features import FEATURES
from ospruner.train.labels.folder import read_labels, read_manifest
from ospruner.train.labels.importing import read_traces
from ospruner.train.labels.label import label
from ospruner.train.labels.labelling import Labeller
from ospruner.train.untrained import untrained

from ..conftest import TINY, command, write_rows

LIMITS: dict[str, Any] = {"max_thinking_tokens": 40, "max_answer_tokens": 5, "batch_size": 2}
LIMITS |= {"columns": "problem=q,answer=gold", "dtype": "float32", "device": "cpu"}


@pytest.fixture
def problems(tmp_path: Path) -> str:
    rows = [{"q": f"What is {n} + 4?", "gold": n + 4} for n in range(4)]
    return write_rows(tmp_path / "problems.jsonl", rows)


def test_label_command(tiny_base_dir: Path, problems: str, tmp_path: Path) -> None:
    out, numbers = tmp_path / "labels", tmp_path / "numbers.json"
    excluded = write_rows(tmp_path / "other.jsonl", [{"problem": "what is 2+4", "answer": "6"}])
    arguments = (
        f"label --base {tiny_base_dir} --dataset {problems} --out {out} --json {numbers} --seed 3 "
        f"--samples 2 --max-thinking-tokens 40 --set columns=problem=q,answer=gold "
        f"--set exclude={excluded} --set max_answer_tokens=5 --set temperature=1 --set step_stride="
    )
    assert "1 problems were dropped as overlaps" in command(*f"{arguments}2".split())
    dataset, manifest = read_labels(out), read_manifest(out)
    keys = [text_key(f"What is {n} + 4?") for n in range(4)]
    assert dataset["problem_id"] == [keys[n] for n in (0, 0, 1, 1, 3, 3)]
    settings = manifest["settings"]
    named = ("step_stride", "seed", "max_answer_tokens", "max_new_tokens")
    assert [settings[name] for name in named] == [2, 3, 5, 40]
    assert manifest["source"]["excluded"]["ids"] == [[keys[2], keys[2]]]
    assert manifest["source"]["engine"] == "transformers"
    assert json.loads(numbers.read_text())["traces"] == 6
    with pytest.raises(ValueError, match=r"other settings \(step_stride: 1 here, 2 there\)"):
        command(*f"{arguments}1".split())


def test_nothing_left_to_do_opens_no_engine(
    tiny_base_dir: Path, problems: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    real = ENGINES["transformers"]

    def counted(tokenizer: Any, options: EngineOptions) -> Any:
        opened.append(1)
        return real(tokenizer, options)

    monkeypatch.setitem(ENGINES, "transformers", counted)
    base = shutil.copytree(tiny_base_dir, tmp_path / "base")

    def run(limit: int) -> Any:
        label(str(base), problems, out=tmp_path / "labels", limit=limit, **LIMITS)
        return read_labels(tmp_path / "labels")

    # What cannot be is refused before anything is opened or written.
    with pytest.raises(TypeError, match=r"settings are \['temprature'\].* temperature"):
        label(str(base), problems, out=tmp_path / "labels", temprature=1)
    with pytest.raises(ValueError, match="gpus_per_actor is -1"):
        label(str(base), problems, out=tmp_path / "labels", gpus_per_actor=-1)
    assert not (tmp_path / "labels").exists()
    first = run(2)
    manifest = (tmp_path / "labels" / "manifest.json").read_bytes()
    assert run(2).to_list() == first.to_list()
    assert (tmp_path / "labels" / "manifest.json").read_bytes() == manifest
    assert len(opened) == 1
    assert run(3).to_list()[: len(first)] == first.to_list()
    assert len(opened) == 2
    weights = load_file(base / "model.safetensors")
    save_file({name: values + 1 for name, values in weights.items()}, base / "model.safetensors")
    with pytest.raises(ValueError, match="base_fingerprint"):
        run(3)


TRACES: list[dict[str, Any]] = [
    {"id": "a", "problem": "3 + 4?", "answer": "7", "reasoning": "So 3 + 4 = 7.\n\nDone."},
    {"id": "b", "problem": "3+4 ?", "answer": "7", "reasoning": "\nIt is 7.", "closed": False},
    {"id": "c", "problem": "1?", "answer": "1", "reasoning": "x" * 80, "response": "\\boxed{1}"},
]


def test_imported_traces_are_those_of_the_file(tiny_base_dir: Path, tmp_path: Path) -> None:
    path, out = write_rows(tmp_path / "traces.jsonl", TRACES), tmp_path / "labels"
    how = ("--max-thinking-tokens", 30, "--set", "max_answer_tokens=4")
    command("labels", "import", path, "--base", tiny_base_dir, "--out", out, *how)
    dataset = read_labels(out)
    assert dataset["problem_id"] == ["a", "a", "c"]  # one problem, whatever the ids say
    assert dataset["sample_index"] == [0, 1, 0]
    assert dataset["ended"] == ["natural", "cap", "cap"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_base_dir)
    texts = [tokenizer.decode(ids) for ids in dataset["trace_ids"]]
    assert texts[:2] == ["So 3 + 4 = 7.\n\nDone.", "It is 7."]
    assert len(dataset["trace_ids"][2]) == 30
    settings = read_manifest(out)["settings"]
    assert (settings["imported_from"], settings["samples_per_problem"]) == ("traces.jsonl", 2)
    assert read_manifest(out)["sampling_computed_tokens"] == 0
    # Without ids they are samples of their problem's text.
    rows = [{name: value for name, value in row.items() if name != "id"} for row in TRACES]
    keys = read_traces(write_rows(tmp_path / "t.jsonl", rows))
    names = [text_key(row["problem"]) for row in TRACES]
    assert names[0] == names[1]
    assert [one.place for one in keys] == list(zip(names, (0, 1, 0), strict=True))
    with pytest.raises(ValueError, match="id 'a' was used before"):
        read_traces(write_rows(tmp_path / "t.jsonl", [row | {"id": "a"} for row in TRACES]))
    with pytest.raises(ValueError, match=r"columns names the fields \['cot'\]"):
        read_traces(path, columns={"cot": ["reasoning"]})


def test_texts_become_tokens_of_thinking_alone(tiny_base_dir: Path, tmp_path: Path) -> None:
    """Opened where the prompt does not, and without control tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_base_dir)
    end = str(tokenizer.eos_token)
    odd = {"id": "d", "problem": "p", "answer": "7", "reasoning": f"One {end} 2", "response": end}
    traces = read_traces(write_rows(tmp_path / "t.jsonl", [TRACES[0], TRACES[1], odd]))
    labeller = Labeller(tokenizer, TokenFormat.compile(QWEN3, tokenizer), TINY)
    open_prompt = tokenizer.encode("<|assistant|><think>\n")
    prompts = [tokenizer.encode("<|assistant|>"), open_prompt, open_prompt]
    sampled = [
        labeller.imported(trace.given, prompt)
        for trace, prompt in zip(traces, prompts, strict=True)
        if trace.given is not None
    ]
    texts = [str(tokenizer.decode(one.trace_ids)) for one in sampled]
    assert texts[0].startswith("<think>\nSo 3 + 4")
    assert texts[1:] == ["It is 7.", f"One {end} 2"]
    assert tokenizer.eos_token_id not in [*sampled[2].trace_ids, *sampled[2].answer_ids]


def test_chunks_and_batches_do_not_change_labels(problems: str, tmp_path: Path) -> None:
    """The embedded reasoner, whose weights are stored in half precision."""

    def run(name: str, chunk: int, rows: int, dtype: str = "auto") -> list[dict[str, Any]]:
        how = LIMITS | {"max_thinking_tokens": 60, "max_answer_tokens": 8, "samples": 2}
        how |= {"batch_size": rows, "dtype": dtype, "chunk": chunk}
        label(str(REASONER), problems, out=tmp_path / name, **how)
        exact = set(FEATURES) - {"forced_logprob", "forced_entropy", "forced_answer_entropy"}
        return [{key: row[key] for key in exact} for row in read_labels(tmp_path / name)]

    whole = run("whole", 8, 32)
    assert len(whole) == 8
    assert run("chunks", 3, 2) == whole
    manifest = read_manifest(tmp_path / "chunks")
    assert (manifest["deterministic"], manifest["batch_effects"]) == (True, [])
    run("half", 8, 8, "bfloat16")
    manifest = read_manifest(tmp_path / "half")
    assert not manifest["deterministic"]
    assert "bfloat16" in manifest["batch_effects"][0]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"reasoning": "<think>\nA.\r\n \r\nB</think>\n\nSo 7."}, ("\nA.\n\nB", "\n\nSo 7.")),
        ({"reasoning": "A.\n \t\nB", "response": "7"}, ("A.\n\nB", "7")),
        ({"reasoning": "A</think>7", "response": "7"}, ("A", "7")),
        ({"reasoning": "A</think>8", "response": "7"}, "another response than the column"),
        ({"reasoning": "A</think>B</think>7"}, "of several thoughts"),
        ({"reasoning": "A <think> B"}, "of several thoughts"),
        ({"reasoning": "<think></think>7"}, "no thinking before '</think>'"),
        ({"reasoning": "A", "closed": "false"}, "closed is 'false'; it must be true or false"),
        ({"reasoning": " "}, "must be the text of a trace"),
    ],
)
def test_markers_and_paragraphs_of_imported_texts(
    row: dict[str, Any], expected: tuple[str, str] | str, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "t.jsonl", [{"id": "a", "problem": "p", "answer": "7", **row}])
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            read_traces(path, fmt=QWEN3)
    else:
        (trace,) = read_traces(path, fmt=QWEN3)
        assert trace.given is not None
        assert (trace.given.reasoning, trace.given.response) == expected


def with_template(base: Path, folder: Path, change: Callable[[str], str]) -> str:
    """A copy of a base with another chat template."""
    shutil.copytree(base, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = change(str(tokenizer.chat_template))
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_closed_templates_are_labelled(tiny_base_dir: Path, problems: str, tmp_path: Path) -> None:
    closing = "{%- if not enable_thinking %}{{- '</think>\\n\\n' }}{%- endif %}"
    base = with_template(tiny_base_dir, tmp_path / "base", lambda given: given + closing)
    out = tmp_path / "labels"
    with pytest.raises(ValueError, match="'thinking_mode'] do not occur in the chat template"):
        label(base, problems, out=out, template_arg=("thinking_mode=1",), **LIMITS)
    given = [f"--set={k}={v}" for k, v in LIMITS.items() if k != "max_thinking_tokens"]
    given += ["--max-thinking-tokens", "40", "--template-arg", "enable_thinking=true"]
    command("label", "--base", base, "--dataset", problems, "--out", out, *given)
    labels = read_labels(out)
    pinned = read_manifest(out)["settings"]["reasoning_format"]
    assert pinned["template_args"] == '{"enable_thinking": true}'
    plain = AutoTokenizer.from_pretrained(tiny_base_dir)
    assert not str(plain.decode(labels[0]["prompt_ids"])).endswith("</think>\n\n")
    own, literals = AutoTokenizer.from_pretrained(base), ReasoningFormat.from_dict(pinned)
    untrained(Qwen2ForCausalLM.from_pretrained(base), own, reasoning_format=literals)
    turns = [{"role": "user", "content": "Hi"}]
    asked, wanted = (
        one.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        for one in (own, plain)
    )
    assert asked == wanted


def test_prompts_name_the_day_on_which_a_run_began(
    tiny_base_dir: Path, problems: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dated = "{{- 'Today: ' + strftime_now('%Y-%m-%d') + '\\n' }}"
    base, out = with_template(tiny_base_dir, tmp_path / "base", dated.__add__), tmp_path / "labels"
    for day, limit in ((1, 2), (2, 4)):
        today = type("Day", (date,), {"today": classmethod(lambda cls, d=day: date(2026, 3, d))})
        monkeypatch.setattr(label_module, "date", today)
        label(base, problems, out=out, limit=limit, **LIMITS)
    tokenizer = AutoTokenizer.from_pretrained(base)
    said = {str(tokenizer.decode(ids)).partition("\n")[0] for ids in read_labels(out)["prompt_ids"]}
    assert said == {"Today: 2026-03-01"}
    manifest = json.loads((out / "manifest.json").read_text("utf-8"))
    assert manifest["settings"]["prompt_date"] == "2026-03-01"
    with monkeypatch.context() as before:  # labels of earlier versions kept no day
        before.setattr(label_module, "_prompt_date", lambda tokenizer, out: "")
        label(base, problems, out=tmp_path / "old", limit=2, **LIMITS)
    with pytest.raises(ValueError, match="prompt_date: '2026-03-02' here, '' there"):
        label(base, problems, out=tmp_path / "old", limit=4, **LIMITS)
