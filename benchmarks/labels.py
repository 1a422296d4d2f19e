"""Cost of labels: tokens computed over unique tokens, and time against encoding each prefix anew.

    OMP_NUM_THREADS=1 python benchmarks/labels.py [--quick] [--json FILE] [--limit N] [--seed N]

The embedded reasoner samples traces, answers after each of their steps, and the answers are graded:
the share of time of each phase. Then what it thought is laid end to end until it is as long as real
traces (trace_shapes.json: R1-Distill-Qwen-7B on MATH-500), and answers are forced where those had
their steps: once by the engine, which computes shared tokens once, and once from batches of whole
prefixes, left-padded, each encoded anew. Both arms use the same stop rule, and their answers are
compared. `unique` are the nodes of the trie over all requests. Where vLLM is installed it forks the
same traces, from blocks of 32 tokens on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from timing import Timed, environment, print_last_line, timed
from transformers import DynamicCache, PreTrainedModel

from modeling_ospruner import TokenFormat
from ospruner.demo.shipped import MAX_ANSWER_TOKENS, MAX_THINKING_TOKENS, Reasoner, draw_split
from ospruner.engines import Engine, ForkedAnswer, ForkRequest, SamplingSettings, TokenCount
from ospruner.eval.grading.boxed import read_box
from ospruner.eval.problems.problem import user_message
from ospruner.eval.problems.task import Math, prompt_token_ids

SHAPES = Path(__file__).with_name("trace_shapes.json")

Answers = list[list[ForkedAnswer]]


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
        model: Any = self.model
        while True:
            output = model(
                input_ids=ids,
                attention_mask=mask if B > 1 else None,  # without padding none is needed
                position_ids=(mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            tokens = output.logits[:, -1].argmax(-1)
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


def forked(
    engine: Engine, fmt: TokenFormat, requests: Sequence[ForkRequest]
) -> tuple[Answers, Timed]:
    """The forced answers, and how long they took."""
    kept: list[Answers] = []
    suffix = fmt.forced_suffix()
    time = timed(
        lambda: kept.append(engine.fork(requests, suffix, MAX_ANSWER_TOKENS, fmt.box_state))
    )
    return kept[0], time


def phases(
    reasoner: Reasoner, problems: int, limit: int, seed: int
) -> tuple[list[ForkRequest], dict[str, float]]:
    """A label run in memory.

    Returns:
        Its traces' tokens laid end to end in the lengths and with the steps of real traces; and the
        share of time of each phase.
    """
    fmt, engine, task = reasoner.token_format, reasoner.engine, Math()
    drawn = draw_split("test", problems, seed)
    prompts = [
        prompt_token_ids(p.id, user_message(p, fmt.format), reasoner.tokenizer, fmt) for p in drawn
    ]
    settings = SamplingSettings(max_new_tokens=MAX_THINKING_TOKENS, seed=seed)
    names, kept = [f"{problem.id}/0" for problem in drawn], list[Any]()
    times = {"sample": timed(lambda: kept.extend(engine.sample(prompts, settings, fmt, names)))}
    requests = [
        ForkRequest(prompt, trace.trace_ids, fmt.step_ends(trace.trace_ids))
        for prompt, trace in zip(prompts, kept, strict=True)
    ]
    answers, times["fork"] = forked(engine, fmt, requests)
    pairs = [
        (read_box(str(reasoner.tokenizer.decode(fork.ids))) or "", problem)
        for problem, forks in zip(drawn, answers, strict=True)
        for fork in forks
    ]
    times["grade"] = timed(lambda: task.grade_many(pairs))
    total = sum(time.wall_seconds for time in times.values())
    shapes = json.loads(SHAPES.read_text("utf-8"))["traces"][:limit]
    tokens = itertools.cycle([i for trace in kept for i in trace.trace_ids])
    long = [
        ForkRequest(prompt, list(itertools.islice(tokens, shape["tokens"])), shape["step_ends"])
        for prompt, shape in zip(itertools.cycle(prompts), shapes, strict=False)
    ]
    return long, {name: time.wall_seconds / total for name, time in times.items()}


def ratio(count: TokenCount) -> float:
    """Computed over unique tokens."""
    return count.computed / count.unique


def vllm_ratio(reasoner: Reasoner, requests: Sequence[ForkRequest]) -> float | None:
    """Computed over unique tokens of vLLM on the same forks; None where it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        return None
    from ospruner.engines.vllm import VLLMEngine

    longest = 64 + max(len(r.prompt_ids) + len(r.trace_ids) for r in requests)
    engine: Engine = VLLMEngine(
        str(reasoner.folder),
        reasoner.tokenizer,
        enforce_eager=True,
        dtype="float32",
        max_model_len=longest,
        hf_overrides={"max_position_embeddings": longest},
    )
    forked(engine, reasoner.token_format, requests)
    return ratio(engine.counts)


def main() -> None:
    """Runs the benchmark."""
    args = _arguments()
    reasoner = Reasoner()
    fmt, engine = reasoner.token_format, reasoner.engine
    reasoner.model.config.max_position_embeddings = 32_768  # real traces are longer than its own
    requests, shares = phases(reasoner, args.problems, args.limit, args.seed)
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
    vllm = vllm_ratio(reasoner, requests)
    result: dict[str, Any] = {
        "computed_over_unique_transformers": ratio(shared),
        "sampling_computed_over_unique": ratio(engine.sample_counts),
        "computed_over_unique_vllm": vllm,
        "reencoded_over_unique": naive.computed_tokens / shared.unique,
        "speedup_over_reencode": encoding.wall_seconds / forking.wall_seconds,
        "speedup_over_reencode_cpu": encoding.cpu_seconds / forking.cpu_seconds,
        "same_answers": sum(ids == other for ids, other in pairs) / len(pairs),
    }
    trace_tokens = sum(len(request.trace_ids) for request in requests)
    print(
        f"{len(requests)} traces of {trace_tokens:,} tokens in all, {len(pairs)} forced answers; "
        f"{environment()}\n"
    )
    for name, value in result.items():
        print(f"{name:36}{'not installed' if value is None else f'{value:.3f}'}")
    told = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    print(f"{'time of a label run':36}{told}")
    sizes = {"traces": len(requests), "trace_tokens": trace_tokens, "forks": len(pairs)}
    print_last_line({**result, **sizes, "share_of_time": shares, "seed": args.seed}, args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer traces: a minute")
    parser.add_argument("--limit", type=int, help="traces of real length (default: 9 of 10)")
    parser.add_argument("--problems", type=int, default=12, help="of the reasoner's own label run")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="encoded anew together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="also write the last line there")
    args = parser.parse_args()
    args.limit = args.limit or (4 if args.quick else 9)
    return args


if __name__ == "__main__":
    main()
