"""Saving and loading: one base for several policies, safe files, a clear word where it fails."""

import copy
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    Qwen2ForCausalLM,
)

from modeling_ospruner import OSPrunerConfig, OSPrunerForCausalLM, TokenFormat, policy_ospruner
from modeling_ospruner.configuration_ospruner import VERSION
from modeling_ospruner.modeling_ospruner import FLAT_FILES
from ospruner.demo.shipped import Reasoner
from ospruner.provenance import check_policy_place
from ospruner.scoring import reading, stop_logits, stop_probabilities
from ospruner.train.untrained import fresh_layers, untrained

from ..broken_tensors import BROKEN, break_tensors, drop, edit, pickle_only
from ..chats import chat_ids

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
def policy(base: Any, tiny_tokenizer: Any, tmp_path: Path) -> Path:
    save_policy(base, tiny_tokenizer, tmp_path / "policy")
    return tmp_path / "policy"


def scores(model: OSPrunerForCausalLM) -> torch.Tensor:
    return stop_probabilities(model, TEXT, prompt_length=4)


def test_a_bases_next_policy_finds_what_is_its_own(
    base: Any, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tokenizer is read, no vocabulary and no layer looked through; adapters touch no base."""
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    places = [tmp_path / "first", tmp_path / "second"]
    for seed, place in enumerate(places):
        save_policy(base, tiny_tokenizer, place, seed, tuning="queries", adapter_rank=2)
    first = OSPrunerForCausalLM.from_base(base, places[0])
    slow = (AutoTokenizer, "from_pretrained"), (TokenFormat, "compile")
    with monkeypatch.context() as patched:
        for owner, name in (*slow, (policy_ospruner, "_empty_tail")):
            patched.delattr(owner, name)
        second = OSPrunerForCausalLM.from_base(base, places[1])
        assert not torch.equal(scores(first), scores(second))
    assert second.tokenizer is first.tokenizer
    assert second.token_format is first.token_format
    for name, tensor in base.state_dict().items():
        assert torch.equal(tensor, before[name])
    elsewhere = OSPrunerForCausalLM.from_base(copy.deepcopy(base), places[1])
    assert torch.equal(scores(elsewhere), scores(second))
    (places[1] / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    other = OSPrunerForCausalLM.from_base(base, places[1])
    assert other.tokenizer.chat_template == "{{ messages[0].content }}!"


def test_another_fine_tune_of_the_same_sizes_is_refused(base: Any, policy: Path) -> None:
    with torch.no_grad():
        base.model.norm.weight.mul_(1 + 2**-8)  # as rounded to bfloat16: it is let pass
        OSPrunerForCausalLM.from_base(base, policy)
        base.model.norm.weight.mul_(1.05)
    with pytest.raises(ValueError, match=r"the sizes that the policy needs, but other weights: no"):
        OSPrunerForCausalLM.from_base(base, policy)


@pytest.mark.parametrize("how", BROKEN)
def test_broken_tensors_are_named(policy: Path, base: Any, how: str) -> None:
    """And where a newer version saved the policy, it says so."""
    edit(ospruner_version="99.0.1")(policy)
    upgrade = rf"saved by ospruner 99.0.1, this is {VERSION}: upgrade with pip install -U"
    with pytest.raises(ValueError, match=rf"{break_tensors(policy, how)}.*{upgrade}"):
        OSPrunerForCausalLM.from_base(base, policy)


def test_a_bases_pickles_are_not_opened(tiny_base_dir: Path, policy: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_base_dir, tmp_path / "base")
    edit(base_model_name_or_path=str(folder))(policy)
    pickle_only(folder)
    for way in ({}, {"use_safetensors": False}):
        with pytest.raises(OSError, match="model.safetensors"):
            AutoModelForCausalLM.from_pretrained(policy, **way)


def test_base_code_is_not_run(tiny_base_dir: Path, policy: Path, base: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_base_dir, tmp_path / "martian")
    opened = tmp_path / "opened"
    (folder / "martian.py").write_text(f"open({str(opened)!r}, 'w')")
    auto_map = {"AutoConfig": "martian.Config", "AutoModelForCausalLM": "martian.Model"}
    edit(model_type="martian", auto_map=auto_map)(folder)
    edit(base_model_name_or_path=str(folder))(policy)
    edit("text_config", model_type="martian")(policy)
    for trust in (None, True):
        with pytest.raises(ValueError, match="custom code"):
            AutoModelForCausalLM.from_pretrained(policy, trust_remote_code=trust)
    assert not opened.exists()
    vars(base.config)["model_type"] = "martian"  # whoever trusts it loads it
    assert scores(OSPrunerForCausalLM.from_base(base, policy)).isfinite().all()


def test_a_base_that_has_moved_on_is_refused(base: Any, policy: Path, tmp_path: Path) -> None:
    """The Hub's cache holds a later commit; nothing but the files' fingerprint tells."""
    repository, newest = tmp_path / "cache" / "models--org--base", "b" * 40
    with torch.no_grad():
        base.model.layers[0].self_attn.q_proj.weight.neg_()
    base.save_pretrained(repository / "snapshots" / newest)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(newest)
    edit(base_model_name_or_path="org/base")(policy)
    hub: dict[str, Any] = {"cache_dir": tmp_path / "cache"}
    with pytest.raises(ValueError, match=r"other weights \(fingerprint"):
        AutoModelForCausalLM.from_pretrained(policy, **hub)
    other = Qwen2ForCausalLM.from_pretrained("org/base", **hub, local_files_only=True)
    with pytest.raises(ValueError, match=r"other weights \(fingerprint"):
        OSPrunerForCausalLM.from_base(other, policy, **hub)


@pytest.mark.parametrize("last", ["cpu", "disk"])
def test_offloaded_bases_give_the_same(base: Any, policy: Path, tmp_path: Path, last: str) -> None:
    """The last two layers and the final norm lie on the CPU, or as the rest does on disk."""
    plain = OSPrunerForCausalLM.from_base(base, policy)
    places = {f"model.layers.{i}": "disk" if i < 2 else last for i in range(4)}
    places |= {"model.embed_tokens": "disk", "model.rotary_emb": "cpu"}
    places |= {"model.norm": last, "lm_head": "disk"}
    offloaded = OSPrunerForCausalLM.from_pretrained(
        policy, device_map=places, offload_folder=tmp_path / "offload"
    )
    held = {parameter.device.type for parameter in offloaded.base.parameters()}
    assert held == ({"meta"} if last == "disk" else {"meta", "cpu"})
    assert offloaded.hf_device_map == offloaded.base.hf_device_map
    assert torch.equal(scores(offloaded), scores(plain))
    ids, seeded = torch.tensor([TEXT[:4], TEXT[4:8]]), {"seed": 0}
    found, wanted = (
        model.generate(ids, stop_policy=seeded, max_new_tokens=30) for model in (offloaded, plain)
    )
    assert torch.equal(found, wanted)
    offloaded.save_pretrained(again := tmp_path / "again")
    fresh = [fresh_layers(one, 2, tuning="layers").state_dict() for one in (offloaded.base, base)]
    saved = [load_file(folder / "model.safetensors") for folder in (policy, again)]
    for tensors, known in (fresh, saved):
        assert tensors.keys() == known.keys()
        assert all(torch.equal(tensor, known[name]) for name, tensor in tensors.items())


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
    tiny_base_dir: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    ways = BitsAndBytesConfig(load_in_4bit=True)
    packed = Qwen2ForCausalLM.from_pretrained(tiny_base_dir, quantization_config=ways)
    packed.save_pretrained(tmp_path / "packed")
    only = Qwen2ForCausalLM.from_pretrained(tmp_path / "packed")
    with pytest.raises(ValueError, match=r"quantised \(bitsandbytes\) .*only mxfp4, fp8 can"):
        untrained(only, tiny_tokenizer, tuning="layers")


def test_a_wrong_folder_never_asks_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    policy = tmp_path / "runs" / "price5e-5"
    policy.mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="the Hub was not asked, for 'runs' is a folder"):
        check_policy_place("runs/gone")
    with pytest.raises(OSError, match=r"runs is no policy, for it has no config.json: train one"):
        check_policy_place("runs")
    (policy / "config.json").write_text("{}")
    with pytest.raises(OSError, match=r"config.json: name a policy in it: runs/price5e-5"):
        check_policy_place("runs")
    check_policy_place("runs/price5e-5")
    check_policy_place("org/policy")  # the Hub knows


Saved = tuple[OSPrunerForCausalLM, Path]  # a policy and its folder


@pytest.fixture(params=[0, 2])
def saved(request: pytest.FixtureRequest, base: Any, tiny_tokenizer: Any, tmp_path: Path) -> Saved:
    """A policy that differs from its base, and the folder in which it is saved."""
    folder = tmp_path / "policy"
    return save_policy(base, tiny_tokenizer, folder, 50, num_policy_layers=request.param), folder


def test_the_uploaded_code_stays_small() -> None:
    """Whoever says trust_remote_code=True may read it in an hour; it may shrink, and not grow."""
    package = Path(sys.modules["modeling_ospruner"].__path__[0])
    lines = sum(len((package / name).read_text("utf-8").splitlines()) for name in FLAT_FILES)
    assert len(FLAT_FILES) <= 7
    assert lines <= 3_000


def test_saves_the_policy_alone(saved: Saved, tmp_path: Path) -> None:
    model, folder = saved
    more: Any = {"state_dict": model.state_dict(), "max_shard_size": "1KB"}  # of another's wishes
    model.save_pretrained(tmp_path / "again", **more)
    for one in (folder, tmp_path / "again"):
        tensors = load_file(one / "model.safetensors")
        assert set(tensors) == {f"policy.{name}" for name in model.policy.state_dict()}
    files = {*FLAT_FILES, "config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in folder.iterdir()} >= files
    config = json.loads((folder / "config.json").read_text())
    assert config["ospruner_version"] == VERSION
    assert set(config["auto_map"]) == {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}


def test_round_trip(saved: Saved) -> None:
    model, folder = saved
    assert type(AutoModel.from_pretrained(folder)) is OSPrunerForCausalLM
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded) is OSPrunerForCausalLM
    assert loaded.config.price == 5e-4
    assert loaded.token_format == model.token_format
    torch.testing.assert_close(scores(loaded), scores(model))
    assert not any(parameter.requires_grad for parameter in loaded.base.parameters())
    assert not loaded.policy.training


def test_loads_on_a_shared_base_in_another_dtype_and_by_another_attention(saved: Saved) -> None:
    model, folder = saved
    assert OSPrunerForCausalLM.from_base(model.base, folder).base is model.base
    half = OSPrunerForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for one in filter(None, (half.base, half.policy.tail)):  # rounded, and still the same base
        assert one.dtype == torch.bfloat16
    assert half.policy.head.weight.dtype == torch.float32
    eager = OSPrunerForCausalLM.from_pretrained(folder, attn_implementation="eager")
    for one in filter(None, (eager.base, eager.policy.tail)):
        assert one.config._attn_implementation == "eager"
    for other, close in ((half, 5e-2), (eager, 1e-5)):
        torch.testing.assert_close(scores(other), scores(model), rtol=0, atol=close)


def test_a_base_of_other_sizes_is_refused_before_its_weights_are_read(
    saved: Saved, tiny_base_dir: Path, tmp_path: Path
) -> None:
    model, folder = saved
    other = shutil.copytree(tiny_base_dir, tmp_path / "other")
    drop("model.safetensors")(other)  # reading weights would fail otherwise
    edit(hidden_size=64, num_hidden_layers=5, layer_types=["full_attention"] * 5)(other)
    edit(base_model_name_or_path=str(other))(folder)
    message = "hidden_size 64 where the policy needs 32; num_hidden_layers 5 where .* needs 4"
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(folder)
    model.base.config.vocab_size = 999
    with pytest.raises(ValueError, match=r"vocab_size 999 where the policy needs \d+"):
        OSPrunerForCausalLM.from_base(model.base, folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"price": -1e-4}, r"price is -0.0001; it must lie in \[0, inf\)"),
        ({"default_threshold": 1.01}, r"default_threshold is 1.01; it must lie in \[0, 1\]"),
        ({"num_policy_layers": -1}, "num_policy_layers is -1; it must be 0 or more"),
        ({"tuning": "all"}, "tuning is 'all'; it must be 'layers' or 'queries'"),
        ({"default_mode": "never"}, "default_mode is 'never'; it must be 'sample' or 'threshold'"),
        ({"default_threshold": "0.5"}, "default_threshold is '0.5'; it must be a number"),
        ({"adapter_rank": 2.0}, "adapter_rank is 2.0; it must be an integer"),
        ({"text_config": 5}, "text_config is 5; it must be"),
        ({"head": "film"}, "head is 'film'; it must be 'fixed' or 'price'"),
        ({"head": "price"}, r"head is 'price' and price_range None; .* has one, \[low, high\]"),
        ({"price_range": [1e-4, 1e-3]}, "head is 'fixed' and price_range"),
        ({"head": "price", "price_range": [1e-3]}, r"price_range .*; .* has one, \[low, high\]"),
        ({"head": "price", "price_range": [0, 1e-3]}, r"low is 0; it must lie in \(0"),
        ({"head": "price", "price_range": [1e-3, 1e-4]}, "high is 0.0001; it must lie in"),
        ({"head": "price", "price_range": [1e-4, 1e-3], "price": 1.0}, "price is 1.0, but"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path is None; it must be <cla"),
        ({"base_revision": 7}, r"base_revision is 7; it must be str \| None"),
        ({"colour": "red"}, r"has no colour.*saved by ospruner \(unknown version\)"),
        ({"colour": "red", "ospruner_version": "99.1.0"}, "no colour.*99.1.0.*upgrade with pip"),
    ],
)
def test_bad_configurations_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        OSPrunerConfig(**fields)


def test_a_configuration_that_became_wrong_is_not_saved(tmp_path: Path) -> None:
    config = OSPrunerConfig(default_threshold=1)
    config.default_threshold = 1.5
    with pytest.raises(ValueError, match=r"default_threshold is 1.5; it must lie in \[0, 1\]"):
        config.save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())


def test_the_trunk_stops_where_the_tail_enters(saved: Saved) -> None:
    model, _ = saved
    ids = torch.randint(9, 300, (1, 12), generator=torch.Generator().manual_seed(0))
    calls: list[int] = []
    for i, layer in enumerate(model.base.get_decoder().layers):
        layer.register_forward_hook(lambda module, args, out, i=i: calls.append(i))
    assert reading(model, ids)[0].shape == (1, 12, 32)
    assert not reading(model, ids)[0].requires_grad
    assert calls == 2 * list(range(4 if model.policy.tail is None else 2))


def test_given_texts_are_scored_at_their_step_ends(saved: Saved, tiny_tokenizer: Any) -> None:
    """Alone and as rows of a batch, and whole chats whose thinking is found."""
    model, _ = saved
    prompt = chat_ids(tiny_tokenizer, "3 + 4?")
    traces = "So 3 + 4 = 7.\n\nWait, 7 - 4 = 3.\n\nThe answer", "Ann has 3.\n\n"
    texts = [[*prompt, *tiny_tokenizer.encode(one, add_special_tokens=False)] for one in traces]
    begin, closing = len(prompt), model.token_format.think_end_id
    rows = [text + [closing] * (1 + max(map(len, texts)) - len(text)) for text in texts]
    batch = stop_probabilities(model, torch.tensor(rows))
    assert batch.isnan().tolist() == [[False, False, False], [False, True, True]]
    for text, row in zip(texts, batch, strict=True):
        ends = [begin + end for end in model.token_format.step_ends(text[begin:])]
        wanted = torch.sigmoid(stop_logits(model, torch.tensor([text]))[0, torch.tensor(ends) - 1])
        given = stop_probabilities(model, text, prompt_length=begin)
        torch.testing.assert_close(given, wanted)
        answered = stop_probabilities(model, [*text, closing, 9, 9])
        for found in (answered, row[: len(ends)]):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_texts_that_cannot_be_scored_are_refused(saved: Saved) -> None:
    texts: list[tuple[Any, int | None, str]] = [
        (TEXT, None, "no thinking was found in input_ids .* pass prompt_length, the number of tok"),
        (TEXT, 56, r"prompt_length is 56; it must lie in 1..55"),
        ([[[5]]], 1, r"input_ids has the shape \(1, 1, 1\); it must be \(S,\) or \(B, S\), not em"),
    ]
    for ids, length, message in texts:
        with pytest.raises(ValueError, match=message):
            stop_probabilities(saved[0], torch.tensor(ids), prompt_length=length)
