"""Generate with a stop policy on tiny bases, and in transformers' own pipeline."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2ForCausalLM, pipeline

from modeling_ospruner import OSPrunerForCausalLM, StopRecord, uniform
from ospruner.demo.shipped import Reasoner
from ospruner.train.untrained import untrained

from ..chats import chat_batch
from ..families import ALWAYS, let_write_paragraphs, random_policy

NEW_TOKENS = 90
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "top_k": 0}


@pytest.fixture
def model(
    tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> OSPrunerForCausalLM:
    """An untrained policy whose probabilities spread over (0, 1)."""
    made = random_policy(tiny_base, tiny_tokenizer)
    let_write_paragraphs(made.base, made.token_format)
    return made


def prompts(model: OSPrunerForCausalLM, batch: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts of different lengths."""
    questions = ["Ann has 3 apples" + " and buys 4 more" * (i % 3) for i in range(batch)]
    return chat_batch(model.tokenizer, questions)


def run(model: OSPrunerForCausalLM, inputs: dict[str, Any], **kwargs: Any) -> torch.Tensor:
    torch.manual_seed(5)
    output: torch.Tensor = model.generate(**inputs, max_new_tokens=NEW_TOKENS, **kwargs)
    return output


def test_without_a_seed_each_call_draws_anew(model: OSPrunerForCausalLM) -> None:
    inputs: dict[str, Any] = prompts(model, 1)

    def thought(**said: Any) -> int:
        model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, **said)
        return model.last_stop[0].thinking_tokens

    torch.manual_seed(5)
    drawn = [thought(stop_policy=True) for _ in range(8)]
    assert len(set(drawn)) > 1
    torch.manual_seed(5)
    assert [thought(stop_policy=True) for _ in range(8)] == drawn, "torch's generator repeats it"
    for settings in ({"seed": 3}, {"threshold": 0.5}):
        assert len({thought(stop_policy=settings) for _ in range(3)}) == 1


def test_sampled_rows_are_plain_ones_until_they_stop_and_answers_are_greedy(
    model: OSPrunerForCausalLM,
) -> None:
    """Without a seed, too: the draw of one takes nothing from the sampling that follows."""
    inputs, compared = prompts(model, 8), 0
    assert (inputs["attention_mask"] == 0).any()
    plain, pruned = (run(model, inputs, stop_policy=one, **SAMPLED) for one in (False, True))
    width, forced = inputs["input_ids"].shape[1], model.token_format.forced_suffix()
    rows = zip(plain, pruned, inputs["attention_mask"], model.last_stop, strict=True)
    for unstopped, row, real, record in rows:
        kept = width + record.thinking_tokens
        assert torch.equal(row[:kept], unstopped[:kept])
        if record.reason == "policy":
            assert record.step_ends[-1] == record.thinking_tokens
            after = row[kept:].tolist()
            assert after[: len(forced)] == forced[: len(after)]
            # What the base itself writes after the forced tokens.
            text: Any = row[width - int(real.sum()) : kept + len(forced)][None]
            most = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
            answer = model.generate(text, stop_policy=False, **most)[0, text.shape[1] :].tolist()
            box = model.token_format.box_state()
            ends = next((i for i, token in enumerate(answer, 1) if box.push(token)), len(answer))
            told = after[len(forced) :][:ends]
            assert told == answer[: len(told)]
            compared += len(told)
    assert compared > 20


def test_draws_are_pinned() -> None:
    """Every engine draws these numbers: they are part of the format."""
    draws = [uniform(0, 0, 0), uniform(0, 0, 1), uniform(0, 1, 0), uniform(1, 0, 0)]
    pinned = [0.13870941014555427, 0.18436667429957676, 0.2691303195904541, 0.6935121390102292]
    assert draws == pinned


@pytest.mark.parametrize("where", ["head", "layers"])
def test_nan_never_stops_or_crashes(model: OSPrunerForCausalLM, where: str) -> None:
    # Of queries that are NaN torch's attention kernel for the CPU makes zeros.
    inputs = prompts(model, 4)
    settings = ALWAYS | {"answer": "free"}
    run(model, inputs, stop_policy=settings)
    assert model.last_stop[0].reason == "policy"
    with torch.no_grad():
        for name, parameter in model.policy.named_parameters():
            if where in name:
                parameter.fill_(torch.nan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = run(model, inputs, stop_policy=settings)
    assert torch.equal(output, run(model, inputs))
    assert len([w for w in caught if "gave NaN" in str(w.message)]) == 1
    for record in model.last_stop:
        assert record.nan_steps == len(record.step_ends) > 0
        assert record.reason == "length"


def test_on_step_is_told_of_each_decision_and_records_are_found_meanwhile(
    reasoner: Reasoner,
) -> None:
    """Whoever reads a stream from another thread looks at records before generate returns."""
    model = untrained(reasoner.model, reasoner.tokenizer, init_bias=-1.0, tuning="layers")
    inputs = reasoner.tokenizer("Solve 3x+54=102 for x.", return_tensors="pt")
    told: list[tuple[int, int, float]] = []

    def on_step(row: int, record: StopRecord) -> None:
        assert model.last_stop[row] is record
        told.append((row, record.step_ends[-1], record.probabilities[-1]))

    how: dict[str, Any] = {"max_new_tokens": 200, "num_return_sequences": 2, "do_sample": True}
    for _ in range(2):
        told.clear()
        model.generate(**inputs, **how, stop_policy=True, on_step=on_step)
    for i, record in enumerate(model.last_stop):
        steps = list(zip(record.step_ends, record.probabilities, strict=True))
        assert [(end, p) for row, end, p in told if row == i] == steps
        assert steps


ASKED = ("Ann has 3 apples", "Ann has 3 apples and buys 4 more", "So 3 + 4 = 7")
CHATS = [[{"role": "user", "content": text}] for text in ASKED]
ARGUMENTS: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False}


@pytest.fixture
def stopping(tiny_base: Qwen2ForCausalLM, tiny_tokenizer: Any) -> OSPrunerForCausalLM:
    """A policy that stops at the first paragraph's end."""
    model = untrained(tiny_base, tiny_tokenizer, init_bias=50.0, tuning="layers")
    let_write_paragraphs(model.base, model.token_format, ending=0.0)
    return model


def alone(model: OSPrunerForCausalLM, asked: str, stop_policy: Any = True) -> str:
    """What generate writes for one chat by itself."""
    inputs: Any = chat_batch(model.tokenizer, [asked])
    output = model.generate(**inputs, stop_policy=stop_policy, **ARGUMENTS)
    assert model.tokenizer is not None
    new = output[0, inputs["input_ids"].shape[1] :]
    return str(model.tokenizer.decode(new, skip_special_tokens=True))


def test_a_pipeline_loads_a_policy_by_name_and_takes_chats_alone_and_in_batches(
    stopping: OSPrunerForCausalLM, tmp_path: Path
) -> None:
    stopping.base.save_pretrained(tmp_path / "base")
    stopping.config.base_model_name_or_path = str(tmp_path / "base")
    stopping.save_pretrained(tmp_path / "policy")
    make: Any = pipeline
    how: dict[str, Any] = {"trust_remote_code": True, "stop_policy": True, **ARGUMENTS}
    pipe = make("text-generation", model=str(tmp_path / "policy"), **how)
    assert type(pipe.model) is OSPrunerForCausalLM
    wanted = [alone(stopping, one) for one in ASKED]
    assert all("</think>" in text for text in wanted)
    (one,) = pipe(CHATS[0])
    assert one["generated_text"][-1] == {"role": "assistant", "content": wanted[0]}
    batch = pipe(CHATS, batch_size=3, return_full_text=False)
    assert [found[0]["generated_text"] for found in batch] == wanted
    assert [record.reason for record in pipe.model.last_stop] == ["policy"] * 3
    (text,) = pipe("Ann has 3 apples", stop_policy={"mode": "threshold", "threshold": 1.0})
    assert text["generated_text"].startswith("Ann has 3 apples")
    assert pipe.model.last_stop[0].reason == "policy", "pi is 1 in float32"
    off = pipe(CHATS[0], stop_policy=False, return_full_text=False)
    assert off[0]["generated_text"] == alone(stopping, ASKED[0], stop_policy=False) != wanted[0]


def test_a_generation_config_holds_the_stop_policy(stopping: OSPrunerForCausalLM) -> None:
    """It is how `transformers serve` passes it on, from a client or by the model's default."""
    ids = torch.tensor([[5, 6, 7, 8]])
    wanted = stopping.generate(ids, stop_policy=True, **ARGUMENTS)
    plain = stopping.generate(ids, **ARGUMENTS)
    assert not torch.equal(plain, wanted)
    given = GenerationConfig(
        **ARGUMENTS,
        stop_policy={"mode": "threshold"},
        sequence_bias=stopping.generation_config.sequence_bias,
        eos_token_id=stopping.generation_config.eos_token_id,
    )
    assert torch.equal(stopping.generate(ids, generation_config=given), wanted)
    assert stopping.last_stop[0].reason == "policy"
    off = stopping.generate(ids, generation_config=given, stop_policy=False)
    assert torch.equal(off, plain)
    settings: Any = stopping.generation_config
    settings.stop_policy = True
    assert torch.equal(stopping.generate(ids, **ARGUMENTS), wanted)
    settings.stop_policy = {"mod": "sample"}
    with pytest.raises(ValueError, match=r"stop_policy has no \['mod'\]"):
        stopping.generate(ids, **ARGUMENTS)
