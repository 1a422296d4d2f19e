import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2ForCausalLM

from modeling_ospruner import OSPrunerConfig, OSPrunerForCausalLM
from modeling_ospruner.modeling_ospruner import FLAT_FILES
from ospruner.scoring import reading, stop_logits, stop_probabilities

from ..broken_tensors import drop, edit
from ..chats import chat_ids
from .test_loading import save_policy

MOST_LINES = 3_000
Saved = tuple[OSPrunerForCausalLM, Path]  # a policy and its folder
TEXT = [5, 6, 7, 8, *range(9, 60)]


@pytest.fixture(params=[0, 2])
def saved(
    request: pytest.FixtureRequest,
    tiny_base_dir: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> Saved:
    """A policy that differs from its base, and the folder in which it is saved."""
    base, folder = Qwen2ForCausalLM.from_pretrained(tiny_base_dir), tmp_path / "policy"
    return save_policy(base, tiny_tokenizer, folder, 50, num_policy_layers=request.param), folder


EXPECTED_FILES = {*FLAT_FILES, "config.json", "model.safetensors", "tokenizer.json"}


def test_the_uploaded_code_stays_small() -> None:
    """Whoever says trust_remote_code=True may read it in an hour; it may shrink, and not grow."""
    package = Path(sys.modules["modeling_ospruner"].__path__[0])
    lines = sum(len((package / name).read_text("utf-8").splitlines()) for name in FLAT_FILES)
    assert len(FLAT_FILES) <= 7
    assert lines <= MOST_LINES


def test_saves_the_policy_alone(saved: Saved, tmp_path: Path) -> None:
    model, folder = saved
    more: Any = {"state_dict": model.state_dict(), "max_shard_size": "1KB"}  # of another's wishes
    model.save_pretrained(tmp_path / "again", **more)
    for one in (folder, tmp_path / "again"):
        tensors = load_file(one / "model.safetensors")
        assert set(tensors) == {f"policy.{name}" for name in model.policy.state_dict()}
    assert {path.name for path in folder.iterdir()} >= EXPECTED_FILES
    config = json.loads((folder / "config.json").read_text())
    assert config["price"] == 5e-4
    assert config["text_config"]["hidden_size"] == 32
    assert config["auto_map"] == {
        "AutoConfig": "configuration_ospruner.OSPrunerConfig",
        "AutoModel": "modeling_ospruner.OSPrunerForCausalLM",
        "AutoModelForCausalLM": "modeling_ospruner.OSPrunerForCausalLM",
    }


def test_round_trip(saved: Saved) -> None:
    model, folder = saved
    assert type(AutoModel.from_pretrained(folder)) is OSPrunerForCausalLM
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded) is OSPrunerForCausalLM
    assert loaded.config.price == 5e-4
    assert loaded.token_format == model.token_format
    torch.testing.assert_close(
        stop_probabilities(loaded, TEXT, prompt_length=4),
        stop_probabilities(model, TEXT, prompt_length=4),
    )
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
    wanted = stop_probabilities(model, TEXT, prompt_length=4)
    for other, close in ((half, 5e-2), (eager, 1e-5)):
        found = stop_probabilities(other, TEXT, prompt_length=4)
        torch.testing.assert_close(found, wanted, rtol=0, atol=close)


def test_a_base_of_other_sizes_is_refused_before_its_weights_are_read(
    saved: Saved, tiny_base_dir: Path, tmp_path: Path
) -> None:
    model, folder = saved
    other = shutil.copytree(tiny_base_dir, tmp_path / "other")
    drop("model.safetensors")(other)  # reading weights would fail otherwise
    edit(hidden_size=64, num_hidden_layers=5, layer_types=["full_attention"] * 5)(other)
    edit(base_model_name_or_path=str(other))(folder)
    message = (
        "does not match the policy: it has hidden_size 64 where the policy needs 32; "
        "num_hidden_layers 5 where the policy needs 4"
    )
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(folder)
    model.base.config.vocab_size = 999
    with pytest.raises(ValueError, match=r"vocab_size 999 where the policy needs \d+"):
        OSPrunerForCausalLM.from_base(model.base, folder)
    edit(text_config=None)(folder)
    with pytest.raises(ValueError, match="hidden_size 32 where the policy needs None"):
        OSPrunerForCausalLM.from_base(model.base, folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"price": -1e-4}, r"price is -0.0001; it must lie in \[0, inf\)"),
        ({"default_threshold": 1.01}, r"default_threshold is 1.01; it must lie in \[0, 1\]"),
        ({"num_policy_layers": -1}, "num_policy_layers is -1; it must be 0 or more"),
        ({"tuning": "all"}, "tuning is 'all'; it must be 'layers' or 'queries'"),
        ({"default_mode": "never"}, "default_mode is 'never'; it must be 'sample' or 'threshold'"),
        ({"price": float("nan")}, r"price is nan; it must lie in \[0, inf\)"),
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
        (
            {"base_model_name_or_path": None},
            "base_model_name_or_path is None; it must be <class 'str'>",
        ),
        ({"base_revision": 7}, r"base_revision is 7; it must be str \| None"),
        ({"colour": "red"}, r"has no colour.*saved by ospruner \(unknown version\)"),
        (
            {"colour": "red", "ospruner_version": "99.1.0"},
            r"no colour.*saved by ospruner 99.1.0, this is \S+: upgrade with pip install -U 'osp",
        ),
        ({"text_config": {"hidden_size": 32}}, "text_config is no base's configuration"),
        ({"model_type": "qwen2"}, "OSPrunerConfig of model_type 'qwen2'"),
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


def test_given_texts_are_scored_at_their_step_ends(
    saved: Saved, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
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


@pytest.mark.parametrize(
    ("ids", "length", "message"),
    [
        (TEXT, None, "no thinking was found in input_ids .* pass prompt_length, the number of tok"),
        (TEXT, 56, r"prompt_length is 56; it must lie in 1..55"),
        ([[[5]]], 1, r"input_ids has the shape \(1, 1, 1\); it must be \(S,\) or \(B, S\), not em"),
    ],
)
def test_texts_that_cannot_be_scored_are_refused(
    saved: Saved, ids: Any, length: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        stop_probabilities(saved[0], torch.tensor(ids), prompt_length=length)
