"""Speed of generate with a stopping policy, against plain generate on the same prompts and seeds.

    OMP_NUM_THREADS=1 python benchmarks/generate.py [--quick] [--json FILE] [--seed N]
        [--before DIR --before-python FILE]

Both arms sample from the same random weights; a logits processor, in both alike, ends a paragraph
about every 40 tokens, whatever the weights write. The policy is on and never stops (the tokens are
checked to be the same), or stops at half of the trace and answers with 8 tokens.

Plain generate and the arm with the policy take their decode steps in turn, each timed; of each
step the least time of all runs counts (`timing.paired_ratio`). What comes before the first new
token, and outside generate, is left out.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import timing
import torch
from timing import NEVER, Ratio, Timed
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
PROMPT_TOKENS, ANSWER_TOKENS = 128, 8
TUNINGS = {"layers": "", "queries": "queries_"}
"""What stands before the names of each tuning's numbers."""


LOW = -1e9  # not -inf, which forbids what a stop policy has to force, and is refused


class Shape(NamedTuple):
    """A base's sizes. The vocabulary's share of the work is about R1-Distill-Qwen-7B's."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int


SHAPES = {
    "tiny": Shape(4, 128, 256, 4, 2, 1024),  # for tests; vLLM on a CPU wants heads of 32
    "small": Shape(28, 512, 2048, 8, 2, 12288),
    "7b": Shape(28, 3584, 18944, 28, 4, 152064),
}


def random_base(
    shape: Shape,
    tokenizer: PreTrainedTokenizerBase,
    positions: int,
    seed: int,
    device: str = "cpu",
    dtype: str = "float32",
    attention: str = "sdpa",
) -> Qwen2ForCausalLM:
    """A Qwen2 of random weights, on the device."""
    config = Qwen2Config(
        **shape._asdict(),
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
    braces = [i for i, text in enumerate(fmt.texts) if not set("{}\\").isdisjoint(text)]
    marks = (*braces, *fmt.added_ids, fmt.think_end_id, *fmt.eos_ids)
    return own, [*breaks, *invisible, *marks, *unwritten]


class Stepwise:
    """A call in a thread of its own, which `step` lets go on until it says `pause` or ends.

    Its draws are its own: torch's random state is put away at each pause.

    Attributes:
        call: what to call; set it before the first step.
    """

    call: Callable[[], Any]

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._pool = ThreadPoolExecutor(1)
        self._running: Future[Any] | None = None
        self._state = torch.empty(0)

    def step(self) -> bool:
        """Goes on to the next pause; whether there is one."""
        cuda = torch.cuda.is_available()
        if self._running is None:
            torch.manual_seed(self._seed)
            self._running = self._pool.submit(self._run)
        else:
            (torch.cuda.set_rng_state if cuda else torch.set_rng_state)(self._state)
            self._go.release()
        self._back.acquire()
        self._state = torch.cuda.get_rng_state() if cuda else torch.get_rng_state()
        return not self._ended

    def _run(self) -> Any:
        self._ended = False
        try:
            return self.call()
        finally:
            self._ended = True
            self._back.release()

    def pause(self) -> None:
        """Ends a step, from within the call; returns when the next one begins."""
        self._back.release()
        self._go.acquire()

    @property
    def result(self) -> Any:
        """What the call returned."""
        assert self._running is not None
        self._pool.shutdown()
        return self._running.result()


@dataclass
class Paragraphs(LogitsProcessor):
    """Ends paragraphs at given places, and lets nothing else end a paragraph, thinking or text.

    Attributes:
        break_id: the token written there.
        banned: ids of tokens that are never sampled.
        places: for each row, after how many generated tokens.
        prompt_tokens: the prompt's length.
        pause: called before each token.
    """

    break_id: int
    banned: torch.Tensor
    places: Sequence[frozenset[int]]
    prompt_tokens: int
    pause: Callable[[], None]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Shapes the scores (B, V) of the next token."""
        self.pause()
        written = input_ids.shape[1] - self.prompt_tokens
        scores = scores.index_fill(-1, self.banned.to(scores.device), LOW)
        for row, places in enumerate(self.places):
            if written + 1 in places:
                scores[row] = LOW
                scores[row, self.break_id] = 0.0
        return scores


class Bench:
    """A base, alone and with policies, that generates with and without them step by step.

    Each arm writes `trace_tokens`; `built` goes to `random_base`: device, dtype, attention.
    """

    def __init__(
        self,
        shape: Shape,
        trace_tokens: int,
        seed: int,
        tunings: Sequence[str] = tuple(TUNINGS),
        **built: str,
    ) -> None:
        self.trace_tokens, self.seed = trace_tokens, seed
        self.tokenizer = AutoTokenizer.from_pretrained(REASONER)
        self.base = random_base(
            shape, self.tokenizer, PROMPT_TOKENS + trace_tokens + 64, seed, **built
        )
        # The same weights without the policies' hooks: both arms are within generate at once.
        shared = {id(one): one for one in (*self.base.parameters(), *self.base.buffers())}
        self.alone: Any = copy.deepcopy(self.base, shared)
        self.models = {
            tuning: untrained(self.base, self.tokenizer, tuning=tuning) for tuning in tunings
        }
        self.fmt = self.models[tunings[0]].token_format
        self.break_id, self.banned = breaks_of(self.fmt, shape.vocab_size)

    def _inputs(self, batch: int, pause: Callable[[], None]) -> dict[str, Any]:
        """Prompts, paragraph ends and sampling, the same for both arms."""
        draw = random.Random(f"{self.seed} {batch}")
        allowed = sorted(set(range(len(self.tokenizer))) - set(self.banned))
        prompt = [draw.choices(allowed, k=PROMPT_TOKENS) for _ in range(batch)]
        places = [frozenset(self._places(draw)) for _ in range(batch)]
        ids = torch.tensor(prompt, device=self.base.device)
        banned = torch.tensor(self.banned)
        paragraphs = Paragraphs(self.break_id, banned, places, PROMPT_TOKENS, pause)
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

    def ratios(self, batch: int, kind: str, tuning: str, runs: int) -> tuple[Ratio, Ratio]:
        """Tokens/s over plain (kind "never"), or time over plain ("half"): wall clock, CPU time.

        Raises:
            RuntimeError: an arm does not write what it is said to write.
        """
        half = {"min_thinking_tokens": self.trace_tokens // 2, "max_answer_tokens": ANSWER_TOKENS}
        told = NEVER if kind == "never" else {"mode": "threshold", "threshold": 0.0, **half}
        pruned = partial(self.models[tuning].generate, stop_policy=told)
        calls = {"plain": self.alone.generate, "pruned": pruned}
        times: dict[str, list[list[Timed]]] = {name: [] for name in calls}
        for run in range(runs):
            arms = {name: Stepwise(self.seed) for name in calls}
            for name, arm in arms.items():
                arm.call = partial(calls[name], **self._inputs(batch, arm.pause))
            taken = timing.in_turn({name: arm.step for name, arm in arms.items()}, run)
            for name, steps in taken.items():
                times[name].append(steps[1:])  # without the prompt's
            self._check(kind, tuning, arms["plain"].result, arms["pruned"].result)
        first, second = times.values()
        return timing.clock_ratios(*((second, first) if kind == "never" else (first, second)))

    def _check(self, kind: str, tuning: str, plain: torch.Tensor, pruned: torch.Tensor) -> None:
        if kind == "never":
            if not torch.equal(plain, pruned):
                raise RuntimeError(f"a policy ({tuning}) that never stops changed the tokens")
            if min(len(record.step_ends) for record in self.models[tuning].last_stop) < 2:
                raise RuntimeError("too few paragraph ends: the trace is too short to measure")
            return
        kept = PROMPT_TOKENS + self.trace_tokens // 2
        if pruned.shape[1] != kept + len(self.fmt.forced_suffix()) + ANSWER_TOKENS:
            raise RuntimeError(f"the stopped rows have {pruned.shape[1]} tokens")
        if not torch.equal(pruned[:, :kept], plain[:, :kept]):
            raise RuntimeError(f"a policy ({tuning}) changed the tokens before its stop")

    def tail_over_base(self, tuning: str) -> float:
        """The policy's weights over the base's."""
        modules = self.models[tuning].policy, self.base
        policy, base = (sum(p.numel() for p in module.parameters()) for module in modules)
        return policy / base


def main() -> None:
    """Runs the benchmark; the last line is JSON."""
    parser = timing.options(__doc__, "a third of the runs: two minutes", before=True)
    parser.add_argument("--shape", choices=SHAPES, default="small", help="the base's sizes")
    parser.add_argument("--runs", type=int, help="timed runs of each pair of arms (default: 6)")
    parser.add_argument("--trace-tokens", type=int, default=96)
    args = timing.parse(parser)
    runs, shape = args.runs or (2 if args.quick else 6), SHAPES[args.shape]
    bench = Bench(shape, args.trace_tokens, args.seed)
    print(
        f"{shape}, n=2, prompt {PROMPT_TOKENS} and trace {args.trace_tokens} tokens, a paragraph's "
        f"end every {GAPS[0]}-{GAPS[-1]}; {runs} runs, steps in turn\n{timing.environment()}\n"
    )
    result: dict[str, Any] = {"shape": args.shape, "seed": args.seed, "runs": runs}
    for batch, kind, tuning in (
        (batch, kind, tuning)
        for batch, kind in ((1, "never"), (1, "half"), (8, "never"))
        for tuning in TUNINGS
    ):
        name = f"never_stop_ratio_batch{batch}" if kind == "never" else "half_stop_time_ratio"
        said = "tokens/s, never stopping" if kind == "never" else "time, stopping at half"
        wall, cpu = bench.ratios(batch, kind, tuning, runs)
        key = TUNINGS[tuning] + name
        result |= timing.show(key, f"{said}, {tuning}, batch {batch}", wall, cpu)
    for tuning, prefix in TUNINGS.items():
        result[f"{prefix}tail_over_base"] = share = bench.tail_over_base(tuning)
        print(f"{f'weights of the tail, {tuning}':46}{share:.1%} of the base's")
    timing.print_last_line(result, args.json)


if __name__ == "__main__":
    main()
