"""Speed of generate with a stopping policy, against plain generate on the same prompts and seeds.

    OMP_NUM_THREADS=1 python benchmarks/generate.py [--quick] [--json FILE] [--seed N]

All arms sample from the same random weights; a logits processor, in all arms alike, ends a
paragraph about every 40 tokens, whatever the weights write. The policy is on and never stops (the
tokens are checked to be the same), or stops at half of the trace and answers with 8 tokens.

Decode steps are timed one by one, in runs of the arms in turn, all on the same prompts and seeds;
of each step the least time of an arm's runs counts (`timing.floor_ratio`). What comes before the
first new token, and outside generate, is not counted.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timing import Timed, environment, floor_ratio, print_last_line, timed
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.states_ospruner import BREAK, ENDS_NEWLINE, VISIBLE
from ospruner.demo.shipped import SHIPPED

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

    Attributes:
        clocks: (wall, CPU) seconds when each token's scores were there; their differences are
            decode steps.
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
        self.clocks: list[tuple[float, float]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Shapes the scores (B, V) of the next token."""
        if scores.is_cuda:
            torch.cuda.synchronize()
        self.clocks.append((time.perf_counter(), time.process_time()))
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
        self.models = {
            tuning: OSPrunerForCausalLM.untrained(base, tokenizer, args.policy_layers, tuning)
            for tuning in args.tunings
        }
        self.model = self.models[args.tunings[0]]
        fmt = self.model.token_format
        # A paragraph without anything to see does not end: random weights may write nothing else.
        invisible = [i for i, kind in enumerate(fmt.kinds) if not kind & VISIBLE]
        breaks = [i for i, kind in enumerate(fmt.kinds) if kind & (BREAK | ENDS_NEWLINE)]
        unwritten = range(len(fmt.kinds), shape.vocabulary)  # ids without a text
        self.break_id = tokenizer.encode("\n\n")[0]
        self.banned = [*breaks, *invisible, *fmt.brace_texts, *fmt.added_ids, *unwritten]

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
        places, at = [half], draw.choice(range(GAPS[0], min(GAPS[-1], half - 2)))
        while at <= self.trace_tokens:
            if abs(at - half) > 1:
                places.append(at)
            at += draw.choice(GAPS)
        return places

    def run(
        self, batch: int, pair: int, stop_policy: Any, tuning: str | None = None
    ) -> torch.Tensor:
        """One arm: the ids (B, S)."""
        return self._run(batch, pair, stop_policy, tuning)[0]

    def steps(self, batch: int, stop_policy: Any, tuning: str) -> tuple[list[float], list[float]]:
        """One arm: the seconds of each decode step, by the clock and of CPU time."""
        clocks = self._run(batch, 0, stop_policy, tuning)[1].clocks
        steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(clocks)]
        return [wall for wall, _ in steps], [cpu for _, cpu in steps]

    def _run(
        self, batch: int, pair: int, stop_policy: Any, tuning: str | None
    ) -> tuple[torch.Tensor, Paragraphs]:
        inputs = self.inputs(batch, pair)
        torch.manual_seed(pair)
        model = self.model if tuning is None else self.models[tuning]
        output: torch.Tensor = model.generate(**inputs, stop_policy=stop_policy)
        return output, inputs["logits_processor"][0]

    def half(self) -> dict[str, Any]:
        """Stops at the paragraph's end at half of the trace."""
        return {
            "mode": "threshold",
            "threshold": 0.0,
            "min_thinking_tokens": self.trace_tokens // 2,
            "max_answer_tokens": ANSWER_TOKENS,
        }

    def check(self, batch: int) -> dict[str, tuple[dict[str, float], float]]:
        """Refuses to time arms that do not do what they are said to do.

        Returns:
            What `never` says of each tuning's policy.

        Raises:
            RuntimeError: they write other tokens.
        """
        plain = self.run(batch, 0, False)
        suffix = len(self.model.token_format.forced_suffix())
        kept = self.prompt_tokens + self.trace_tokens // 2
        found = {}
        for tuning, model in self.models.items():
            tokens, memory, share = self.never(batch, tuning)
            found[tuning] = memory, share
            if not torch.equal(plain, tokens):
                raise RuntimeError(f"a policy ({tuning}) that never stops changed the tokens")
            if min(len(record.step_ends) for record in model.last_stop) < 2:
                raise RuntimeError("too few paragraph ends: the trace is too short to measure")
            half = self.run(batch, 0, self.half(), tuning)
            if half.shape[1] != kept + suffix + ANSWER_TOKENS:
                raise RuntimeError(f"the stopped rows have {half.shape[1]} tokens")
            if not torch.equal(half[:, :kept], plain[:, :kept]):
                raise RuntimeError(f"a policy ({tuning}) changed the tokens before its stop")
        return found

    def never(self, batch: int, tuning: str) -> tuple[torch.Tensor, dict[str, float], float]:
        """A run that never stops, and what the policy takes in it.

        Returns:
            The ids (B, S); the memory beside the base, in MiB, and its caches' ratio to the base's;
            and the share of the time that passes inside the policy.
        """
        model = self.models[tuning]
        policy, kept, inside, outputs = model.policy, [], list[Timed](), list[Any]()
        new_cache, of_steps = policy.new_cache, policy.outputs

        def keep_cache() -> Any:
            kept.append(new_cache())
            return kept[-1]

        def clocked(*args: Any, **kwargs: Any) -> Any:
            inside.append(timed(lambda: outputs.append(of_steps(*args, **kwargs))))
            return outputs.pop()

        def run() -> None:
            torch.manual_seed(0)
            inputs = self.inputs(batch, 0)
            outputs.append(
                model.generate(**inputs, stop_policy=NEVER, return_dict_in_generate=True)
            )

        policy.new_cache, policy.outputs = keep_cache, clocked  # type: ignore[method-assign]
        try:
            whole = timed(run)
        finally:
            policy.new_cache, policy.outputs = new_cache, of_steps  # type: ignore[method-assign]
        (output,) = outputs
        of_base, of_policy = _cache_bytes(output.past_key_values), sum(map(_cache_bytes, kept))
        weights = sum(p.numel() * p.element_size() for p in policy.parameters())
        base = sum(p.numel() * p.element_size() for p in self.model.base.parameters())
        memory = {
            "tail_mib": weights / 2**20,
            "tail_over_base": weights / base,
            "cache_mib": of_policy / 2**20,
            "cache_over_base": of_policy / of_base,
        }
        share = sum(one.wall_seconds for one in inside) / whole.wall_seconds
        return output.sequences, memory, share


def _cache_bytes(cache: Any) -> int:
    """Of the keys and values of the tokens that a cache holds."""
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    return sum(t.numel() * t.element_size() for t in tensors)


def _clocks(runs: list[tuple[list[float], list[float]]]) -> tuple[Any, Any]:
    """Wall and CPU seconds, each (R, steps), of R runs of an arm."""
    return [wall for wall, _ in runs], [cpu for _, cpu in runs]


def main() -> None:
    """Runs the benchmark."""
    args = _arguments()
    shape = SHAPES[args.shape]
    bench = Bench(shape, args)
    print(
        f"{shape.layers} layers, hidden {shape.hidden}, n={args.policy_layers}, {args.dtype}, "
        f"prompt {args.prompt_tokens} and trace {args.trace_tokens} tokens, a paragraph's end "
        f"every {GAPS[0]}-{GAPS[-1]}; {args.runs} runs of each arm in turn\n{environment()}\n"
    )
    result: dict[str, Any] = {"shape": args.shape, "seed": args.seed, "runs": args.runs}
    width = 44
    print(f"{'':{width}}{'wall clock':26}CPU time")
    for batch in args.batches:
        beside = bench.check(batch)  # also the warm-up
        arms: dict[tuple[str, str], Any] = {("plain", args.tunings[0]): False}
        for tuning in args.tunings:
            arms["never", tuning] = NEVER
            if batch == args.batches[0]:
                arms["half", tuning] = bench.half()
        times: dict[tuple[str, str], list[tuple[list[float], list[float]]]]
        times = {arm: [] for arm in arms}
        for number in range(args.runs):
            for arm in list(arms) if number % 2 == 0 else list(arms)[::-1]:
                times[arm].append(bench.steps(batch, arms[arm], arm[1]))
        plain = _clocks(times.pop(("plain", args.tunings[0])))
        for (kind, tuning), taken in times.items():
            # Tokens a second, never stopping: the tokens are the same. Else the time.
            pairs = zip(plain, _clocks(taken), strict=True)
            wall, cpu = (
                floor_ratio(other, own) if kind == "never" else floor_ratio(own, other)
                for own, other in pairs
            )
            name = f"never_stop_ratio_batch{batch}" if kind == "never" else "half_stop_time_ratio"
            name = name if tuning == "layers" else f"{tuning}_{name}"
            result |= {name: wall.median, f"{name}_interval": [wall.low, wall.high]}
            result |= {f"{name}_cpu": cpu.median, f"{name}_cpu_interval": [cpu.low, cpu.high]}
            said = "tokens/s, never stopping" if kind == "never" else "time, stopping at half"
            print(f"{f'{said}, {tuning}, batch {batch}':{width}}{wall!s:26}{cpu}", flush=True)
        for tuning in args.tunings:
            before = "" if tuning == "layers" else f"{tuning}_"
            memory, share = beside[tuning]
            result[f"{before}memory_batch{batch}"] = memory
            result[f"{before}policy_share_batch{batch}"] = share
            print(
                f"{f'extra memory, {tuning}, batch {batch}':{width}}tail "
                f"{memory['tail_mib']:.1f} MiB ({memory['tail_over_base']:.1%} of the base), cache "
                f"{memory['cache_mib']:.2f} MiB ({memory['cache_over_base']:.1%} of the base's; "
                f"n/L is {args.policy_layers / shape.layers:.1%})\n"
                f"{f'inside the policy, {tuning}, batch {batch}':{width}}{share:.1%} of the time",
                flush=True,
            )
    print_last_line(result, args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="shorter; rough")
    parser.add_argument("--shape", choices=SHAPES, help="the base's sizes (default: small)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--runs", type=int, help="timed runs of each arm (default: 6)")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--trace-tokens", type=int, help="default: 96")
    parser.add_argument("--policy-layers", type=int, default=2)
    parser.add_argument(
        "--tunings", nargs="+", default=["layers", "queries"], choices=["layers", "queries"]
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention", default="sdpa", help="such as flash_attention_2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="also write the last line there")
    args = parser.parse_args()
    shape, runs, trace = ("small", 3, 48) if args.quick else ("small", 6, 96)
    args.shape = args.shape or shape
    args.runs = args.runs or runs
    args.trace_tokens = args.trace_tokens or trace
    return args


if __name__ == "__main__":
    main()
