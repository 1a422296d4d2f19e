"""A policy's repository on a base that is loaded already: `base.generate(custom_generate=...)`."""

import functools
import gc
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    GenerationMixin,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from modeling_ospruner import OSPrunerForCausalLM, StopPolicyConfig, TokenFormat
from modeling_ospruner.custom_generate_ospruner import generate
from ospruner.formats import DEEPSEEK_R1
from ospruner.rules import AnswerEntropy, StopRule

from ..families import let_write_paragraphs, random_policy

PROMPT = torch.tensor([[5, 6, 7, 8, 9, 10], [0, 0, 11, 12, 13, 14]])
MASK = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
Saved = tuple[OSPrunerForCausalLM, str]  # a policy and its folder
ARGUMENTS: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 40}


@pytest.fixture(scope="module")
def saved(
    tiny_base_dir: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> Saved:
    """A policy that stops here and there, and the folder in which it is saved."""
    model = random_policy(load_base(tiny_base_dir), tiny_tokenizer)
    folder = tmp_path_factory.mktemp("policies") / "policy-1.0"
    model.save_pretrained(folder)
    return model, str(folder)


def load_base(folder: Path) -> Any:
    """The tiny base, greedy; its paragraphs end often, so that there is something to decide."""
    base = Qwen2ForCausalLM.from_pretrained(folder)
    fmt = TokenFormat.compile(DEEPSEEK_R1, AutoTokenizer.from_pretrained(folder))
    let_write_paragraphs(base, fmt, ending=0.0)
    return base


def on_base(base: Any, folder: str, **arguments: Any) -> Any:
    torch.manual_seed(0)  # without a seed of its own, a call draws what torch's generator says
    return base.generate(
        PROMPT, custom_generate=folder, trust_remote_code=True, **{**ARGUMENTS, **arguments}
    )


@pytest.mark.parametrize(
    "stop_policy",
    [
        None,
        {"seed": 4, "answer": "free"},
        StopPolicyConfig(mode="threshold", threshold=0.3, max_thinking_tokens=20),
        AnswerEntropy(threshold=2.9),
        False,
    ],
    ids=["default", "dict", "config", "rule", "off"],
)
def test_same_tokens_and_records_as_the_class(
    saved: Saved, tiny_base_dir: Path, stop_policy: Any
) -> None:
    model, folder = saved
    base = load_base(tiny_base_dir).train()
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
    wanted = model.generate(
        PROMPT, **ARGUMENTS, stop_policy=True if stop_policy is None else stop_policy
    )
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


def loaded_policies() -> Any:
    """What the copy of the code that transformers runs has loaded, by base and repository."""
    (module,) = {
        id(module): module
        for name, module in sys.modules.items()
        if name.startswith("transformers_modules.") and name.endswith(".modeling_ospruner")
    }.values()
    return module._POLICIES


def test_a_policy_is_loaded_once_a_base_and_anew_when_its_files_change(
    saved: Saved, tiny_base_dir: Path
) -> None:
    model, folder = saved
    base = load_base(tiny_base_dir)
    on_base(base, folder)
    first = loaded_policies()[base][os.path.abspath(folder)]
    on_base(base, folder)
    assert loaded_policies()[base][os.path.abspath(folder)] is first
    with torch.no_grad():
        model.policy.head.bias.add_(50.0)  # stops at once, everywhere
    try:
        model.save_pretrained(folder)
        on_base(base, folder)
        assert all(len(record.step_ends) <= 1 for record in base.last_stop)
        assert loaded_policies()[base][os.path.abspath(folder)] is not first
    finally:
        with torch.no_grad():
            model.policy.head.bias.sub_(50.0)
        model.save_pretrained(folder)
    gone = weakref.ref(base)
    del base
    gc.collect()
    assert gone() is None, "the loaded policies keep their base alive"


def test_wrappers_may_stand_between(
    saved: Saved, tiny_base_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a decorator that times it, which knows nothing of the repository."""
    model, folder = saved
    base = load_base(tiny_base_dir)
    load = GenerationMixin.load_custom_generate
    calls = []

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner = load(self, *args, **kwargs)

        @functools.wraps(inner)
        def outer(*positional: Any, **named: Any) -> Any:
            calls.append(len(named))
            return inner(*positional, **named)

        return outer

    monkeypatch.setattr(GenerationMixin, "load_custom_generate", timed)
    plain: Any = GenerationMixin.generate
    monkeypatch.setattr(GenerationMixin, "generate", lambda self, *a, **k: plain(self, *a, **k))
    found = on_base(base, folder)
    assert calls
    torch.manual_seed(0)
    assert torch.equal(found, model.generate(PROMPT, stop_policy=True, **ARGUMENTS))


def test_what_cannot_work_is_refused(saved: Saved, tiny_base_dir: Path) -> None:
    model, folder = saved
    base = load_base(tiny_base_dir)
    with pytest.raises(ValueError, match="is a folder, which has none: leave revision out"):
        on_base(base, folder, revision="main")
    with pytest.raises(ValueError, match="not with beam_search"):
        on_base(base, folder, num_beams=2)
    with pytest.raises(RuntimeError, match="was not called by transformers' own gener"):
        generate(model=base, inputs=PROMPT)
    with pytest.raises(ValueError, match="custom_generate and stop_policy exclude each other"):
        model.generate(PROMPT, custom_generate=folder, stop_policy=True, **ARGUMENTS)
    config = Qwen2Config(**{**base.config.to_dict(), "hidden_size": 64})
    other = Qwen2ForCausalLM(config)
    with pytest.raises(ValueError, match="hidden_size 64 where the policy needs 32"):
        on_base(other, folder)
