"""Speed of generate with a stopping policy, against plain generate on the same prompts and seeds.

    OMP_NUM_THREADS=1 python benchmarks/generate.py [--quick] [--json FILE] [--seed N]

Both arms sample from the same random weights; a logits processor, in both alike, ends a paragraph
about every 40 tokens, whatever the weights write. The policy is on and never stops (the tokens are
checked to be the same), or stops at half of the trace and answers with 8 tokens.

Plain generate and the arm with the policy take their decode steps in turn, each timed, so that
what slows the machine slows both; of each step the least time of all runs counts
(`timing.paired_ratio`). What comes before the first new token, and outside generate, is left out.
"""

from __future__ import annotations

import argparse
import copy
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from timing import Ratio, Timed, environment, paired_ratio, print_last_line
from transformers import (
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from modeling_ospruner import TokenFormat
from modeling_ospruner.formats_ospruner import BREAK, ENDS_NEWLINE, VISIBLE
from ospruner.demo import REASONER
from ospruner.train.untrained import untrained

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


def breaks_of(fmt: TokenFormat, vocabulary: int) -> tuple[int, list[int]]:
    """The token that ends a paragraph, and those that random weights must not write."""
    # A paragraph without anything to see does not end: random weights may write nothing else.
    invisible = [i for i, kind in enumerate(fmt.kinds) if not kind & VISIBLE]
    breaks = [i for i, kind in enumerate(fmt.kinds) if kind & (BREAK | ENDS_NEWLINE)]
    unwritten = range(len(fmt.kinds), vocabulary)  # ids without a text
    own = next(i for i in breaks if fmt.kinds[i] & BREAK and fmt.kinds[i] & VISIBLE)
    marks = (*fmt.brace_texts, *fmt.added_ids, fmt.think_end_id, *fmt.eos_ids)
    return own, [*breaks, *invisible, *marks, *unwritten]


class Turns:
    """Lets calls of generate run step by step in turn, each in a thread of its own.

    A call's logits processor says `pause` before each token. Then its random state is put away,
    and the other call goes on to its own next token.

    Args:
        seed: of torch's random state, of each call.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.steps: dict[str, list[Timed]] = {}
        self._go: dict[str, threading.Semaphore] = {}
        self._back = threading.Semaphore(0)
        self._done: set[str] = set()
        self._began = Timed(0.0, 0.0)

    def run(self, calls: Mapping[str, Callable[[], Any]], turn: int) -> dict[str, Any]:
        """What the calls return; `steps` then holds the times of their steps.

        Args:
            calls: by name.
            turn: of the runs; who takes the first step changes with it.
        """
        self._done.clear()
        with ThreadPoolExecutor(len(calls)) as threads:
            futures = {}
            for name, call in calls.items():
                self._go[name], self.steps[name] = threading.Semaphore(0), []
                futures[name] = threads.submit(self._thread, name, call)
            while left := [name for name in calls if name not in self._done]:
                # Who goes first changes from step to step, and from run to run.
                for name in left if turn % 2 else left[::-1]:
                    self._go[name].release()
                    self._back.acquire()
                turn += 1
        self.steps = {name: steps[1:] for name, steps in self.steps.items()}  # without the prompt's
        return {name: future.result() for name, future in futures.items()}

    def _thread(self, name: str, call: Callable[[], Any]) -> Any:
        self._go[name].acquire()
        torch.manual_seed(self.seed)
        self._began = _now()
        try:
            return call()
        finally:
            self._done.add(name)
            self._back.release()

    def pause(self, name: str) -> None:
        """Ends a call's step; returns when its next one begins."""
        now = _now()
        taken = Timed(
            now.wall_seconds - self._began.wall_seconds, now.cpu_seconds - self._began.cpu_seconds
        )
        self.steps[name].append(taken)
        on_gpu = torch.cuda.is_available()
        state = torch.cuda.get_rng_state() if on_gpu else torch.get_rng_state()
        self._back.release()
        self._go[name].acquire()
        (torch.cuda.set_rng_state if on_gpu else torch.set_rng_state)(state)
        self._began = _now()


def _now() -> Timed:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Timed(time.perf_counter(), time.process_time())


class Paragraphs(LogitsProcessor):
    """Ends paragraphs at given places, and lets nothing else end a paragraph, thinking or text.

    Args:
        break_id: the token written there.
        banned_ids: tokens that are never sampled.
        places: for each row, after how many generated tokens.
        prompt_tokens: the prompt's length.
        pause: called before each token.
    """

    def __init__(
        self,
        break_id: int,
        banned_ids: Sequence[int],
        places: Sequence[frozenset[int]],
        prompt_tokens: int,
        pause: Callable[[], None],
    ) -> None:
        self.break_id = break_id
        self.banned = torch.tensor(banned_ids)
        self.places = places
        self.prompt_tokens = prompt_tokens
        self.pause = pause

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Shapes the scores (B, V) of the next token."""
        self.pause()
        written = input_ids.shape[1] - self.prompt_tokens
        scores = scores.index_fill(-1, self.banned.to(scores.device), -torch.inf)
        for row, places in enumerate(self.places):
            if written + 1 in places:
                scores[row] = -torch.inf
                scores[row, self.break_id] = 0.0
        return scores


class Bench:
    """A base, alone and with policies, that generates with and without them step by step."""

    def __init__(self, shape: Shape, args: argparse.Namespace) -> None:
        self.prompt_tokens, self.trace_tokens = args.prompt_tokens, args.trace_tokens
        self.seed = args.seed
        self.tokenizer = AutoTokenizer.from_pretrained(REASONER)
        positions = args.prompt_tokens + args.trace_tokens + 64
        self.base = random_base(
            shape, self.tokenizer, positions, args.seed, args.device, args.dtype, args.attention
        )
        # The same weights without the policies' hooks: both arms are within generate at once.
        shared = {id(one): one for one in (*self.base.parameters(), *self.base.buffers())}
        self.alone: Any = copy.deepcopy(self.base, shared)
        self.models = {
            tuning: untrained(self.base, self.tokenizer, args.policy_layers, tuning)
            for tuning in args.tunings
        }
        self.fmt = fmt = self.models[args.tunings[0]].token_format
        self.break_id, self.banned = breaks_of(fmt, shape.vocabulary)

    def _inputs(self, batch: int, pause: Callable[[], None]) -> dict[str, Any]:
        """Prompts, paragraph ends and sampling, the same for both arms."""
        draw = random.Random(f"{self.seed} {batch}")
        allowed = sorted(set(range(len(self.tokenizer))) - set(self.banned))
        prompt = [draw.choices(allowed, k=self.prompt_tokens) for _ in range(batch)]
        places = [frozenset(self._places(draw)) for _ in range(batch)]
        ids = torch.tensor(prompt, device=self.base.device)
        paragraphs = Paragraphs(self.break_id, self.banned, places, self.prompt_tokens, pause)
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

    def half(self) -> dict[str, Any]:
        """Stops at the paragraph's end at half of the trace."""
        return {
            "mode": "threshold",
            "threshold": 0.0,
            "min_thinking_tokens": self.trace_tokens // 2,
            "max_answer_tokens": ANSWER_TOKENS,
        }

    def ratios(self, batch: int, kind: str, tuning: str, runs: int) -> tuple[Ratio, Ratio]:
        """Tokens/s over plain (kind "never"), or time over plain ("half"): wall clock, CPU time.

        Raises:
            RuntimeError: an arm does not write what it is said to write.
        """
        model, turns = self.models[tuning], Turns(self.seed)
        settings = NEVER if kind == "never" else self.half()
        times: dict[str, list[list[Timed]]] = {"plain": [], "pruned": []}
        for run in range(runs):
            inputs = {name: self._inputs(batch, partial(turns.pause, name)) for name in times}
            pruned = partial(model.generate, **inputs["pruned"], stop_policy=settings)
            calls = {"plain": partial(self.alone.generate, **inputs["plain"]), "pruned": pruned}
            written = turns.run(calls, run)
            for name, of_arm in times.items():
                of_arm.append(turns.steps[name])
            self._check(kind, tuning, written["plain"], written["pruned"])
        plain, own = (
            [[[vars(s)[clock] for s in steps] for steps in of_arm] for clock in vars(_now())]
            for of_arm in times.values()
        )
        pairs = zip(own, plain, strict=True) if kind == "never" else zip(plain, own, strict=True)
        wall, cpu = (paired_ratio(first, second) for first, second in pairs)
        return wall, cpu

    def _check(self, kind: str, tuning: str, plain: torch.Tensor, pruned: torch.Tensor) -> None:
        if kind == "never":
            if not torch.equal(plain, pruned):
                raise RuntimeError(f"a policy ({tuning}) that never stops changed the tokens")
            if min(len(record.step_ends) for record in self.models[tuning].last_stop) < 2:
                raise RuntimeError("too few paragraph ends: the trace is too short to measure")
            return
        kept = self.prompt_tokens + self.trace_tokens // 2
        if pruned.shape[1] != kept + len(self.fmt.forced_suffix()) + ANSWER_TOKENS:
            raise RuntimeError(f"the stopped rows have {pruned.shape[1]} tokens")
        if not torch.equal(pruned[:, :kept], plain[:, :kept]):
            raise RuntimeError(f"a policy ({tuning}) changed the tokens before its stop")

    def tail_over_base(self, tuning: str) -> float:
        """The policy's weights over the base's."""
        policy, base = (
            sum(p.numel() * p.element_size() for p in module.parameters())
            for module in (self.models[tuning].policy, self.base)
        )
        return policy / base


def main() -> None:
    """Runs the benchmark."""
    args = _arguments()
    shape = SHAPES[args.shape]
    bench = Bench(shape, args)
    print(
        f"{shape.layers} layers, hidden {shape.hidden}, n={args.policy_layers}, {args.dtype}, "
        f"prompt {args.prompt_tokens} and trace {args.trace_tokens} tokens, a paragraph's end "
        f"every {GAPS[0]}-{GAPS[-1]}; {args.runs} runs, step by step in turn\n{environment()}\n"
    )
    result: dict[str, Any] = {"shape": args.shape, "seed": args.seed, "runs": args.runs}
    print(f"{'':44}{'wall clock':26}CPU time")
    for batch in args.batches:
        kinds = ("never", "half") if batch == args.batches[0] else ("never",)
        for kind, tuning in ((kind, tuning) for kind in kinds for tuning in args.tunings):
            wall, cpu = bench.ratios(batch, kind, tuning, args.runs)
            name = f"never_stop_ratio_batch{batch}" if kind == "never" else "half_stop_time_ratio"
            name = name if tuning == "layers" else f"{tuning}_{name}"
            result |= {name: wall.median, f"{name}_interval": [wall.low, wall.high]}
            result |= {f"{name}_cpu": cpu.median, f"{name}_cpu_interval": [cpu.low, cpu.high]}
            said = "tokens/s, never stopping" if kind == "never" else "time, stopping at half"
            print(f"{f'{said}, {tuning}, batch {batch}':44}{wall!s:26}{cpu}", flush=True)
    for tuning in args.tunings:
        share = bench.tail_over_base(tuning)
        result["tail_over_base" if tuning == "layers" else f"{tuning}_tail_over_base"] = share
        print(f"{f'weights of the tail, {tuning}':44}{share:.1%} of the base's")
    print_last_line(result, args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a third of the runs: two minutes")
    parser.add_argument("--shape", choices=SHAPES, default="small", help="the base's sizes")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--runs", type=int, help="timed runs of each pair of arms (default: 6)")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--trace-tokens", type=int, default=96)
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
    args.runs = args.runs or (2 if args.quick else 6)
    return args


if __name__ == "__main__":
    main()
