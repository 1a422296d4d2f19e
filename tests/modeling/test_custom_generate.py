"""A policy's repository on a base that is loaded already: `base.generate(custom_generate=...)`."""

import copy
import gc
import shutil
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationMixin, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from modeling_ospruner import OSPrunerForCausalLM, StopPolicyConfig
from modeling_ospruner.custom_generate_ospruner import generate
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
        PROMPT, custom_generate=folder, trust_remote_code=True, **{**ARGUMENTS, **arguments}
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
    model, folder = saved
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
