"""What stands between a hybrid's copied layers: nothing, or what the base's own layers add.

    python benchmarks/hybrid.py [--run runs/hybrid] [--tokens 1400000] [--seeds 3] [--json FILE]

This base is a tiny Qwen3.5 with two layers of linear attention between its last two of full, which
a policy of queries copies. It begins as the embedded reasoner but for these two's attention, and is
taught to write as the reasoner does. Its own traces are labelled at every second step, and
`tails.py` measures three forms: copies, to which what the layers between added is added (today's),
these without it, and the head alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import timing
import torch
from rich.console import Console
from tails import COPIES, Study, options, report
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

import ospruner
from modeling_ospruner.policy_ospruner import StoppingPolicy
from ospruner.demo.demo import LABELLING, SPLITS
from ospruner.demo.examples import batches_by_length, draw_examples
from ospruner.demo.fallible_reasoner import SECOND_CYCLE
from ospruner.demo.recipe import Recipe, build_optimizers, learning_rate_factor, take_step
from ospruner.demo.shipped import Reasoner, write_split
from ospruner.durable import replace_file
from ospruner.eval.table import FloatArray
from ospruner.progress import PhaseBars, Progress

KINDS = [f"{kind}_attention" for kind in ("full", "full", "full", "linear", "linear", "full")]
NOTHING = "nothing between"
FORMS: dict[str, dict[str, Any]] = {COPIES: {}, NOTHING: {}, "head alone": {"layers": 0}}


def begun_as(reasoner: PreTrainedModel) -> Qwen3_5ForCausalLM:
    """A hybrid with those of the reasoner's tensors that it has a place for.

    Qwen3.5's norms hold their weight less 1; those of queries and keys begin at 2, for attention
    about as sharp as the reasoner's. Gates of attention begin at a half, its outputs doubled.
    """
    theirs, tensors = reasoner.config.to_dict(), reasoner.state_dict()
    own = {name: theirs[name] for name in Qwen3_5TextConfig().to_dict() if name in theirs}
    own |= {"model_type": "qwen3_5_text", "layer_types": KINDS, "attention_bias": True}
    own |= {"rope_parameters": {**own["rope_parameters"], "partial_rotary_factor": 1.0}}
    own |= dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 32)
    own |= dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4)
    hybrid = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**own))
    for name, place in hybrid.state_dict().items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            place.fill_(1)
        elif "q_proj" in name:
            heads = tensors[name].unflatten(0, (-1, 32))
            place.copy_(torch.cat([heads, torch.zeros_like(heads)], dim=1).flatten(0, 1))
        elif name in tensors:
            place.copy_(tensors[name] * (2 if "o_proj" in name else 1) - int("norm" in name))
    return hybrid


def divergence(hybrid: PreTrainedModel, reasoner: PreTrainedModel, batch: Any) -> Tensor:
    """KL of the next token, weighted as the reasoner's own training weighs tokens."""
    ids, weights = map(torch.from_numpy, batch)  # (B, S)
    counted = weights[:, 1:].flatten()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            wanted = reasoner(input_ids=ids, use_cache=False).logits
        said = hybrid(input_ids=ids, use_cache=False).logits  # (B, S, V)
    ours, theirs = (one[:, :-1].flatten(0, 1).float().log_softmax(-1) for one in (said, wanted))
    each = F.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1)
    return (each * counted).sum() / counted.sum()


def taught(run: Path, tokens: int, seed: int, progress: Progress) -> Path:
    """The hybrid's folder. A killed run goes on from its last chunk, with fresh momenta."""
    folder, record = run / "base", run / "taught.json"
    reasoner: Any = Reasoner()  # whose tokenizer is a fast one
    torch.manual_seed(seed)
    seen, chunk, hybrid = 0, 0, begun_as(reasoner.model)
    if record.is_file():
        seen, chunk = json.loads(record.read_text("utf-8"))
        hybrid = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    hybrid.generation_config = reasoner.model.generation_config
    for model in (hybrid, reasoner.model):
        model.set_attn_implementation("float32_sdpa")
    recipe = Recipe(tokens, muon_learning_rate=0.01, batch_tokens=2048, warmup=0.02, decay=1.0)
    optimizers = build_optimizers(hybrid, recipe)
    while seen < tokens:
        name = f"hybrid/{seed}/{chunk}"
        examples = draw_examples(reasoner.tokenizer, 512, name, 7, True, SECOND_CYCLE)
        for batch in batches_by_length(examples, recipe.batch_tokens, Random(name)):
            loss = divergence(hybrid, reasoner.model, batch)
            factor = learning_rate_factor(seen, recipe, False)
            take_step(hybrid, loss, optimizers, recipe, factor)
            seen += batch[0].size
            progress("teach", min(seen, tokens), tokens, f"KL {loss.item():.3f}")
            if seen >= tokens:
                break
        chunk += 1
        hybrid.save_pretrained(folder)
        reasoner.tokenizer.save_pretrained(folder)
        replace_file(record, json.dumps([seen, chunk]).encode())
    return folder


class Between(Study):
    """Beside policies as they are made, those to which nothing is added between their layers."""

    def trained(self, form: str, rate: float, seed: int) -> Path:
        """As `Study.trained`."""
        with made_as(form):
            return super().trained(form, rate, seed)

    def rewards(self, policy: Path, split: str) -> FloatArray:
        """As `Study.rewards`."""
        with made_as(policy.name.replace("-", " ")):
            return super().rewards(policy, split)


@contextmanager
def made_as(form: str) -> Iterator[None]:
    """Policies are made so here; with `NOTHING` none is, untrained, the base."""
    with ExitStack() as patches:
        if form.startswith(NOTHING):
            patches.enter_context(mock.patch.object(StoppingPolicy, "_add", return_value=None))
            patches.enter_context(mock.patch("ospruner.train.untrained.check_tail"))
        yield


def main() -> None:
    """Teaches, labels, trains, measures, prints a table, and the numbers as one JSON object."""
    parser = options(__doc__)
    parser.set_defaults(run=Path("runs/hybrid"), rates=[1, 4])
    parser.add_argument("--tokens", type=int, default=1_400_000, help="that the hybrid is taught")
    parser.add_argument("--problems", type=int, nargs=3, default=[800, 500, 200], help="train, ...")
    args = timing.parse(parser)
    with PhaseBars(Console()) as bars:
        args.base = taught(args.run, args.tokens, args.seed, bars)
        how = {"seed": args.seed, "progress": bars, "step_stride": 2, **LABELLING}
        for split, problems in zip(SPLITS, args.problems, strict=True):
            file = write_split(args.run, split, problems, args.seed)
            ospruner.label(args.base, file, out=args.run / "labels" / split, **how)
        study = Between(args, FORMS, args.run / "policies", bars)
        found: dict[str, Any] = {"forms": study.measured()}
        for split in SPLITS:
            found[f"{split}_full"] = float(study.judged(split).split.table.full_correct.mean())
    print(report(found["forms"]))
    found |= {name: getattr(args, name) for name in ("tokens", "problems", "seed")}
    timing.print_last_line(found, args.json)


if __name__ == "__main__":
    main()
