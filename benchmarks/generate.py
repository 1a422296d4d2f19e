"""Speed of generate with a stopping policy, against plain generate on the same prompts and seeds.

    OMP_NUM_THREADS=1 python benchmarks/generate.py [--quick] [--json FILE] [--seed N]

Both arms sample from the same random weights; a logits processor, in both arms alike, ends a
paragraph about every 40 tokens, for random weights don't. The policy is on and never stops (the
tokens are checked to be the same), or stops at half of the trace and answers with 8 tokens.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timing import Ratio, Timed, environment, interleaved, median_ratio, print_last_line, timed
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.formats_ospruner import BREAK, ENDS_NEWLINE
from ospruner.train.toy.shipped import SHIPPED

GAPS = range(20, 61)  # tokens between paragraph ends; 40 on average
ANSWER_TOKENS = 8
NEVER = {"mode": "threshold", "threshold": 1.0, "answer": "free"}


@dataclass(frozen=True)
class Shape:
    """A base's sizes. The vocabulary's share of the work is about R1-Distill-Qwen-7B's."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int


SHAPES = {
    "tiny": Shape(4, 64, 128, 4, 2, 1024),  # for the benchmark's own test
    "quick": Shape(28, 128, 512, 4, 2, 3072),
    "small": Shape(28, 512, 2048, 8, 2, 12288),
    "7b": Shape(28, 3584, 18944, 28, 4, 152064),
}


def random_base(
    shape: Shape,
    tokenizer: PreTrainedTokenizerBase,
    positions: int,
    seed: int,
    device: str,
    dtype: str,
    attention: str = "sdpa",
) -> Qwen2ForCausalLM:
    """A Qwen2 of random weights, on the device."""
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        base = Qwen2ForCausalLM._from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=attention
        )
    return base.eval()


class Paragraphs(LogitsProcessor):
    """Ends paragraphs at given places, and lets nothing else end a paragraph, thinking or text.

    Args:
        break_id: the token written there.
        banned_ids: tokens that are never sampled.
        places: for each row, after how many generated tokens.
        prompt_tokens: the prompt's length.
    """

    def __init__(
        self,
        break_id: int,
        banned_ids: Sequence[int],
        places: Sequence[frozenset[int]],
        prompt_tokens: int,
    ) -> None:
        self.break_id = break_id
        self.banned = torch.tensor(banned_ids)
        self.places = places
        self.prompt_tokens = prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Shapes the scores (B, V) of the next token."""
        written = input_ids.shape[1] - self.prompt_tokens
        scores = scores.index_fill(-1, self.banned.to(scores.device), -torch.inf)
        for row, places in enumerate(self.places):
            if written + 1 in places:
                scores[row] = -torch.inf
                scores[row, self.break_id] = 0.0
        return scores


class Bench:
    """A model with a policy, and the two arms at one batch size after the other."""

    def __init__(self, shape: Shape, args: argparse.Namespace) -> None:
        from transformers import AutoTokenizer

        self.prompt_tokens, self.trace_tokens = args.prompt_tokens, args.trace_tokens
        self.seed = args.seed
        tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
        positions = args.prompt_tokens + args.trace_tokens + 64
        base = random_base(
            shape, tokenizer, positions, args.seed, args.device, args.dtype, args.attention
        )
        self.model = OSPrunerForCausalLM.untrained(base, tokenizer, args.policy_layers)
        fmt = self.model.token_format
        breaks = [i for i, kind in enumerate(fmt.kinds) if kind & (BREAK | ENDS_NEWLINE)]
        unwritten = range(len(fmt.kinds), shape.vocabulary)  # ids without a text
        self.break_id = tokenizer.encode("\n\n")[0]
        self.banned = [*breaks, *fmt.brace_texts, *fmt.added_ids, *unwritten]

    def inputs(self, batch: int, pair: int) -> dict[str, Any]:
        """Prompts, paragraph ends and sampling of one pair, for both arms."""
        draw = random.Random(f"{self.seed} {batch} {pair}")
        size = len(self.model.tokenizer)  # type: ignore[arg-type]
        allowed = sorted(set(range(size)) - set(self.banned))
        prompt = [draw.choices(allowed, k=self.prompt_tokens) for _ in range(batch)]
        places = [frozenset(self._places(draw)) for _ in range(batch)]
        ids = torch.tensor(prompt, device=self.model.device)
        paragraphs = Paragraphs(self.break_id, self.banned, places, self.prompt_tokens)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "logits_processor": LogitsProcessorList([paragraphs]),
            "max_new_tokens": self.trace_tokens,
            "do_sample": True,
            "temperature": 0.6,
            "top_p": 0.95,
            "top_k": 0,
        }

    def _places(self, draw: random.Random) -> list[int]:
        """After how many tokens paragraphs end; one ends at half of the trace, none just before."""
        half = self.trace_tokens // 2
        places, at = [half], draw.choice(GAPS)
        while at <= self.trace_tokens:
            if abs(at - half) > 1:
                places.append(at)
            at += draw.choice(GAPS)
        return places

    def run(self, batch: int, pair: int, stop_policy: Any) -> torch.Tensor:
        """One arm: the ids (B, S)."""
        inputs = self.inputs(batch, pair)
        torch.manual_seed(pair)
        output: torch.Tensor = self.model.generate(**inputs, stop_policy=stop_policy)
        return output

    def half(self) -> dict[str, Any]:
        """Stops at the paragraph's end at half of the trace."""
        return {
            "mode": "threshold",
            "threshold": 0.0,
            "min_thinking_tokens": self.trace_tokens // 2,
            "max_answer_tokens": ANSWER_TOKENS,
        }

    def check(self, batch: int) -> None:
        """Refuses to time arms that do not do what they are said to do.

        Raises:
            RuntimeError: they write other tokens.
        """
        plain, never = self.run(batch, 0, False), self.run(batch, 0, NEVER)
        if not torch.equal(plain, never):
            raise RuntimeError("a policy that never stops changed the tokens")
        if min(len(record.step_ends) for record in self.model.last_stop) < 2:
            raise RuntimeError("too few paragraph ends: the trace is too short to measure")
        half = self.run(batch, 0, self.half())
        suffix = len(self.model.token_format.forced_suffix())
        kept = self.prompt_tokens + self.trace_tokens // 2
        if half.shape[1] != kept + suffix + ANSWER_TOKENS:
            raise RuntimeError(f"the stopped rows have {half.shape[1]} tokens")
        if not torch.equal(half[:, :kept], plain[:, :kept]):
            raise RuntimeError("a policy that stops changed the tokens before its stop")

    def memory(self, batch: int) -> dict[str, float]:
        """What the policy takes beside the base, in MiB, and its caches' ratio to the base's."""
        policy, kept = self.model.policy, []
        new_cache = policy.new_cache

        def keep_cache() -> Any:
            kept.append(new_cache())
            return kept[-1]

        policy.new_cache = keep_cache  # type: ignore[method-assign]
        try:
            inputs = self.inputs(batch, 0)
            output = self.model.generate(**inputs, stop_policy=NEVER, return_dict_in_generate=True)
        finally:
            policy.new_cache = new_cache  # type: ignore[method-assign]
        of_base, of_policy = _cache_bytes(output.past_key_values), sum(map(_cache_bytes, kept))
        weights = sum(p.numel() * p.element_size() for p in policy.parameters())
        base = sum(p.numel() * p.element_size() for p in self.model.base.parameters())
        return {
            "tail_mib": weights / 2**20,
            "tail_over_base": weights / base,
            "cache_mib": of_policy / 2**20,
            "cache_over_base": of_policy / of_base,
        }

    def policy_share(self, batch: int) -> float:
        """The share of a never-stopping run that passes inside the policy."""
        inside: list[Timed] = []
        forward = self.model.policy.forward

        def clocked(*args: Any, **kwargs: Any) -> Any:
            kept: list[Any] = []
            inside.append(timed(lambda: kept.append(forward(*args, **kwargs))))
            return kept[0]

        self.model.policy.forward = clocked  # type: ignore[method-assign]
        try:
            whole = timed(lambda: self.run(batch, 0, NEVER))
        finally:
            self.model.policy.forward = forward  # type: ignore[method-assign]
        return sum(one.wall_seconds for one in inside) / whole.wall_seconds


def _cache_bytes(cache: Any) -> int:
    """Of the keys and values of the tokens that a cache holds."""
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    return sum(t.numel() * t.element_size() for t in tensors)


def _ratios(pairs: list[tuple[Timed, Timed]], tokens_per_second: bool) -> tuple[Ratio, Ratio]:
    """Second arm over first, by wall clock and by CPU time."""
    ratios = []
    for kind in ("wall_seconds", "cpu_seconds"):
        times = [vars(two)[kind] / vars(one)[kind] for one, two in pairs]
        ratios.append(median_ratio([1 / t for t in times] if tokens_per_second else times))
    return ratios[0], ratios[1]


def main() -> None:
    """Runs the benchmark."""
    args = _arguments()
    shape = SHAPES[args.shape]
    bench = Bench(shape, args)
    print(
        f"{shape.layers} layers, hidden {shape.hidden}, n={args.policy_layers}, {args.dtype}, "
        f"prompt {args.prompt_tokens} and trace {args.trace_tokens} tokens, a paragraph's end "
        f"every {GAPS[0]}-{GAPS[-1]}; medians of {args.pairs} pairs in turn\n{environment()}\n"
    )
    result: dict[str, Any] = {"shape": args.shape, "seed": args.seed, "pairs": args.pairs}
    width = 34
    print(f"{'':{width}}{'wall clock':26}CPU time")
    for batch in args.batches:
        bench.check(batch)
        arms = [("never_stop_ratio", NEVER, True, "tokens/s, never stopping")]
        if batch == args.batches[0]:
            arms.append(("half_stop_time_ratio", bench.half(), False, "time, stopping at half"))
        for key, policy, rate, label in arms:
            pairs = interleaved(
                lambda pair, b=batch: bench.run(b, pair, False),
                lambda pair, b=batch, p=policy: bench.run(b, pair, p),
                args.pairs,
            )
            wall, cpu = _ratios(pairs, tokens_per_second=rate)
            name = f"{key}_batch{batch}" if rate else key
            result |= {name: wall.median, f"{name}_interval": [wall.low, wall.high]}
            result[f"{name}_cpu"] = cpu.median
            print(f"{f'{label}, batch {batch}':{width}}{wall!s:26}{cpu}", flush=True)
        memory = bench.memory(batch)
        result[f"memory_batch{batch}"] = memory
        result[f"policy_share_batch{batch}"] = bench.policy_share(batch)
        print(
            f"{f'extra memory, batch {batch}':{width}}tail {memory['tail_mib']:.1f} MiB "
            f"({memory['tail_over_base']:.1%} of the base), cache {memory['cache_mib']:.2f} MiB "
            f"({memory['cache_over_base']:.1%} of the base's; n/L is "
            f"{args.policy_layers / shape.layers:.1%})\n"
            f"{f'inside the policy, batch {batch}':{width}}"
            f"{result[f'policy_share_batch{batch}']:.1%} of the time",
            flush=True,
        )
    print_last_line(result, args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="smaller and shorter: a minute")
    parser.add_argument("--shape", choices=SHAPES, help="the base's sizes (default: small)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--pairs", type=int, help="timed pairs an arm (default: 9)")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--trace-tokens", type=int, help="default: 512")
    parser.add_argument("--policy-layers", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention", default="sdpa", help="such as flash_attention_2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="also write the last line there")
    args = parser.parse_args()
    shape, pairs, trace = ("quick", 3, 96) if args.quick else ("small", 9, 512)
    args.shape = args.shape or shape
    args.pairs = args.pairs or pairs
    args.trace_tokens = args.trace_tokens or trace
    return args


if __name__ == "__main__":
    main()
