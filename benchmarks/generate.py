"""Speed of generate with a stopping policy, against plain generate on the same prompts and seeds.

    OMP_NUM_THREADS=1 python benchmarks/generate.py [--quick] [--json FILE] [--seed N]
        [--before DIR --before-python FILE]

Both arms sample from the same random weights; a logits processor, in both alike, ends a paragraph
every 40 tokens and at half of the trace, rows of a batch at different ones. The policy is on and
never stops (the tokens are checked to be the same), or stops at half of the trace and answers with
8 tokens.

Plain generate and the arm with the policy take their decode steps in turn, each timed; of each
step the least time of all runs counts (`timing.paired_ratio`). What comes before the first new
token, and outside generate, is left out.
"""

import copy
import itertools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any

import timing
import torch
from bases import NEVER, Shape, random_base, shape_of, words_of
from timing import Ratio, Timed
from transformers import AutoTokenizer, LogitsProcessorList

from ospruner.demo import REASONER
from ospruner.train.untrained import untrained

GAP = 40  # tokens from a paragraph's end to the next
PROMPT_TOKENS, TRACE_TOKENS, ANSWER_TOKENS = 128, 96, 8
TUNINGS = {"layers": "", "queries": "queries_"}
"""What stands before the names of each tuning's numbers."""
SAMPLED: dict[str, Any] = {"max_new_tokens": TRACE_TOKENS, "do_sample": True}
SAMPLED |= {"temperature": 0.6, "top_p": 0.95, "top_k": 0}
Pause = Callable[[], None]
LOW = -1e9  # not -inf, which forbids what a stop policy has to force, and is refused


class Stepwise:
    """A call in a thread of its own, which `step` lets go on until it pauses or ends.

    What it draws in a step depends on the seed and the step's number alone.

    Args:
        seed: of its draws.
        call: is given `pause`, which ends a step and returns when the next one begins.
    """

    def __init__(self, seed: int, call: Callable[[Pause], Any]) -> None:
        self._seeds = itertools.count(1_000 * seed)
        self._go: SimpleQueue[None] = SimpleQueue()
        self._paused: SimpleQueue[bool] = SimpleQueue()
        self._running = ThreadPoolExecutor(1).submit(self._run, call)
        self._paused.get()  # before its first step

    def step(self) -> bool:
        """Goes on to the next pause; whether there is one."""
        self._go.put(None)
        return self._paused.get()

    def _run(self, call: Callable[[Pause], Any]) -> Any:
        try:
            self._pause()
            return call(self._pause)
        finally:
            self._paused.put(False)

    def _pause(self) -> None:
        self._paused.put(True)
        self._go.get()
        torch.manual_seed(next(self._seeds))

    @property
    def result(self) -> Any:
        """What the call returned."""
        return self._running.result()


class Bench:
    """A base, alone and with policies, that generates with and without them step by step.

    Its weights are random; `built` goes to `random_base`: dtype, attention.
    """

    def __init__(self, shape: Shape, seed: int, **built: str) -> None:
        self.seed = seed
        tokenizer: Any = AutoTokenizer.from_pretrained(REASONER)
        self.base = random_base(shape, tokenizer, 512, seed, **built)
        # The same weights without the policies' hooks: both arms are within generate at once.
        shared = {id(one): one for one in (*self.base.parameters(), *self.base.buffers())}
        self.alone: Any = copy.deepcopy(self.base, shared)
        self.models = {one: untrained(self.base, tokenizer, tuning=one) for one in TUNINGS}
        self.fmt = self.models["queries"].token_format
        self.words = torch.tensor(words_of(self.fmt), device=self.base.device)

    def _write(self, generate: Callable[..., Any], batch: int, pause: Pause) -> torch.Tensor:
        """Prompts and traces, (B, P + T) tokens; prompts and paragraphs are those of all arms."""
        draw = random.Random(f"{self.seed} {batch}")
        ids = [draw.choices(self.words.tolist(), k=PROMPT_TOKENS) for _ in range(batch)]
        prompts = torch.tensor(ids, device=self.base.device)
        rows, half = torch.arange(batch), PROMPT_TOKENS + TRACE_TOKENS // 2

        def paragraphs(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            """Shapes the scores (B, V) of the next token."""
            pause()
            shaped = torch.full_like(scores, LOW)
            shaped[:, self.words[1:]] = scores[:, self.words[1:]]
            after = ids.shape[1] + 1 - half  # each row's ends lie 5 tokens after the last one's
            ends = rows if after == 0 else rows[(after - 5 * rows) % GAP == 0]
            shaped[ends] = LOW
            shaped[ends, self.words[0]] = 0.0
            return shaped

        inputs = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
        shaped_by = LogitsProcessorList([paragraphs])
        written: torch.Tensor = generate(**inputs, **SAMPLED, logits_processor=shaped_by)
        return written

    def ratios(self, batch: int, kind: str, tuning: str, runs: int) -> list[Ratio]:
        """Tokens/s over plain (kind "never"), or time over plain ("half"): wall clock, CPU time.

        Raises:
            RuntimeError: an arm does not write what it is said to write.
        """
        half = {"min_thinking_tokens": TRACE_TOKENS // 2, "max_answer_tokens": ANSWER_TOKENS}
        told = NEVER if kind == "never" else {"mode": "threshold", "threshold": 0.0, **half}
        pruned = partial(self.models[tuning].generate, stop_policy=told)
        writers = [partial(self._write, one, batch) for one in (self.alone.generate, pruned)]
        times: dict[str, list[list[Timed]]] = {"plain": [], "pruned": []}
        for run in range(runs):
            arms = [Stepwise(self.seed, write) for write in writers]
            steppers = {name: arm.step for name, arm in zip(times, arms, strict=True)}
            for name, steps in timing.in_turn(steppers, run).items():
                times[name].append(steps[1:])  # without the prompt's
            if wrong := self._unlike(kind, tuning, *(arm.result for arm in arms)):
                raise RuntimeError(f"{tuning}, batch {batch}: {wrong}")
        first, second = times.values()
        return timing.clock_ratios(*((second, first) if kind == "never" else (first, second)))

    def _unlike(self, kind: str, tuning: str, plain: torch.Tensor, pruned: torch.Tensor) -> str:
        """What is wrong with the tokens of two arms; "" where nothing is."""
        if kind == "never":
            if not torch.equal(plain, pruned):
                return "a policy that never stops changed the tokens"
            few = min(len(record.step_ends) for record in self.models[tuning].last_stop) < 2
            return "too few paragraph ends: the trace is too short to measure" * few
        kept = PROMPT_TOKENS + TRACE_TOKENS // 2
        if pruned.shape[1] != kept + len(self.fmt.forced_suffix()) + ANSWER_TOKENS:
            return f"the stopped rows have {pruned.shape[1]} tokens"
        same = torch.equal(pruned[:, :kept], plain[:, :kept])
        return "a policy changed the tokens before its stop" * (not same)


def main() -> None:
    """Runs the benchmark; the last line is JSON."""
    sizes = {"runs": (6, 2, "timed runs of each pair of arms")}
    parser = timing.options(__doc__, "a third of the runs: two minutes", before=True, sizes=sizes)
    parser.add_argument("--shape", default="512", help="the base's: tiny, 7b, or a width")
    parser.add_argument("--dtype", default="float32", help="the base's")
    parser.add_argument("--attention", default="sdpa", help="its implementation")
    args = timing.parse(parser)
    shape = shape_of(args.shape)
    bench = Bench(shape, args.seed, dtype=args.dtype, attention=args.attention)
    said = f"prompt {PROMPT_TOKENS} and trace {TRACE_TOKENS} tokens, a paragraph's end every {GAP}"
    print(f"{shape}, n=2, {said}; {args.runs} runs, steps in turn\n{timing.environment()}\n")
    result: dict[str, Any] = {"shape": args.shape, "seed": args.seed, "runs": args.runs}
    cases = ((1, "never"), (1, "half"), (8, "never"))
    for (batch, kind), (tuning, prefix) in itertools.product(cases, TUNINGS.items()):
        name = f"never_stop_ratio_batch{batch}" if kind == "never" else "half_stop_time_ratio"
        said = "tokens/s, never stopping" if kind == "never" else "time, stopping at half"
        ratios = bench.ratios(batch, kind, tuning, args.runs)
        result |= timing.show(prefix + name, f"{said}, {tuning}, batch {batch}", ratios)
    timing.print_last_line(result, args.json)


if __name__ == "__main__":
    main()
