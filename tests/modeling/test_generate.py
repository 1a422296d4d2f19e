"""Generate with a stop policy: options, transformers' own pipeline, and on a base that is there."""

import copy
import gc
import math
import shutil
import sys
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    Qwen2ForCausalLM,
    pipeline,
)

from modeling_ospruner import OSPrunerForCausalLM, StopPolicyConfig, StopRecord
from modeling_ospruner.custom_generate_ospruner import generate
from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.eval.problems.problem import user_message
from ospruner.rules import AnswerEntropy, StopRule
from ospruner.train.untrained import untrained

from ..chats import chat_batch
from ..families import ALWAYS, NEVER, let_write_paragraphs, random_policy

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "top_k": 0}
GREEDY: dict[str, Any] = {"do_sample": False}
FREE = {"answer": "free"}


@pytest.fixture(scope="module")
def model(reasoner: Reasoner) -> OSPrunerForCausalLM:
    """The reasoner with a random policy, whose probabilities spread over (0, 1)."""
    return random_policy(reasoner.model, reasoner.tokenizer, 1)


def inputs_for(model: OSPrunerForCausalLM, batch: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts."""
    problems, fmt = draw_split("test", batch, 0), model.token_format.format
    return chat_batch(model.tokenizer, [user_message(problem, fmt) for problem in problems])


def run(model: Any, inputs: dict[str, Any], new: int = 60, **kwargs: Any) -> torch.Tensor:
    """What is generated after the prompts, (B, S)."""
    torch.manual_seed(5)
    output: torch.Tensor = model.generate(**inputs, max_new_tokens=new, **{**GREEDY, **kwargs})
    return output[:, inputs["input_ids"].shape[1] :]


@pytest.mark.parametrize("prices", [None, (5e-5, 1e-2)])
def test_a_policy_decides_at_the_stride_of_its_labels(reasoner: Reasoner, prices: Any) -> None:
    model = random_policy(reasoner.model, reasoner.tokenizer, 1, price_range=prices)
    inputs = inputs_for(model, 2)
    run(model, inputs, stop_policy=NEVER)
    every = model.last_stop
    model.config.step_stride = 2
    run(model, inputs, stop_policy=NEVER)
    for one, strided in zip(every, model.last_stop, strict=True):
        assert len(one.step_ends) > 2
        assert strided.step_ends == one.step_ends
        asked = [(i + 1) % 2 == 0 for i in range(len(one.step_ends))]
        assert [not math.isnan(p) for p in strided.probabilities] == asked
        assert [not math.isnan(p) for p in strided.prices] == (asked if prices else [])
        assert strided.probabilities[1::2] == pytest.approx(one.probabilities[1::2])
        assert strided.nan_steps == 0
    run(model, inputs, stop_policy=ALWAYS)
    for one, strided in zip(every, model.last_stop, strict=True):
        assert strided.step_ends == one.step_ends[:2]


def test_rows_that_something_else_ends_are_let_go(model: OSPrunerForCausalLM) -> None:
    """The padding that follows is no thinking, and no natural end."""
    inputs = inputs_for(model, 3)
    columns = inputs["input_ids"].shape[1] + 9

    def second_after_nine(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return (torch.arange(3) == 1) & (ids.shape[1] >= columns)

    how: dict[str, Any] = {"stopping_criteria": [second_after_nine]}
    kept = run(model, inputs, stop_policy=NEVER | FREE, **how)
    assert torch.equal(kept, run(model, inputs, **how))
    ended = model.last_stop[1]
    assert (ended.thinking_tokens, ended.reason) == (9, "length")
    assert all(end <= 9 for end in ended.step_ends)
    assert all(record.thinking_tokens > 9 for record in model.last_stop[::2])


def test_stop_strings_end_answers_and_cut_no_thinking(model: OSPrunerForCausalLM) -> None:
    """Each row's own answer; where one ends, in which words, is in test_formats_generate.py."""
    inputs, pruned, tokenizer = inputs_for(model, 3), ALWAYS | FREE, model.tokenizer
    whole, closing = run(model, inputs, stop_policy=pruned).tolist(), model.token_format.closing_ids
    begins = [record.thinking_tokens + len(closing) for record in model.last_stop]
    answers = [str(tokenizer.decode(ids[at:])) for ids, at in zip(whole, begins, strict=True)]
    strings = ["\n\n", "=", *(answer.strip()[3:5] for answer in answers)]  # the first ones think
    ended = run(model, inputs, stop_policy=pruned, stop_strings=strings).tolist()
    for ids, at, answer in zip(ended, begins, answers, strict=True):
        told = str(tokenizer.decode(ids[at:], skip_special_tokens=True))
        assert answer.startswith(told)
        assert any(one in told for one in strings)
        assert all(one not in told.strip()[:-8] for one in strings)  # the last token may go on


@pytest.mark.parametrize("rule", [{"seed": 2}, AnswerEntropy(0.05)], ids=["policy", "rule"])
def test_concurrent_calls_do_not_mix(model: OSPrunerForCausalLM, rule: Any) -> None:
    batches = [inputs_for(model, size) for size in (1, 2, 3)]
    how: dict[str, Any] = {"max_new_tokens": 50, "return_dict_in_generate": True, **GREEDY}

    def solve(inputs: dict[str, torch.Tensor]) -> tuple[list[int], Any]:
        output = model.generate(**inputs, **how, stop_policy=rule)
        told = [(r.step_ends, r.signals, r.probe_tokens) for r in output.stop]
        return output.sequences.tolist(), told

    alone = [solve(inputs) for inputs in batches]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(solve, batches)) == alone


class Allow(LogitsProcessor):
    """A grammar: nothing but some tokens, once `begin` stands in the text."""

    def __init__(self, tokens: list[int], begin: int | None = None) -> None:
        self.tokens, self.begin = tokens, begin

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(scores, -torch.inf)
        masked[:, self.tokens] = scores[:, self.tokens]
        if self.begin is None:
            return masked
        return torch.where((input_ids == self.begin).any(-1)[:, None], masked, scores)


# What forbids the closing of the thinking, or what is forced behind it: its ends are given.
FORBIDDING: list[tuple[str, Callable[[int, int], dict[str, Any]]]] = [
    ("prefix_allowed_tokens_fn", lambda *_: {"prefix_allowed_tokens_fn": lambda *_: [30, 31]}),
    ("Allow", lambda *_: {"logits_processor": [Allow([30, 31])]}),
    ("Allow", lambda end, _: {"logits_processor": [Allow([30, 31], begin=end)]}),
    ("bad_words_ids", lambda end, _: {"bad_words_ids": [[end]]}),
    ("bad_words_ids", lambda end, last: {"bad_words_ids": [[end, last]]}),
    ("sequence_bias", lambda end, _: {"sequence_bias": {(end,): -math.inf}}),
    ("suppress_tokens", lambda _, last: {"suppress_tokens": [last]}),
]


@pytest.mark.parametrize(("name", "forbidding"), FORBIDDING)
def test_forbidding_is_refused(model: OSPrunerForCausalLM, name: str, forbidding: Any) -> None:
    end, *_, last = model.token_format.closing_ids
    arguments = forbidding(end, last)
    with pytest.raises(ValueError, match=rf"must force the tokens \[.*\], .* but {name} forbids"):
        run(model, inputs_for(model, 2), stop_policy=ALWAYS, **arguments)
    run(model, inputs_for(model, 2), new=9, stop_policy=False, **arguments)


def test_constraints_that_allow_what_is_forced_are_kept(model: OSPrunerForCausalLM) -> None:
    """A grammar for the answer alone, and words that are banned elsewhere."""
    inputs, fmt = inputs_for(model, 2), model.token_format
    plain = run(model, inputs, stop_policy=False)
    banned = int(plain[0, 1])
    grammar = Allow([*fmt.closing_ids, 30, 31], begin=fmt.think_end_id)
    kept: dict[str, Any] = {"bad_words_ids": [[banned]], "logits_processor": [grammar]}
    written = run(model, inputs, stop_policy=ALWAYS | FREE, **kept)
    for ids, record in zip(written.tolist(), model.last_stop, strict=True):
        assert record.reason == "policy"
        assert banned not in ids
        answer = ids[ids.index(fmt.think_end_id) + len(fmt.closing_ids) :]
        assert answer
        assert set(answer) <= {30, 31, *fmt.closing_ids}


@pytest.mark.parametrize("how", ["min_new_tokens", "min_length", "processor"])
def test_no_row_ends_before_the_fewest_tokens(model: OSPrunerForCausalLM, how: str) -> None:
    inputs, least, eos = inputs_for(model, 2), 40, model.generation_config.eos_token_id
    width = inputs["input_ids"].shape[1]
    ways: dict[str, dict[str, Any]] = {
        "min_new_tokens": {"min_new_tokens": least},
        "min_length": {"min_length": width + least},
        "processor": {"logits_processor": [MinNewTokensLengthLogitsProcessor(width, least, eos)]},
    }
    arguments = ways[how]
    run(model, inputs, stop_policy=ALWAYS)
    early = [record.thinking_tokens for record in model.last_stop]
    assert max(early) < least
    run(model, inputs, 90, stop_policy=ALWAYS, **arguments)
    for record in model.last_stop:
        assert record.thinking_tokens >= least or record.reason == "natural"
    # The thinking ends by itself: the box is closed early, and the row goes on.

    def closing(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, model.token_format.think_end_id] += 100.0 * (ids.shape[1] == width + 5)
        return scores

    arguments["logits_processor"] = [*arguments.get("logits_processor", []), closing]
    short: dict[str, Any] = {**NEVER, "max_answer_tokens": 2}
    written = run(model, inputs, 90, stop_policy=short, **arguments)
    assert written.shape[1] == least
    assert [record.reason for record in model.last_stop] == ["natural"] * 2


def test_without_a_seed_each_call_draws_anew(model: OSPrunerForCausalLM) -> None:
    inputs = inputs_for(model, 1)

    def thought(settings: Any) -> list[int]:
        torch.manual_seed(5)
        found = []
        for _ in range(8):
            model.generate(**inputs, **GREEDY, max_new_tokens=60, stop_policy=settings)
            found.append(model.last_stop[0].thinking_tokens)
        return found

    drawn = thought(True)
    assert len(set(drawn)) > 1
    assert thought(True) == drawn, "torch's generator repeats it"
    assert len(set(thought({"seed": 3}))) == 1


def test_rows_are_plain_until_they_stop_and_answers_are_greedy(model: OSPrunerForCausalLM) -> None:
    """Without a seed, too: the draw of one takes nothing from the sampling that follows."""
    inputs, compared = inputs_for(model, 8), 0
    plain, pruned = (run(model, inputs, 90, stop_policy=one, **SAMPLED) for one in (False, True))
    forced = model.token_format.forced_suffix()
    for i, record in enumerate(model.last_stop):
        kept = record.thinking_tokens
        assert torch.equal(pruned[i, :kept], plain[i, :kept])
        if record.reason == "policy":
            assert record.step_ends[-1] == kept
            after = pruned[i, kept:].tolist()
            assert after[: len(forced)] == forced[: len(after)]
            # What the base itself writes after the forced tokens.
            prompt = inputs["input_ids"][i, inputs["attention_mask"][i].bool()]
            text = torch.cat([prompt, pruned[i, : kept + len(forced)]])[None]
            answer = run(model, {"input_ids": text}, 90, stop_policy=False)[0].tolist()
            box = model.token_format.box_state()
            ends = next((i for i, token in enumerate(answer, 1) if box.push(token)), len(answer))
            told = after[len(forced) :][:ends]
            assert told == answer[: len(told)]
            compared += len(told)
    assert compared > 20


@pytest.mark.parametrize("where", ["head", "layers"])
def test_nan_never_stops_or_crashes(model: OSPrunerForCausalLM, where: str) -> None:
    # Of queries that are NaN torch's attention kernel for the CPU makes zeros.
    model, inputs, settings = copy.deepcopy(model), inputs_for(model, 4), ALWAYS | FREE
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
        assert record.reason != "policy"


def test_on_step_is_told_of_each_decision(model: OSPrunerForCausalLM) -> None:
    """Whoever reads a stream from another thread looks at records before generate returns."""
    told: list[tuple[int, int, float]] = []

    def on_step(row: int, record: StopRecord) -> None:
        assert model.last_stop[row] is record
        told.append((row, record.step_ends[-1], record.probabilities[-1]))

    how = {**SAMPLED, "num_return_sequences": 2}
    for _ in range(2):
        told.clear()
        run(
            model, inputs_for(model, 1), 200, **how, stop_policy={"threshold": 0.9}, on_step=on_step
        )
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
    output = run(model, chat_batch(model.tokenizer, [asked]), 30, stop_policy=stop_policy)
    return str(model.tokenizer.decode(output[0], skip_special_tokens=True))


def test_pipelines_take_chats_and_batches(stopping: OSPrunerForCausalLM, tmp_path: Path) -> None:
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
    off = pipe(CHATS[0], stop_policy=False, return_full_text=False)
    assert off[0]["generated_text"] == alone(stopping, ASKED[0], stop_policy=False) != wanted[0]


def test_a_generation_config_holds_the_stop_policy(stopping: OSPrunerForCausalLM) -> None:
    """It is how `transformers serve` passes it on, from a client or by the model's default."""
    ids = torch.tensor([[5, 6, 7, 8]])
    wanted = stopping.generate(ids, stop_policy=True, **ARGUMENTS)
    plain = stopping.generate(ids, **ARGUMENTS)
    assert not torch.equal(plain, wanted)
    own = stopping.generation_config
    how = {"sequence_bias": own.sequence_bias, "eos_token_id": own.eos_token_id, **ARGUMENTS}
    given = GenerationConfig(**how, stop_policy={"mode": "threshold"})
    assert torch.equal(stopping.generate(ids, generation_config=given), wanted)
    assert stopping.last_stop[0].reason == "policy"
    off = stopping.generate(ids, generation_config=given, stop_policy=False)
    assert torch.equal(off, plain)
    settings: Any = stopping.generation_config
    settings.stop_policy = True
    assert torch.equal(stopping.generate(ids, **ARGUMENTS), wanted)


PROMPT = torch.tensor([[5, 6, 7, 8, 9, 10], [0, 0, 11, 12, 13, 14]])
MASK = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
GIVEN: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 40}
BUDGETED = StopPolicyConfig(mode="threshold", threshold=0.3, max_thinking_tokens=20)
Saved = tuple[OSPrunerForCausalLM, str]  # a policy and its folder


@pytest.fixture(scope="module")
def saved(
    tiny_base_dir: Path, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Saved:
    """A policy that stops here and there, as paragraphs end often, and where it is saved."""
    model = random_policy(Qwen2ForCausalLM.from_pretrained(tiny_base_dir), tiny_tokenizer)
    let_write_paragraphs(model.base, model.token_format, ending=0.0)
    folder = tmp_path_factory.mktemp("policies") / "policy-1.0"
    model.save_pretrained(folder)
    return model, str(folder)


@pytest.fixture
def base(saved: Saved, tiny_base_dir: Path) -> Any:
    """The policy's base anew, greedy."""
    made = Qwen2ForCausalLM.from_pretrained(tiny_base_dir)
    made.generation_config = copy.deepcopy(saved[0].generation_config)
    return made


def on_base(base: Any, folder: str, **arguments: Any) -> Any:
    torch.manual_seed(0)  # without a seed of its own, a call draws what torch's generator says
    return base.generate(
        PROMPT, custom_generate=folder, trust_remote_code=True, **{**GIVEN, **arguments}
    )


@pytest.fixture(params=[False, True], ids=["plain", "wrapped"])
def wrapped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as by a decorator that times it, which knows nothing of the repository."""
    for name in ("load_custom_generate", "generate") if request.param else ():
        inner = getattr(GenerationMixin, name)

        def timed(self: Any, *args: Any, inner: Any = inner, **kwargs: Any) -> Any:
            found = inner(self, *args, **kwargs)
            return (lambda *a, **k: found(*a, **k)) if callable(found) else found

        monkeypatch.setattr(GenerationMixin, name, timed)


@pytest.mark.usefixtures("wrapped")
@pytest.mark.parametrize("stop_policy", [None, BUDGETED, AnswerEntropy(threshold=2.9), False])
def test_same_tokens_and_records_as_the_class(saved: Saved, base: Any, stop_policy: Any) -> None:
    model, folder = saved
    base.train()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    given = {} if stop_policy is None else {"stop_policy": stop_policy}
    found = on_base(base, folder, **given)
    # The base stays as it was.
    assert base.training
    assert "generate" not in vars(base)
    assert all(parameter.requires_grad for parameter in base.parameters())
    assert base.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())
    torch.manual_seed(0)
    wanted = model.generate(PROMPT, **GIVEN, **({"stop_policy": True} | given))
    assert torch.equal(found, wanted)
    if stop_policy is False:
        assert "last_stop" not in vars(base)
        return
    records = [vars(record) for record in base.last_stop]
    assert records == [vars(record) for record in model.last_stop]
    if not isinstance(stop_policy, StopRule):
        assert any(record["step_ends"] for record in records), "nothing was decided"
    output = on_base(base, folder, **given, return_dict_in_generate=True)
    assert torch.equal(output.sequences, wanted)
    assert [vars(record) for record in output.stop] == records


def loaded_on(base: Any) -> Any:
    """The policies, by repository, that the copy of the code which transformers runs holds."""
    ours = (sys.modules[name] for name in list(sys.modules) if name.endswith(".modeling_ospruner"))
    (module,) = {one for one in ours if base in one._POLICIES}
    return module._POLICIES[base]


def test_a_policy_is_loaded_once_a_base_and_anew_when_its_files_change(
    saved: Saved, base: Any, tmp_path: Path
) -> None:
    model, folder = saved
    shutil.copytree(folder, changed := tmp_path / "policy")
    base, name = copy.deepcopy(base), str(changed)  # of which this test alone has a reference
    on_base(base, name)
    first = loaded_on(base)[name]
    on_base(base, name)
    assert loaded_on(base)[name] is first
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.policy.head.bias.add_(50.0)  # stops at once, everywhere
    other.save_pretrained(changed)
    on_base(base, name)
    assert all(len(record.step_ends) <= 1 for record in base.last_stop)
    assert loaded_on(base)[name] is not first
    gone = weakref.ref(base)
    del base
    gc.collect()
    assert gone() is None, "the loaded policies keep their base alive"


def test_what_cannot_work_is_refused(saved: Saved, base: Any) -> None:
    with pytest.raises(ValueError, match="is a folder, which has none: leave revision out"):
        on_base(base, saved[1], revision="main")
    with pytest.raises(RuntimeError, match="was not called by transformers' own gener"):
        generate(model=base, inputs=PROMPT)
