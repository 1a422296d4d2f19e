"""lm-evaluation-harness runs a policy on a task from a local file."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from modeling_ospruner import OSPrunerForCausalLM as Policy
from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.cli import main
from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.formats import PLAIN

from ...chats import asked_of, chat_batch, chat_ids
from ...serving.vllm.plugin_replay import make_policy

lm_eval: Any = pytest.importorskip("lm_eval", reason="pip install 'ospruner[eval]'")
lm_harness: Any = pytest.importorskip("ospruner.eval.harness.lm_harness")  # registers the model

COUNT = 4
PROBLEMS = draw_split("test", COUNT, 0)


@pytest.fixture(scope="module")
def policy(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return make_policy(reasoner, tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def tasks(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task of lm_eval on problems as their users would ask them."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "sums.jsonl"
    asked = zip(asked_of(reasoner, COUNT), PROBLEMS, strict=True)
    lines = [json.dumps({"problem": text, "answer": one.answer}) for text, one in asked]
    data.write_text("\n".join(lines), "utf-8")
    text = Path(__file__).with_name("sums.yaml").read_text("utf-8")
    (folder / "sums.yaml").write_text(text.replace("{data_file}", json.dumps(str(data))), "utf-8")
    return folder


def evaluate(folder: Path, policy: Policy, more: Any = (), **how: Any) -> Any:
    """The policy on the tasks of a folder; `more` are further arguments of the model."""
    arguments = {"apply_chat_template": True, "tasks": ["ospruner_sums"], "device": "cpu"}
    return lm_eval.simple_evaluate(
        model="ospruner",  # the reasoner's own dtype is bfloat16
        model_args={"policy": policy.config._name_or_path, "dtype": "float32", **dict(more)},
        task_manager=lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
        **{**arguments, **how},
    )


def logged(done: dict[str, Any]) -> list[list[dict[str, Any]]]:
    return [sample["arguments"][0][1]["ospruner"] for sample in done["samples"]["ospruner_sums"]]


@pytest.mark.parametrize(
    "settings", [{"threshold": 0.1}, {"threshold": 0.9, "max_thinking_tokens": 40}, None]
)
def test_replies_are_those_of_generate_and_the_answer_alone_is_graded(
    reasoner: Reasoner, policy: Policy, tasks: Path, settings: dict[str, Any] | None
) -> None:
    """Answers begin after the thinking's end, and the task's stop strings count in them alone."""
    tokenizer: Any = policy.tokenizer
    done = evaluate(tasks, policy, settings or {"stop_policy": False}, batch_size=2)
    samples = done["samples"]["ospruner_sums"]
    assert [sample["target"] for sample in samples] == [one.answer for one in PROBLEMS]
    right = 0
    for sample, text in zip(samples, asked_of(reasoner, COUNT), strict=True):
        inputs: Any = chat_batch(tokenizer, [text])
        how: Any = {"stop_policy": settings or False, "max_new_tokens": 300, "do_sample": False}
        output = policy.generate(**inputs, **how)
        new = output[0, inputs["input_ids"].shape[1] :].tolist()
        answer, (log,) = sample["resps"][0][0], sample["arguments"][0][1]["ospruner"]
        end = new.index(policy.token_format.think_end_id) if answer else len(new)
        assert log["thinking"] == tokenizer.decode(new[:end], skip_special_tokens=True).strip()
        whole = tokenizer.decode(new[end + 1 :], skip_special_tokens=True).lstrip()
        assert answer == whole.partition("\n\n")[0].partition("Question:")[0]  # its stop strings
        if settings is None:
            assert log["reason"] == ("natural" if answer else "length")
            assert log["thinking_tokens"] == (end if answer else log["tokens"])
        else:
            record = vars(policy.last_stop[0])
            assert all(log[name] == record[name] for name in ("thinking_tokens", "reason"))
        right += f"boxed{{{sample['target']}}}" in answer
    logs = [log[0] for log in logged(done)]
    assert any("\n\n" in log["thinking"] for log in logs), "a stop string of the task"
    told, metrics = done["config"]["ospruner"], done["results"]["ospruner_sums"]
    assert metrics["exact_match,boxed"] == right / COUNT
    assert told["replies"] == COUNT == sum(told["reasons"].values())
    mean = sum(log["thinking_tokens"] for log in logs) / COUNT
    assert told["thinking_tokens"] == pytest.approx(mean, abs=0.05)
    assert metrics["thinking_tokens,none"] == pytest.approx(mean)
    assert metrics["thinking_tokens_stderr,none"] > 0


def test_batches_draw_as_one_by_one(policy: Policy, tasks: Path) -> None:
    drawing = {"mode": "sample", "seed": 1}
    one, four = (evaluate(tasks, policy, drawing, batch_size=size) for size in (1, 4))
    assert logged(one) == logged(four)
    assert len({log[0]["thinking_tokens"] for log in logged(one)}) > 1


def test_cache_knows_the_request_again(policy: Policy, tasks: Path, tmp_path: Path) -> None:
    how: Any = {"more": {"max_thinking_tokens": 40}, "use_cache": str(tmp_path / "cache")}
    first, again = (evaluate(tasks, policy, **how) for _ in range(2))
    known = again["results"]["ospruner_sums"]
    assert known.items() <= first["results"]["ospruner_sums"].items()
    sample = again["samples"]["ospruner_sums"][0]
    assert "ospruner" not in sample["arguments"][0][1], "from the cache"


@pytest.mark.parametrize(
    ("more", "how", "complaint"),
    [
        ({"policy": ""}, {}, "policy is ''"),
        ({"lenght_penalty": 1}, {}, "lenght_penalty"),
        ({"stop_policy": False, "threshold": 0.5}, {}, r"\['threshold'\] would do nothing"),
        ({"stop_policy": "no"}, {}, "stop_policy is 'no'"),
        ({"max_loss": 0.01}, {}, "max_loss is 0.01, but the policy promises"),
        ({}, {"apply_chat_template": False}, "say --apply_chat_template"),
        ({}, {"gen_kwargs": {"num_return_sequences": 2, "do_sample": True}}, "has one reply in l"),
    ],
)
def test_what_is_refused(policy: Policy, tasks: Path, more: Any, how: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        evaluate(tasks, policy, more, **how)


def test_scores_and_begun_answers_are_refused(policy: Policy, tasks: Path, tmp_path: Path) -> None:
    text = (tasks / "sums.yaml").read_text("utf-8")
    head = text[: text.index("generation_kwargs")].replace("generate_until", "loglikelihood")
    (tmp_path / "likely.yaml").write_text(head.replace("ospruner_sums", "likely"), "utf-8")
    with pytest.raises(ValueError, match="likely asks for log-likelihoods"):
        evaluate(tmp_path, policy, tasks=["likely"])
    model = lm_harness.OSPrunerLM(policy.config._name_or_path, device="cpu")
    with pytest.raises(ValueError, match="gen_prefix"):
        model.apply_chat_template([], False)


def test_answers_begin_behind_what_ends_the_thinking(
    real_harmony: tuple[PreTrainedTokenizerBase, TokenFormat],
    real_r1: tuple[PreTrainedTokenizerBase, TokenFormat],
) -> None:
    """Harmony's header is no answer; of a model that thinks in its reply, all of it is."""
    answer_of, tokenizer = lm_harness.answer_of, real_harmony[0]
    prompt, final = chat_ids(tokenizer, "1+1?"), "<|channel|>final<|message|>It is 2.\n\nSo."
    analysis = "<|channel|>analysis<|message|>One.\n\nTwo.<|end|><|start|>assistant"
    for before in (analysis, ""):
        ids = tokenizer.encode(before + final, add_special_tokens=False)
        thinking, answer = answer_of(real_harmony[1], prompt, ids)
        assert tokenizer.decode(answer) == "It is 2.\n\nSo."
        assert ("Two." in tokenizer.decode(thinking)) == bool(before)
    tokenizer, fmt = real_r1
    reply = tokenizer.encode("It is 2.\n\nSo.", add_special_tokens=False)
    opened = chat_ids(tokenizer, "1+1?")
    assert answer_of(fmt, opened, reply) == (reply, [])
    assert answer_of(TokenFormat.compile(PLAIN, tokenizer), opened, reply) == ([], reply)
    closed = chat_ids(tokenizer, "1+1?", "\n</think>\n\n")
    begun = opened[: opened.index(fmt.think_start_ids[0])]
    for prompt in (closed, begun + tokenizer.encode("Now,", add_special_tokens=False)):
        assert answer_of(fmt, prompt, reply) == ([], reply)


def test_command_line_knows_the_model(
    policy: Policy, tasks: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = f"policy={policy.config._name_or_path},threshold=0.1"
    text = f"""ospruner lm-eval --model ospruner --model_args {named} --tasks ospruner_sums
    --include_path {tasks} --apply_chat_template --log_samples --limit 2 --output_path {tmp_path}"""
    monkeypatch.setattr(sys, "argv", text.split())  # and no device
    with contextlib.suppress(SystemExit):
        main()
    out = capsys.readouterr().out
    assert all(word in out for word in ("ospruner_sums", "thinking_tokens"))
    (file,) = tmp_path.rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    logs = [one["arguments"]["gen_args_0"]["arg_1"]["ospruner"][0] for one in samples]
    assert [log["thinking_tokens"] > 0 for log in logs] == [True, True]
