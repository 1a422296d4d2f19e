"""Loading: one base for several policies, only safe files, and a clear word where it fails."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
)

from modeling_ospruner import OSPrunerForCausalLM, TokenFormat, policy_ospruner
from modeling_ospruner.configuration_ospruner import VERSION
from ospruner.demo.shipped import Reasoner
from ospruner.provenance import check_policy_place
from ospruner.scoring import stop_probabilities
from ospruner.train.untrained import fresh_layers, untrained

from ..broken_tensors import BROKEN, break_tensors, edit, pickle_only, put

TEXT = [5, 6, 7, 8, *range(9, 60)]


def save_policy(
    base: Any, tokenizer: Any, folder: Path, seed: int = 0, **fields: Any
) -> OSPrunerForCausalLM:
    """A policy with weights of its own, whose price is its seed's."""
    model = untrained(base, tokenizer, **{"tuning": "layers", **fields})
    model.config.price = seed * 1e-5
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for parameter in filter(lambda one: one.requires_grad, model.policy.parameters()):
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


@pytest.fixture
def base(tiny_base_dir: Path) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM.from_pretrained(tiny_base_dir)


@pytest.fixture
def policy(base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    save_policy(base, tiny_tokenizer, tmp_path / "policy")
    return tmp_path / "policy"


def scores(model: OSPrunerForCausalLM) -> torch.Tensor:
    return stop_probabilities(model, TEXT, prompt_length=4)


def test_a_bases_next_policy_finds_what_is_its_own(
    base: Qwen2ForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No tokenizer is read, no vocabulary and no layer looked through; adapters touch no base."""
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    places = [tmp_path / "first", tmp_path / "second"]
    for seed, place in enumerate(places):
        save_policy(base, tiny_tokenizer, place, seed, tuning="queries", adapter_rank=2)
    first = OSPrunerForCausalLM.from_base(base, places[0])
    with monkeypatch.context() as patched:
        for slow in (AutoTokenizer, "from_pretrained"), (TokenFormat, "compile"):
            patched.delattr(*slow)
        patched.delattr(policy_ospruner, "_empty_tail")
        second = OSPrunerForCausalLM.from_base(base, places[1])
        assert not torch.equal(scores(first), scores(second))
    assert second.tokenizer is first.tokenizer
    assert second.token_format is first.token_format
    for name, tensor in base.state_dict().items():
        assert torch.equal(tensor, before[name])
    elsewhere = OSPrunerForCausalLM.from_base(copy.deepcopy(base), places[1])
    assert torch.equal(scores(elsewhere), scores(second))


def test_a_tokenizer_with_another_template_is_another(
    base: Qwen2ForCausalLM, policy: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(policy, tmp_path / "other"))
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    first, second = (OSPrunerForCausalLM.from_base(base, one) for one in (policy, other))
    assert second.tokenizer is not first.tokenizer
    assert second.tokenizer.chat_template == "{{ messages[0].content }}!"


def test_another_fine_tune_of_the_same_sizes_is_refused(
    base: Qwen2ForCausalLM, policy: Path
) -> None:
    with torch.no_grad():
        base.model.norm.weight.mul_(1 + 2**-8)  # as rounded to bfloat16: it is let pass
        OSPrunerForCausalLM.from_base(base, policy)
        base.model.norm.weight.mul_(1.05)
    with pytest.raises(ValueError, match=r"the sizes that the policy needs, but other weights: no"):
        OSPrunerForCausalLM.from_base(base, policy)


DAMAGED = {
    "cut": lambda whole: whole[: len(whole) // 2],
    "garbage": lambda whole: b"\xff" * 64,
    "empty": lambda whole: b"",
}


@pytest.mark.parametrize("how", [*BROKEN, *DAMAGED])
def test_broken_files_and_tensors_are_named(policy: Path, base: Qwen2ForCausalLM, how: str) -> None:
    said = "model.safetensors is damaged or no safetensors file"
    if how in BROKEN:
        said = break_tensors(policy, how)
    else:
        put("model.safetensors", DAMAGED[how]((policy / "model.safetensors").read_bytes()))(policy)
    with pytest.raises(ValueError, match=said):
        OSPrunerForCausalLM.from_base(base, policy)


@pytest.mark.parametrize("of", ["policy", "base"])
def test_pickles_are_never_opened(
    tiny_base_dir: Path, policy: Path, tmp_path: Path, of: str
) -> None:
    folder = policy
    if of == "base":
        folder = shutil.copytree(tiny_base_dir, tmp_path / "base")
        edit(base_model_name_or_path=str(folder))(policy)
    pickle_only(folder)
    for way in ({}, {"use_safetensors": False}):
        with pytest.raises(OSError, match="model.safetensors"):
            AutoModelForCausalLM.from_pretrained(policy, **way)


def test_newer_policies_say_so(policy: Path) -> None:
    assert json.loads((policy / "config.json").read_text())["ospruner_version"] == VERSION
    unknown = break_tensors(policy, "unknown")
    edit(ospruner_version="99.0.1")(policy)
    upgrade = rf"saved by ospruner 99.0.1, this is {VERSION}: upgrade with pip install -U"
    with pytest.raises(ValueError, match=rf"{unknown}.*{upgrade}"):
        AutoModelForCausalLM.from_pretrained(policy)


def test_a_bases_own_code_is_not_run(
    tiny_base_dir: Path, policy: Path, base: Qwen2ForCausalLM, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_base_dir, tmp_path / "martian")
    opened = tmp_path / "opened"
    (folder / "martian.py").write_text(f"open({str(opened)!r}, 'w')")
    auto_map = {"AutoConfig": "martian.Config", "AutoModelForCausalLM": "martian.Model"}
    edit(model_type="martian", auto_map=auto_map)(folder)
    text_config = json.loads((policy / "config.json").read_text())["text_config"]
    named: dict[str, Any] = {"text_config": {**text_config, "model_type": "martian"}}
    edit(base_model_name_or_path=str(folder), **named)(policy)
    for trust in (None, True):
        with pytest.raises(ValueError, match="custom code"):
            AutoModelForCausalLM.from_pretrained(policy, trust_remote_code=trust)
    assert not opened.exists()
    vars(base.config)["model_type"] = "martian"  # whoever trusts it loads it
    assert scores(OSPrunerForCausalLM.from_base(base, policy)).isfinite().all()


def test_the_pinned_revision_is_loaded_not_the_newest(
    tiny_base_dir: Path, base: Qwen2ForCausalLM, policy: Path, tmp_path: Path
) -> None:
    """A Hub cache with two commits; `main` is the second, whose weights differ."""
    expected = scores(OSPrunerForCausalLM.from_base(base, policy))
    repository = tmp_path / "cache" / "models--org--base"
    pinned, newest = "a" * 40, "b" * 40
    for commit in (pinned, newest):
        shutil.copytree(tiny_base_dir, repository / "snapshots" / commit)
    with torch.no_grad():
        base.model.layers[0].self_attn.q_proj.weight.neg_()  # the fingerprint alone tells
    base.save_pretrained(repository / "snapshots" / newest)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(newest)
    edit(base_model_name_or_path="org/base", base_revision=pinned)(policy)
    hub: dict[str, Any] = {"cache_dir": tmp_path / "cache"}
    model: Any = AutoModelForCausalLM.from_pretrained(policy, **hub)
    assert torch.equal(scores(model), expected)
    edit(base_revision=None)(policy)
    other = Qwen2ForCausalLM.from_pretrained("org/base", **hub, local_files_only=True)
    for load in (
        lambda: AutoModelForCausalLM.from_pretrained(policy, **hub),
        lambda: OSPrunerForCausalLM.from_base(other, policy, **hub),
    ):
        with pytest.raises(ValueError, match=r"other weights \(fingerprint"):
            load()


def spread(last: str, others: str) -> dict[str, str]:
    """A device map that puts the last two layers and the final norm elsewhere than the rest."""
    tail = {f"model.layers.{i}": last for i in (2, 3)}
    rest = {f"model.layers.{i}": others for i in (0, 1)}
    beside = {"model.embed_tokens": others, "model.rotary_emb": "cpu", "lm_head": others}
    return {**rest, **tail, **beside, "model.norm": last}


@pytest.mark.parametrize("last", ["cpu", "disk"])
def test_an_offloaded_base_gives_the_same(
    base: Qwen2ForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    policy: Path,
    tmp_path: Path,
    last: str,
) -> None:
    plain = OSPrunerForCausalLM.from_base(base, policy)
    offloaded = OSPrunerForCausalLM.from_pretrained(
        policy, device_map=spread(last, "disk"), offload_folder=tmp_path / "offload"
    )
    held = {parameter.device.type for parameter in offloaded.base.parameters()}
    assert held == ({"meta"} if last == "disk" else {"meta", "cpu"})
    assert offloaded.hf_device_map == offloaded.base.hf_device_map
    assert torch.equal(scores(offloaded), scores(plain))
    ids = torch.tensor([TEXT[:4], TEXT[4:8]])
    seeded: dict[str, Any] = {"max_new_tokens": 30, "stop_policy": {"seed": 0}}
    wanted = plain.generate(ids, **seeded)
    assert torch.equal(offloaded.generate(ids, **seeded), wanted)
    offloaded.save_pretrained(again := tmp_path / "again")
    fresh = [fresh_layers(one, 2, tuning="layers").state_dict() for one in (offloaded.base, base)]
    saved = [load_file(folder / "model.safetensors") for folder in (policy, again)]
    for found, known in (fresh, saved):
        assert found.keys() == known.keys()
        assert all(torch.equal(tensor, known[name]) for name, tensor in found.items())


def test_quantised_bases(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    reasoner: Any = Reasoner()
    save_policy(reasoner.model, reasoner.tokenizer, policy := tmp_path / "policy")
    ways = BitsAndBytesConfig(load_in_4bit=True)
    model: Any = AutoModelForCausalLM.from_pretrained(policy, quantization_config=ways)
    assert not model.base.model.layers[0].self_attn.q_proj.weight.is_floating_point()
    whole: Any = AutoModelForCausalLM.from_pretrained(policy)
    for name, tensor in whole.policy.state_dict().items():  # the copies stay unquantised
        torch.testing.assert_close(model.policy.state_dict()[name], tensor, check_dtype=False)
    model.generate(torch.tensor([TEXT[:4]]), stop_policy=True, max_new_tokens=40)
    assert len(model.last_stop) == 1
    # A fresh policy on a quantised base reads its copies from the checkpoint.
    fresh = untrained(model.base, reasoner.tokenizer, tuning="layers")
    wanted = reasoner.model.model.layers[-1].self_attn.q_proj.weight
    found = fresh.policy.state_dict()["tail.layers.1.self_attn.q_proj.weight"]
    torch.testing.assert_close(found, wanted.to(found.dtype))


def test_a_checkpoint_that_only_exists_quantised(
    base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    base.save_pretrained(tmp_path / "whole")
    ways = BitsAndBytesConfig(load_in_4bit=True)
    packed = Qwen2ForCausalLM.from_pretrained(tmp_path / "whole", quantization_config=ways)
    packed.save_pretrained(tmp_path / "packed")
    only = Qwen2ForCausalLM.from_pretrained(tmp_path / "packed")
    message = r"Qwen2ForCausalLM is quantised \(bitsandbytes\) .*only mxfp4, fp8 can"
    with pytest.raises(ValueError, match=message):
        untrained(only, tiny_tokenizer, tuning="layers")


def test_what_is_no_policys_folder_is_said_before_the_hub_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    policy = tmp_path / "runs" / "price5e-5"
    policy.mkdir(parents=True)
    said = r"policy is 'runs/gone', where no folder is \(the Hub was not asked, for 'runs' is a fol"
    with pytest.raises(FileNotFoundError, match=said):
        check_policy_place("runs/gone")
    with pytest.raises(FileNotFoundError, match="policy is '/gone', where no folder is: name a"):
        check_policy_place("/gone")
    with pytest.raises(OSError, match=r"runs is no policy, for it has no config.json: train one"):
        check_policy_place("runs")
    (policy / "config.json").write_text("{}")
    with pytest.raises(OSError, match=r"config.json: name a policy in it: runs/price5e-5"):
        check_policy_place("runs")
    check_policy_place("runs/price5e-5")
    check_policy_place("org/policy")  # the Hub knows
