"""lm-evaluation-harness runs a policy on a task from a local file."""

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.cli import main
from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.train.untrained import untrained

from ...chats import asked_of, chat_batch, chat_ids
from ...serving.vllm.plugin_replay import make_policy

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'ospruner[eval]'")

Policy = tuple[OSPrunerForCausalLM, Path]
COUNT = 4
PROBLEMS = draw_split("test", COUNT, 0)


@pytest.fixture(scope="module")
def policy(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = tmp_path_factory.mktemp("policy")
    return make_policy(reasoner, folder), folder


@pytest.fixture(scope="module")
def tasks(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task of lm_eval on problems as their users would ask them."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "sums.jsonl"
    texts = asked_of(reasoner, COUNT)
    rows = [{"problem": t, "answer": p.answer} for t, p in zip(texts, PROBLEMS, strict=True)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    text = Path(__file__).with_name("sums.yaml").read_text("utf-8")
    (folder / "sums.yaml").write_text(text.replace("{data_file}", json.dumps(str(data))), "utf-8")
    return folder


def evaluate(folder: Path, model_args: dict[str, Any], **more: Any) -> Any:
    import lm_eval
    from lm_eval.tasks import TaskManager

    from ospruner.eval.harness import lm_harness  # noqa: F401  # registers the model

    arguments = {"apply_chat_template": True, "tasks": ["ospruner_sums"], "device": "cpu"}
    done = lm_eval.simple_evaluate(
        model="ospruner",
        model_args={"dtype": "float32", **model_args},  # the reasoner's own is bfloat16
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
        **{**arguments, **more},
    )
    assert isinstance(done, dict)
    return done


def logged(done: dict[str, Any]) -> list[list[dict[str, Any]]]:
    return [sample["arguments"][0][1]["ospruner"] for sample in done["samples"]["ospruner_sums"]]


@pytest.mark.parametrize(
    "settings", [{"threshold": 0.1}, {"threshold": 0.9, "max_thinking_tokens": 40}, None]
)
def test_replies_are_those_of_generate_and_the_answer_alone_is_graded(
    reasoner: Reasoner, policy: Policy, tasks: Path, settings: dict[str, Any] | None
) -> None:
    """Answers begin after the thinking's end, and the task's stop strings count in them alone."""
    model, folder = policy
    tokenizer: Any = model.tokenizer
    given = {"stop_policy": False} if settings is None else settings
    done = evaluate(tasks, {"policy": str(folder), **given}, batch_size=2)
    samples = done["samples"]["ospruner_sums"]
    assert [sample["target"] for sample in samples] == [one.answer for one in PROBLEMS]
    right = 0
    for sample, text in zip(samples, asked_of(reasoner, COUNT), strict=True):
        inputs: Any = chat_batch(tokenizer, [text])
        output = model.generate(
            **inputs, stop_policy=settings or False, max_new_tokens=300, do_sample=False
        )
        new = output[0, inputs["input_ids"].shape[1] :].tolist()
        answer, (log,) = sample["resps"][0][0], sample["arguments"][0][1]["ospruner"]
        end = new.index(model.token_format.think_end_id) if answer else len(new)
        assert log["thinking"] == tokenizer.decode(new[:end], skip_special_tokens=True).strip()
        whole = tokenizer.decode(new[end + 1 :], skip_special_tokens=True).lstrip()
        assert answer == whole.partition("\n\n")[0].partition("Question:")[0]  # its stop strings
        if settings is None:
            assert log["reason"] == ("natural" if answer else "length")
            assert log["thinking_tokens"] == (end if answer else log["tokens"])
        else:
            record = vars(model.last_stop[0])
            assert all(log[name] == record[name] for name in ("thinking_tokens", "reason"))
        right += f"boxed{{{sample['target']}}}" in answer
    assert done["results"]["ospruner_sums"]["exact_match,boxed"] == right / COUNT
    logs = [log[0] for log in logged(done)]
    assert any("\n\n" in log["thinking"] for log in logs), "a stop string of the task"
    told, metrics = done["config"]["ospruner"], done["results"]["ospruner_sums"]
    assert told["replies"] == COUNT == sum(told["reasons"].values())
    mean = sum(log["thinking_tokens"] for log in logs) / COUNT
    assert told["thinking_tokens"] == pytest.approx(mean, abs=0.05)
    assert metrics["thinking_tokens,none"] == pytest.approx(mean)
    assert metrics["thinking_tokens_stderr,none"] > 0


def test_batches_draw_as_one_by_one(policy: Policy, tasks: Path) -> None:
    arguments = {"policy": str(policy[1]), "mode": "sample", "seed": 1}
    one, four = (evaluate(tasks, arguments, batch_size=size) for size in (1, 4))
    assert logged(one) == logged(four)
    assert len({log[0]["thinking_tokens"] for log in logged(one)}) > 1


def test_cache_knows_the_request_again(policy: Policy, tasks: Path, tmp_path: Path) -> None:
    arguments = {"policy": str(policy[1]), "max_thinking_tokens": 40}
    cache = str(tmp_path / "cache")
    first, again = (evaluate(tasks, arguments, use_cache=cache) for _ in range(2))
    known = again["results"]["ospruner_sums"]
    assert known.items() <= first["results"]["ospruner_sums"].items()
    sample = again["samples"]["ospruner_sums"][0]
    assert "ospruner" not in sample["arguments"][0][1], "from the cache"


@pytest.mark.parametrize(
    ("model_args", "more", "complaint"),
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
def test_what_cannot_be_run_is_refused(
    policy: Policy, tasks: Path, model_args: dict[str, Any], more: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        evaluate(tasks, {"policy": str(policy[1]), **model_args}, **more)


def test_log_likelihoods_and_answers_that_a_task_begins_are_refused(
    policy: Policy, tasks: Path, tmp_path: Path
) -> None:
    from ospruner.eval.harness.lm_harness import OSPrunerLM

    text = (tasks / "sums.yaml").read_text("utf-8")
    head = text[: text.index("generation_kwargs")].replace("generate_until", "loglikelihood")
    (tmp_path / "likely.yaml").write_text(head.replace("ospruner_sums", "likely"), "utf-8")
    with pytest.raises(ValueError, match="likely asks for log-likelihoods"):
        evaluate(tmp_path, {"policy": str(policy[1])}, tasks=["likely"])
    with pytest.raises(ValueError, match="gen_prefix"):
        OSPrunerLM(str(policy[1]), device="cpu").apply_chat_template([], False)


def test_answers_begin_behind_what_ends_the_thinking(
    real_harmony: tuple[PreTrainedTokenizerBase, TokenFormat],
    real_r1: tuple[PreTrainedTokenizerBase, TokenFormat],
) -> None:
    """Harmony's header is no answer; after a thinking that the prompt has closed all is."""
    from ospruner.eval.harness.lm_harness import answer_of

    tokenizer: Any = real_harmony[0]
    prompt, final = chat_ids(tokenizer, "1+1?"), "<|channel|>final<|message|>It is 2.\n\nSo."
    analysis = "<|channel|>analysis<|message|>One.\n\nTwo.<|end|><|start|>assistant"
    for before in (analysis, ""):
        ids = tokenizer.encode(before + final, add_special_tokens=False)
        thinking, answer = answer_of(real_harmony[1], prompt, ids)
        assert tokenizer.decode(answer) == "It is 2.\n\nSo."
        assert ("Two." in tokenizer.decode(thinking)) == bool(before)
    tokenizer, fmt = real_r1
    chat = [{"role": "user", "content": "1+1?"}]
    text = str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
    reply = tokenizer.encode("It is 2.\n\nSo.", add_special_tokens=False)
    for prompted in (f"{text}\n</think>\n\n", text.removesuffix("<think>\n") + "Now,"):
        ids = tokenizer.encode(prompted, add_special_tokens=False)
        assert answer_of(fmt, ids, reply) == ([], reply)
    assert answer_of(fmt, tokenizer.encode(text, add_special_tokens=False), reply)[1] == []


def test_of_a_model_that_thinks_in_its_reply_all_of_it_is_the_reply(
    reasoner: Reasoner, tasks: Path, tmp_path: Path
) -> None:
    """With words for the final answer, which end the thinking that is counted."""
    words: dict[str, Any] = dict.fromkeys(("think_end", "think_start"), "")
    words |= {"name": "reply", "closing": "\n\nThat fits ", "answer_phrase": "That fits"}
    form = replace(reasoner.token_format.format, **words)
    pinned: Any = {"base_model_name_or_path": str(reasoner.folder), "reasoning_format": form}
    untrained(reasoner.model, reasoner.tokenizer, **pinned).save_pretrained(tmp_path)
    settings = {"threshold": 1.0, "answer": "free"}
    done = evaluate(tasks, {"policy": str(tmp_path), **settings}, gen_kwargs={"until": []})
    replies = [sample["resps"][0][0] for sample in done["samples"]["ospruner_sums"]]
    assert any("That fits" in reply for reply in replies)
    tokenizer: Any = reasoner.tokenizer
    for reply, (log,) in zip(replies, logged(done), strict=True):
        assert log["thinking"] == ""
        if "That fits" in reply:
            before = tokenizer.encode(reply.partition("That fits")[0], add_special_tokens=False)
            assert (log["thinking_tokens"], log["reason"]) == (len(before), "natural")


def test_command_line_knows_the_model(
    policy: Policy, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"""ospruner lm-eval --model ospruner --model_args policy={policy[1]},threshold=0.1
    --tasks ospruner_sums --include_path {tasks} --apply_chat_template --log_samples --limit 2
    --output_path {tmp_path}"""  # and no device
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(SystemExit):
        patch.setattr(sys, "argv", text.split())
        main()
    out = capsys.readouterr().out
    assert "ospruner_sums" in out
    assert "thinking_tokens" in out
    (file,) = tmp_path.rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert len(samples) == 2
    for sample in samples:
        (log,) = sample["arguments"]["gen_args_0"]["arg_1"]["ospruner"]
        assert log["reason"] in ("policy", "natural", "length")
        assert log["thinking_tokens"] > 0
