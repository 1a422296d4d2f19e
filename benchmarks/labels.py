"""Cost of labels: tokens computed over unique tokens, and time against encoding each prefix anew.

    OMP_NUM_THREADS=1 python benchmarks/labels.py [--quick] [--json FILE] [--limit N] [--seed N]

The embedded reasoner samples traces, answers after each of their steps, and the answers are graded:
the share of time of each phase. Then what it thought is laid end to end until it is as long as real
traces (trace_shapes.json: R1-Distill-Qwen-7B on MATH-500), and answers are forced where those had
their steps: once by the engine, which computes shared tokens once, and once from batches of whole
prefixes, left-padded, each encoded anew. Both arms use the same stop rule, and their answers are
compared. `unique` are the nodes of the trie over all requests. Where vLLM is installed it forks the
same traces, from blocks of 32 tokens on a CPU.

Near ties are choices that the roundings of a batch could turn, for which a row runs once more by
itself; runs that look for them take turns with runs that do not.

Occupancy is the mean share of a simulated server's streams that are busy until the end of a label
run, a token a tick, on real lengths and steps: once with a barrier after sampling and after forking
each chunk, computed, and once as the package runs it. That of the transformers engine is the mean
share of its batch that a forward pass computes tokens of: both ways are run, on a base of one layer
whose tokens are laid down, with an eighth of the lengths and steps.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import importlib.util
import itertools
import json
import random
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from timing import Timed, environment, median_ratio, print_last_line, timed
from transformers import DynamicCache, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from modeling_ospruner import TokenFormat
from modeling_ospruner.rules_ospruner import last_logits
from ospruner.demo.shipped import MAX_ANSWER_TOKENS, MAX_THINKING_TOKENS, Reasoner, draw_split
from ospruner.engines import (
    Engine,
    ForkedAnswer,
    ForkRequest,
    Sampled,
    SamplingSettings,
    TokenCount,
    TransformersEngine,
)
from ospruner.engines.asking import Ask, AskingEngine, Reply, Server
from ospruner.engines.transformers import rows
from ospruner.engines.transformers.rows import Branch, SamplingRow
from ospruner.eval.grading.boxed import read_box
from ospruner.eval.problems.problem import Problem, user_message
from ospruner.eval.problems.task import Math, prompt_token_ids
from ospruner.eval.schema import LabelSettings
from ospruner.train.labels.making import label
from ospruner.train.labels.rows import TraceKey, grade_rows, wanted_traces

SHAPES = Path(__file__).with_name("trace_shapes.json")

STREAMS, CHUNK = 24, 32

Keys = list[TraceKey]
Shapes = Sequence[dict[str, Any]]


class Script:
    """Tokens of traces and answers that are laid down.

    Args:
        reasoner: whose tokens they are made of.
    """

    def __init__(self, reasoner: Reasoner) -> None:
        encode = reasoner.tokenizer.encode
        self.word, self.step = encode("1", add_special_tokens=False)[0], encode("\n\n")[-1]
        self.answer = list(encode("7}", add_special_tokens=False))

    def trace(self, shape: dict[str, Any]) -> list[int]:
        """A trace of a shape's length, with its steps."""
        ids = [self.word] * shape["tokens"]
        for end in shape["step_ends"][:-1]:
            ids[end - 1] = self.step
        return ids


class Streams(AskingEngine):
    """A server of so many streams, each of which decodes a token a tick; prefill takes no time.

    Args:
        reasoner: whose tokens the traces are made of.
        shapes: of each trace: its tokens and step ends, in the order in which they are asked for.
        streams: requests decoded together.
    """

    def __init__(self, reasoner: Reasoner, shapes: Shapes, streams: int) -> None:
        super().__init__(reasoner.engine.eos_ids, streams)
        self.script = Script(reasoner)
        self.shapes = iter(shapes)
        self.live: list[tuple[int, int, asyncio.Future[None]]] = []  # (ends at, number, reply)
        self.ticks = self.busy = self.asked = 0

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Sequence[Server]]:
        clock = asyncio.create_task(self._tick())
        try:
            yield [self]
        finally:
            clock.cancel()

    def _prepare_sampling(self, settings: SamplingSettings, keys: Sequence[str]) -> None:
        """Nothing is drawn."""

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0)
            if self.live:
                self.ticks += 1
                self.busy += len(self.live)
            while self.live and self.live[0][0] <= self.ticks:
                heapq.heappop(self.live)[2].set_result(None)

    async def ask(self, ask: Ask) -> Reply:
        """Answers after as many ticks as the answer has tokens."""
        script = self.script
        ids = list(script.answer) if ask.scored else script.trace(next(self.shapes))
        self.asked += 1
        reply: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self.live, (self.ticks + len(ids), self.asked, reply))
        await reply
        ends = min(ask.end_ids) if not ask.scored else None  # without a natural answer
        scores = [0.0] * len(ids) if ask.scored else []
        return Reply(
            ids, ends, 0, scores, [1.0] * (len(ids) + (ends is not None)) if ask.scored else []
        )


class InWindows(TransformersEngine):
    """With barriers: all traces that may be begun are sampled, then all are forked."""

    sample_and_fork = Engine.sample_and_fork


class Passes:
    """Counts the tokens that each forward pass of an engine computes.

    Args:
        engine: whose.
    """

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine
        self.before = 0
        self.tokens: list[int] = []

    def __call__(self, *_: object) -> None:
        """Takes note of the pass before."""
        computed = self.engine.counts.computed + self.engine.sample_counts.computed
        self.tokens.append(computed - self.before)
        self.before = computed

    def occupancy(self) -> float:
        """The mean share of the batch, over all passes."""
        self()
        busy = [min(1.0, tokens / self.engine.batch_size) for tokens in self.tokens[1:]]
        return sum(busy) / len(busy)


@contextmanager
def scripted(traces: dict[tuple[int, ...], list[int]], answer: list[int]) -> Iterator[None]:
    """Lets rows and forks of the transformers engine take these tokens, whatever was chosen.

    Args:
        traces: by prompt, with what ends the thinking and the text.
        answer: of every fork.
    """
    row, branch = SamplingRow.push, Branch.push

    def push_row(self: SamplingRow, token: int, *rest: Any) -> bool:
        return row(self, traces[tuple(self.prompt)][len(self.tokens)], *rest)

    def push_branch(self: Branch, token: int, *rest: Any) -> None:
        branch(self, answer[len(self.ids)], *rest)

    with (
        mock.patch.object(SamplingRow, "push", push_row),
        mock.patch.object(Branch, "push", push_branch),
        mock.patch.object(rows, "_ROUNDINGS", 0),
    ):
        yield


def simulated(engine: Engine, reasoner: Reasoner, problems: Sequence[Problem]) -> None:
    """A label run whose traces are laid down."""
    settings = LabelSettings(
        base_model="simulated", max_new_tokens=15_000, max_answer_tokens=MAX_ANSWER_TOKENS
    )
    with tempfile.TemporaryDirectory() as folder:
        label(
            problems, engine, reasoner.tokenizer, reasoner.token_format, settings,
            Path(folder), chunk_traces=CHUNK,
        )  # fmt: skip


def shortened(shape: dict[str, Any]) -> dict[str, Any]:
    """A trace of an eighth of the tokens, with an eighth of the steps."""
    ends = [max(1, end // 8) for end in shape["step_ends"][::-8][::-1]]
    return {"tokens": ends[-1], "step_ends": ends}


def engine_occupancy(
    kind: type[TransformersEngine], reasoner: Reasoner, shapes: Shapes, problems: list[Problem]
) -> tuple[float, int]:
    """The share of a transformers engine's batch that is busy, and its forward passes."""
    fmt, script = reasoner.token_format, Script(reasoner)
    config = Qwen2Config(
        vocab_size=len(reasoner.tokenizer),
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=32_768,
    )
    engine = kind(Qwen2ForCausalLM(config), reasoner.tokenizer, batch_size=STREAMS)
    ends = [fmt.think_end_id, min(engine.eos_ids)]
    traces = {
        tuple(
            prompt_token_ids(problem.id, user_message(problem, fmt.format), reasoner.tokenizer, fmt)
        ): [*script.trace(shape), *ends]
        for problem, shape in zip(problems, shapes, strict=True)
    }
    passes = Passes(engine)
    hook = engine.model.register_forward_pre_hook(passes)
    with scripted(traces, script.answer):
        simulated(engine, reasoner, problems)
    hook.remove()
    return passes.occupancy(), len(passes.tokens) - 1


def occupancies(reasoner: Reasoner, args: argparse.Namespace) -> dict[str, float]:
    """The share of a server's streams that are busy, with barriers and without."""
    real = json.loads(SHAPES.read_text("utf-8"))["traces"]
    drawn = random.Random(args.seed)
    shapes = [shape for _ in range(args.rounds) for shape in drawn.sample(real, len(real))]
    problems = [Problem(f"p{n}", f"What is {n} + 4?", "7") for n in range(len(shapes))]
    server = Streams(reasoner, shapes, STREAMS)
    simulated(server, reasoner, problems)
    ticks = work = 0
    for start in range(0, len(shapes), CHUNK):
        together = shapes[start : start + CHUNK]
        forks = sum(len(shape["step_ends"]) for shape in together)
        for lengths in ([s["tokens"] for s in together], [len(server.script.answer)] * forks):
            free = [0] * STREAMS  # when each stream is free
            for length in lengths:
                heapq.heapreplace(free, free[0] + length)
            ticks += max(free)
            work += sum(lengths)
    shapes = [shortened(shape) for shape in shapes]  # for each token is run
    before = engine_occupancy(InWindows, reasoner, shapes, problems)
    after = engine_occupancy(TransformersEngine, reasoner, shapes, problems)
    return {
        "occupancy_before": work / (STREAMS * ticks),
        "occupancy_after": server.busy / (STREAMS * server.ticks),
        "transformers_occupancy_before": before[0],
        "transformers_occupancy_after": after[0],
        "transformers_passes_before": before[1],
        "transformers_passes_after": after[1],
    }


class Anew:
    """The naive arm: every prefix is a request of its own.

    Args:
        model: the base.
        fmt: its format.
        eos_ids: ids that end a text.
        batch_tokens: tokens, padding included, that are encoded together.
    """

    def __init__(
        self, model: PreTrainedModel, fmt: TokenFormat, eos_ids: frozenset[int], batch_tokens: int
    ) -> None:
        self.model = model
        self.fmt = fmt
        self.eos_ids = eos_ids
        self.batch_tokens = batch_tokens
        self.computed_tokens = 0

    @torch.inference_mode()
    def run(self, requests: Sequence[ForkRequest]) -> list[list[list[int]]]:
        """The answers' ids of each request, in the order of its cuts."""
        suffix = self.fmt.forced_suffix()
        prefixes = [
            ((r, k), [*request.prompt_ids, *request.trace_ids[:cut], *suffix])
            for r, request in enumerate(requests)
            for k, cut in enumerate(request.cuts)
        ]
        prefixes.sort(key=lambda entry: len(entry[1]), reverse=True)
        answers: list[list[list[int]]] = [[[] for _ in request.cuts] for request in requests]
        while prefixes:
            rows = max(1, self.batch_tokens // len(prefixes[0][1]))
            batch, prefixes = prefixes[:rows], prefixes[rows:]
            for ((r, k), _), answer in zip(batch, self._batch([p for _, p in batch]), strict=True):
                answers[r][k] = answer
        return answers

    def _batch(self, prefixes: list[list[int]]) -> list[list[int]]:
        """Greedy answers after prefixes that are left-padded and run together."""
        B, P = len(prefixes), max(map(len, prefixes))
        ids = torch.zeros(B, P, dtype=torch.long)
        mask = torch.zeros(B, P, dtype=torch.long)
        for row, prefix in enumerate(prefixes):
            ids[row, P - len(prefix) :] = torch.tensor(prefix)
            mask[row, P - len(prefix) :] = 1
        cache = DynamicCache(config=self.model.config)
        answers: list[list[int]] = [[] for _ in prefixes]
        rules = [self.fmt.box_state() for _ in prefixes]
        going = set(range(B))
        self.computed_tokens += int(mask.sum())
        while True:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            logits = last_logits(
                self.model,
                input_ids=ids,
                attention_mask=mask if B > 1 else None,  # without padding none is needed
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
            tokens = logits.argmax(-1)
            for row in list(going):
                token = int(tokens[row])
                if token in self.eos_ids:
                    going.discard(row)
                    continue
                answers[row].append(token)
                if rules[row].push(token) or len(answers[row]) == MAX_ANSWER_TOKENS:
                    going.discard(row)
            if not going:
                return answers
            ids = tokens[:, None]
            mask = torch.cat([mask, torch.ones(B, 1, dtype=torch.long)], dim=1)
            self.computed_tokens += len(going)


def sampled_traces(
    reasoner: Reasoner, args: argparse.Namespace
) -> tuple[Keys, list[list[int]], list[Sampled], Timed]:
    """Traces of the reasoner, and how long sampling them took."""
    keys = wanted_traces(draw_split("test", args.problems, args.seed), 1)
    fmt = reasoner.token_format
    prompts = [
        prompt_token_ids(
            key.problem.id, user_message(key.problem, fmt.format), reasoner.tokenizer, fmt
        )
        for key in keys
    ]
    settings = SamplingSettings(max_new_tokens=MAX_THINKING_TOKENS, seed=args.seed)
    names = [key.name for key in keys]
    kept: list[list[Sampled]] = []
    time = timed(lambda: kept.append(reasoner.engine.sample(prompts, settings, fmt, names)))
    return keys, prompts, kept[0], time


def near_ties(reasoner: Reasoner, args: argparse.Namespace) -> dict[str, float]:
    """What deciding near ties by the row alone costs a label run: time and tokens, as shares."""
    engine, fmt = reasoner.engine, reasoner.token_format

    def measured(roundings: int) -> tuple[float, int]:
        engine.counts, engine.sample_counts = TokenCount(), TokenCount()
        with mock.patch.object(rows, "_ROUNDINGS", roundings):
            _, prompts, traces, sampling = sampled_traces(reasoner, args)
            requests = [
                ForkRequest(prompt, trace.trace_ids, fmt.step_ends(trace.trace_ids))
                for prompt, trace in zip(prompts, traces, strict=True)
            ]
            _, forking = forked(engine, fmt, requests)
        tokens = engine.counts.computed + engine.sample_counts.computed
        return sampling.cpu_seconds + forking.cpu_seconds, tokens

    default = rows._ROUNDINGS
    measured(default)
    pairs = []
    for number in range(args.pairs):
        ways = (0, default) if number % 2 else (default, 0)
        pairs.append({way: measured(way) for way in ways})
    tokens = pairs[0]
    return {
        "near_ties_time": median_ratio([p[default][0] / p[0][0] for p in pairs]).median - 1,
        "near_ties_tokens": tokens[default][1] / tokens[0][1] - 1,
    }


def as_long_as_real_ones(
    prompts: Sequence[list[int]], traces: Sequence[Sampled], limit: int
) -> list[ForkRequest]:
    """The traces' tokens laid end to end in the lengths and with the steps of real traces."""
    shapes = json.loads(SHAPES.read_text("utf-8"))["traces"][:limit]
    tokens = itertools.cycle([i for trace in traces for i in trace.trace_ids])
    return [
        ForkRequest(prompt, list(itertools.islice(tokens, shape["tokens"])), shape["step_ends"])
        for prompt, shape in zip(itertools.cycle(prompts), shapes, strict=False)
    ]


def grading_time(
    reasoner: Reasoner, keys: Keys, answers: Sequence[Sequence[ForkedAnswer]]
) -> Timed:
    """How long grading the forced answers takes."""
    rows = []
    for key, forks in zip(keys, answers, strict=True):
        texts = [str(reasoner.tokenizer.decode(fork.ids)) for fork in forks]
        contents = [read_box(text) or "" for text in texts]
        rows.append(
            {
                "problem_id": key.problem.id,
                "problem": key.problem.problem,
                "family": key.problem.family,
                "answer": key.problem.answer,
                "forced_answers": contents,
                "natural_answer": "",
            }
        )
    return timed(lambda: grade_rows(rows, Math()))


def ratio(count: TokenCount) -> float:
    """Computed over unique tokens."""
    return count.computed / count.unique


def vllm_ratio(reasoner: Reasoner, requests: Sequence[ForkRequest]) -> float | None:
    """Computed over unique tokens of vLLM on the same forks; None where it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        return None
    from ospruner.engines.vllm import VLLMEngine

    fmt = reasoner.token_format
    longest = 64 + max(len(r.prompt_ids) + len(r.trace_ids) for r in requests)
    engine: Engine = VLLMEngine(
        str(reasoner.folder),
        reasoner.tokenizer,
        enforce_eager=True,
        dtype="float32",
        max_model_len=longest,
        hf_overrides={"max_position_embeddings": longest},
    )
    engine.fork(requests, fmt.forced_suffix(), MAX_ANSWER_TOKENS, fmt.box_state)
    return ratio(engine.counts)


def phases(reasoner: Reasoner, args: argparse.Namespace) -> tuple[list[ForkRequest], Any]:
    """A label run in memory: its traces at real lengths, and the share of time of each phase."""
    fmt, engine = reasoner.token_format, reasoner.engine
    keys, prompts, traces, sampling = sampled_traces(reasoner, args)
    requests = [
        ForkRequest(prompt, trace.trace_ids, fmt.step_ends(trace.trace_ids))
        for prompt, trace in zip(prompts, traces, strict=True)
    ]
    answers, forking = forked(engine, fmt, requests)
    grading = grading_time(reasoner, keys, answers)
    times = {"sample": sampling, "fork": forking, "grade": grading}
    total = sum(time.wall_seconds for time in times.values())
    shares = {name: time.wall_seconds / total for name, time in times.items()}
    return as_long_as_real_ones(prompts, traces, args.limit), shares


def forked(
    engine: Engine, fmt: TokenFormat, requests: Sequence[ForkRequest]
) -> tuple[list[list[ForkedAnswer]], Timed]:
    """The forced answers, and how long they took."""
    kept: list[list[list[ForkedAnswer]]] = []
    suffix = fmt.forced_suffix()
    time = timed(
        lambda: kept.append(engine.fork(requests, suffix, MAX_ANSWER_TOKENS, fmt.box_state))
    )
    return kept[0], time


def main() -> None:
    """Runs the benchmark."""
    args = _arguments()
    reasoner = Reasoner()
    fmt, engine = reasoner.token_format, reasoner.engine
    reasoner.model.config.max_position_embeddings = 32_768  # real traces are longer than its own
    requests, shares = phases(reasoner, args)
    engine.counts = shared = TokenCount()
    answers, forking = forked(engine, fmt, requests)
    naive = Anew(reasoner.model, fmt, engine.eos_ids, args.batch_tokens)
    anew: list[list[list[list[int]]]] = []
    encoding = timed(lambda: anew.append(naive.run(requests)))
    pairs = [
        (fork.ids, other)
        for forks, others in zip(answers, anew[0], strict=True)
        for fork, other in zip(forks, others, strict=True)
    ]
    result: dict[str, Any] = {
        "traces": len(requests),
        "trace_tokens": sum(len(request.trace_ids) for request in requests),
        "forks": len(pairs),
        "computed_tokens": shared.computed,
        "unique_tokens": shared.unique,
        "reencoded_tokens": naive.computed_tokens,
        "computed_over_unique_transformers": ratio(shared),
        "sampling_computed_over_unique": ratio(engine.sample_counts),
        "computed_over_unique_vllm": vllm_ratio(reasoner, requests),
        "speedup_over_reencode": encoding.wall_seconds / forking.wall_seconds,
        "speedup_over_reencode_cpu": encoding.cpu_seconds / forking.cpu_seconds,
        "same_answers": sum(ids == other for ids, other in pairs) / len(pairs),
        "share_of_time": shares,
        **near_ties(reasoner, args),
        **occupancies(reasoner, args),
        "seed": args.seed,
    }
    _print(result, forking, encoding)
    print_last_line(result, args.json)


def _print(result: dict[str, Any], forking: Timed, encoding: Timed) -> None:
    vllm = result["computed_over_unique_vllm"]
    shares = ", ".join(f"{name} {share:.0%}" for name, share in result["share_of_time"].items())
    print(
        f"{result['traces']} traces of {result['trace_tokens']:,} tokens in all, "
        f"{result['forks']} forced answers\n{environment()}\n"
    )
    passes = result["transformers_passes_after"] / result["transformers_passes_before"]
    for name, value in (
        ("computed / unique tokens, transformers", result["computed_over_unique_transformers"]),
        ("  of sampling", result["sampling_computed_over_unique"]),
        ("computed / unique tokens, vLLM", "not installed" if vllm is None else vllm),
        ("tokens of encoding anew / unique", result["reencoded_tokens"] / result["unique_tokens"]),
        ("forks, seconds", forking.wall_seconds),
        ("encoding each prefix anew, seconds", encoding.wall_seconds),
        ("speed-up", result["speedup_over_reencode"]),
        ("  by CPU time", result["speedup_over_reencode_cpu"]),
        ("answers that are the same", result["same_answers"]),
        ("near ties: CPU time that they add", result["near_ties_time"]),
        ("  tokens that they add", result["near_ties_tokens"]),
        ("streams that are busy, with barriers", result["occupancy_before"]),
        ("  as a stream", result["occupancy_after"]),
        ("batch that is busy, transformers, barriers", result["transformers_occupancy_before"]),
        ("  as a stream", result["transformers_occupancy_after"]),
        ("passes as a stream / with barriers", passes),
    ):
        print(f"{name:44}{value if isinstance(value, str) else f'{value:.3f}'}")
    print(f"{'time of a label run':44}{shares}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer traces: a minute")
    parser.add_argument("--limit", type=int, help="traces of real length (default: 9 of 10)")
    parser.add_argument("--problems", type=int, default=12, help="of the reasoner's own label run")
    parser.add_argument("--rounds", type=int, default=12, help="simulated traces, in tens")
    parser.add_argument("--pairs", type=int, default=7, help="of runs with near ties and without")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="encoded anew together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="also write the last line there")
    args = parser.parse_args()
    args.limit = args.limit or (4 if args.quick else 9)
    return args


if __name__ == "__main__":
    main()
