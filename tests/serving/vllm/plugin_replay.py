"""Offline replay of what vLLM gave: each response against its own tokens, by transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from modeling_ospruner import OSPrunerForCausalLM as Policy
from modeling_ospruner.stopping_ospruner import Phase, RowPlan, Said, StopRecord, StopRow
from ospruner.demo.shipped import Reasoner
from ospruner.scoring import stop_logits
from ospruner.serving.requests import StopRequest
from ospruner.train.untrained import untrained

TOLERANCE = 1e-4  # on stop probabilities, in float32


def make_policy(
    reasoner: Reasoner,
    folder: Path,
    num_layers: int = 2,
    tuning: str = "layers",
    price: float | None = None,
    **further: Any,
) -> Policy:
    """An untrained policy whose layers differ from the base's, and whose probabilities vary."""
    further = {"base_model_name_or_path": str(reasoner.folder), **further}
    model = untrained(reasoner.model, reasoner.tokenizer, num_layers, tuning, **further)
    perturb(model)
    if price is not None:
        model.config.price = price
    model.save_pretrained(folder)
    model.config._name_or_path = str(folder)
    return model


def perturb(model: Policy) -> None:
    """Makes a fresh policy's layers differ from the base's, and its probabilities vary."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        own = model.policy.own_names()
        for name, parameter in model.policy.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            elif name.startswith("tail.layers.") and name in own:  # an adapter's rest is the base's
                parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
        head = model.policy.head
        head.weight.copy_(0.25 * torch.randn(head.weight.shape, generator=generator))
        head.bias.fill_(-3.0)


@torch.inference_mode()
def replay(
    model: Policy,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],  # with the one that ended it
    extra: Mapping[str, Any],  # its keys; with a seed, where it samples
    probabilities: Sequence[float] | None = None,
    tolerance: float = TOLERANCE,
) -> StopRow:
    """Follows a response; every token that the rules determine must stand there.

    What vLLM recorded at its step ends is compared with the model's probabilities, and used in
    their place, lest a near tie tell nothing.
    """
    fmt, config = model.token_format, model.config
    settings = StopRequest(extra).settings(StopRequest(None))
    assert settings is not None
    settings = settings.with_defaults(config)
    eos = frozenset(fmt.eos_ids)
    plan = RowPlan(settings, fmt, eos, config.step_stride)
    row = StopRow(plan, prompt_ids, settings.first_sample_index)
    ids = torch.tensor([[*prompt_ids, *output_ids]])
    ours = torch.sigmoid(stop_logits(model, ids))[0].tolist()
    for i, token in enumerate(output_ids):
        if row.at_boundary:
            own = ours[len(prompt_ids) + i - 1]
            step = len(row.record.step_ends)
            told = own if probabilities is None else probabilities[step]
            assert abs(told - own) < tolerance, (step, told, own)
            row.decide(Said(told))
        if row.phase is Phase.FORCING:
            assert token == row.forced[0], f"token {i} is {token}, not the forced {row.forced[0]}"
        elif row.phase is Phase.DONE and row._box is not None:
            assert token in eos, f"token {i} follows a complete answer"
        else:
            assert token not in row.masked_ids, f"token {i} opens the thinking again"
        row.push(token)
    if row.at_boundary and probabilities is not None:
        for told in probabilities[len(row.record.step_ends) :]:  # decided, then ended by a limit
            row.decide(Said(told))
    return row


def check_record(
    model: Policy,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    extra: Mapping[str, Any],
    told: Mapping[str, Any],
    ahead: bool = False,
) -> StopRecord:
    """Compares what an engine tells of a response with its replay, which it returns.

    Where an engine schedules `ahead`, it does not know the last token of a text that is cut.
    """
    record = replay(model, prompt_ids, output_ids, extra, told["probabilities"]).record
    for name in ("reason", "step_ends", "thinking_tokens"):
        if not (ahead and name == "thinking_tokens" and record.reason == "length"):
            assert vars(record)[name] == told[name], name
    return record
