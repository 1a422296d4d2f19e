"""Speed of vLLM with the policy in it, against plain vLLM on the same prompts.

    python benchmarks/serve.py [--quick] [--streams N] [--tuning layers] [--layers N] [--json FILE]
        [--seed N] [--before DIR --before-python FILE]
    python benchmarks/serve.py --policy DIR --labels DIR [--price 1e-3] [--dtype bfloat16]
    python benchmarks/serve.py --host-time

Two bases: the embedded reasoner, and random weights in 28 layers, which sample among 40 tokens, of
which one ends a paragraph, as 60 tokens without it do. Both engines run in this process, with 64
streams, and take their steps in turn, each timed; of each step the least time of all rounds counts
(`timing.paired_ratio`), and what happens outside of steps does not. The policy is on and never
stops (the tokens are checked to be the same), or it stops early, by a budget (not with `--quick`).
Ratios above 1 would be faster than plain vLLM.

With `--policy`, its own base takes the place of both, greedily on the labels' prompts, and it stops
early by itself, as at a price.

With `--host-time` no engine runs: it prints what the plug-in itself takes on the host of a step, at
1 to 256 streams, without the arithmetic of the base and of the tail.
"""

import os
import random
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import timing
import torch
from bases import VLLM_NEVER as NEVER
from bases import reasoner_prompts, save_random, shape_of, vllm_on_a_cpu, words_of
from timing import Ratio, Timed, clock_ratios, show
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from modeling_ospruner import OSPrunerConfig
from modeling_ospruner.formats_ospruner import ReasoningFormat
from ospruner.demo import POLICY
from ospruner.demo.shipped import Reasoner
from ospruner.eval.problems.problem import user_message
from ospruner.serving.core import RowCore
from ospruner.serving.requests import StopRequest
from ospruner.train.labels.labelling import problem_of
from ospruner.train.labels.loading import load_labels
from ospruner.train.untrained import untrained

Found = dict[str, Any]
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when an engine starts
vllm_on_a_cpu()

STREAMS = 64
WARM_UP_STEPS = 4
LONGEST_STEP = 60  # tokens, of the random base's paragraphs
HOST_STREAMS, HOST_STEPS, HOST_ROUNDS = (1, 16, 64, 256), 500, 8


@dataclass(frozen=True)
class Case:
    """A base with its policy in folders, and the requests that both engines are given.

    `early` are the policy's settings in arm "early" (none: no such arm), `sampling` those of all
    requests. `asked` are the prompts' problems, as a user writes them, if they are of problems.
    """

    name: str
    base: Path
    policy: Path
    prompts: list[list[int]]
    max_tokens: int
    early: dict[str, Any]
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    asked: list[str] | None = None


def add_case(parser: ArgumentParser, shape: str) -> None:
    """The options of the cases."""
    parser.add_argument("--shape", default=shape, help="the random base's: tiny, 7b, or a width")
    parser.add_argument("--tuning", choices=("queries", "layers"), default="queries")
    parser.add_argument("--policy", type=Path, help="a policy of every price, in place of both")
    parser.add_argument("--labels", type=Path, help="with --policy: labels, for their prompts")
    parser.add_argument("--price", type=float, default=1e-3, help="with --policy: of a token")
    parser.add_argument("--dtype", default="float32", help="of the bases")


def budget(tokens: int) -> Found:
    """Settings that stop each request after so many thinking tokens."""
    own = {"max_thinking_tokens": tokens, "max_answer_tokens": 8, "stop_answer": "forced"}
    return {**NEVER, **own}


def policy_case(policy: Path, labels: Path | None, requests: int, price: float) -> Case:
    """A policy on its own base and the first prompts of labels; it stops as at a price."""
    if labels is None:
        raise SystemExit("--policy needs --labels, whose prompts all arms are given")
    found, config = load_labels(labels), OSPrunerConfig.from_pretrained(policy)
    rows = found.traces.take(min(requests, len(found.traces)))
    fmt = ReasoningFormat.from_dict(found.settings.reasoning_format)
    prompts = [list(ids) for ids in rows["prompt_ids"]]
    asked = [user_message(problem_of(row), fmt) for row in rows]
    longest = found.settings.max_new_tokens + found.settings.max_answer_tokens
    base, early = config.base_model_name_or_path, {"stop_mode": "threshold", "stop_price": price}
    return Case(Path(base).name, Path(base), policy, prompts, longest, early, asked=asked)


def reasoner_case(folder: Path, requests: int, max_tokens: int, **tail: Any) -> Case:
    """The embedded reasoner on its own problems, to their natural ends; `tail` of `untrained`."""
    reasoner, policy = Reasoner(), folder / "policy"
    place, prompts = reasoner.folder, list(reasoner_prompts(reasoner, requests, 0).values())
    tail["base_model_name_or_path"] = str(place)
    untrained(reasoner.model, reasoner.tokenizer, **tail).save_pretrained(policy)
    return Case("reasoner", place, policy, prompts, max_tokens, budget(60))


def random_case(
    folder: Path, requests: int, shape: str, tokens: int, seed: int, **built: Any
) -> Case:
    """Random weights of a shape; `built` is what `save_random` takes."""
    fmt, draw = Reasoner().token_format, random.Random(seed)
    # A paragraph that goes on for long ends, so that budgets stop rows at about the same time.
    built["reasoning_format"] = replace(fmt.format, step_tokens=LONGEST_STEP)
    save_random(folder, shape_of(shape), 4096, seed, **built)
    words = words_of(fmt)
    # As short beside the text as a problem is beside a reasoning model's thinking.
    prompts = [draw.choices(words[1:], k=max(1, tokens // 50)) for _ in range(requests)]
    sampling = {"temperature": 1.0, "logit_bias": dict.fromkeys(words, 100.0)}
    places, early = (folder / "base", folder / "policy"), budget(tokens // 4)
    return Case(f"random weights, {shape}", *places, prompts, tokens, early, sampling)


class Arms:
    """Plain vLLM and vLLM with the policy, on one case; `tokens` are those of each arm's pass."""

    def __init__(self, case: Case, streams: int, dtype: str) -> None:
        longest = max(map(len, case.prompts)) + case.max_tokens
        arguments: dict[str, Any] = {"dtype": dtype, "max_model_len": -(-longest // 32) * 32}
        arguments |= {"enforce_eager": True, "block_size": 32, "max_num_seqs": streams}
        # No prefix caching: each run computes its prompts.
        arguments |= {"enable_prefix_caching": False, "disable_log_stats": True}
        asked = {"ospruner": {"stop_policy": False}}  # each arm says what it wants
        plain = LLM(model=str(case.base), **arguments).llm_engine
        ours = LLM(model=str(case.policy), additional_config=asked, **arguments).llm_engine
        self.arms = {"plain": (plain, {}), "never": (ours, NEVER), "early": (ours, case.early)}
        self.case, self.tokens = case, dict[str, list[list[int]]]()

    def run(self, arm: str, turn: int = 0, limit: int | None = None) -> list[list[Timed]]:
        """All requests in plain vLLM and in an arm, step by step in turn; the tokens are kept.

        Returns the times of plain vLLM's steps, and of the arm's. Who takes the first step, the
        prompts', changes with the turn; `limit` stands in place of the case's tokens.
        """
        outputs: dict[str, dict[str, list[int]]] = {"plain": {}, arm: {}}

        def begun(name: str) -> Callable[[], bool]:
            """An arm's next step, once all requests wait in its engine."""
            engine, settings = self.arms[name]
            common = {**self.case.sampling, "max_tokens": limit or self.case.max_tokens}
            common |= {"detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}
            for i, prompt in enumerate(self.case.prompts):
                params = SamplingParams(**common, seed=i, extra_args={**settings})
                engine.add_request(str(i), {"prompt_token_ids": prompt}, params)

            def step() -> bool:
                for done in engine.step():
                    outputs[name][done.request_id] = list(done.outputs[0].token_ids)
                return bool(engine.has_unfinished_requests())

            return step

        times = timing.in_turn({name: begun(name) for name in outputs}, turn)
        for name, found in outputs.items():
            self.tokens[name] = [found[str(i)] for i in range(len(self.case.prompts))]
        return list(times.values())


def measure(case: Case, rounds: int, streams: int, dtype: str = "float32", key: str = "") -> Found:
    """Times a case's arms against plain vLLM; `key` is added to the names of the numbers.

    Returns:
        `never_stop_ratio`, tokens/s with a policy that never stops over plain vLLM's, and
        `time_saved_over_tokens_saved`, the share of time saved in arm "early" over that of tokens
        (where any were), by both clocks, with intervals; and `tokens_saved`.

    Raises:
        RuntimeError: an arm does not write what it is said to write.
    """
    arms = Arms(case, streams, dtype)
    times: dict[str, list[list[list[Timed]]]]
    times = {arm: [] for arm in ("never", "early") if arm == "never" or case.early}
    for arm in times:
        arms.run(arm, limit=WARM_UP_STEPS)
    for turn in range(rounds):
        for arm, of_arm in times.items():
            of_arm.append(arms.run(arm, turn))
            if [*map(len, of_arm[-1])] != [*map(len, of_arm[0])]:
                raise RuntimeError(f"{case.name}: two passes of arm {arm!r} differ in their steps")
            if arm == "never" and arms.tokens["plain"] != arms.tokens["never"]:
                raise RuntimeError(f"{case.name}: the policy that never stops changed tokens")
    tokens = sum(map(len, arms.tokens["plain"]))
    seconds = min(sum(step.wall_seconds for step in plain) for plain, _ in times["never"])
    print(f"{case.name}: {tokens} tokens, plain vLLM {tokens / seconds:.0f} tokens/s")
    plain, never = zip(*times["never"], strict=True)
    ratios = clock_ratios(never, plain)  # of time, the other way round
    found = show(f"never_stop_ratio{key}", "tokens/s, never stopping", ratios)
    if not case.early:
        return found
    saved = 1 - sum(map(len, arms.tokens["early"])) / tokens
    if saved:
        over = [
            Ratio(*((1 - time) / saved for time in (one.median, one.high, one.low)))
            for one in clock_ratios(*zip(*times["early"], strict=True))
        ]
        found |= show(f"time_saved_over_tokens_saved{key}", "time saved over tokens saved", over)
    return {f"tokens_saved{key}": round(saved, 4), **found}


def host_step(streams: int, seed: int) -> Callable[[], float]:
    """A server's streams as the plug-in follows them on the host, by a policy of every price.

    A paragraph ends about every 40 tokens. Streams stop at budgets around 400 tokens, and others
    come in their place once they have answered. A call takes the next step; its seconds.
    """
    reasoner, draw = Reasoner(), random.Random(seed)
    fmt, config = reasoner.token_format, OSPrunerConfig.from_pretrained(POLICY)
    core = RowCore(config, fmt, StopRequest(budget(400), server=True), seed)
    [prompt], words = reasoner_prompts(reasoner, 1, seed).values(), words_of(fmt)
    outputs = torch.randn(streams, 6, generator=torch.Generator().manual_seed(seed))
    logits = torch.zeros(streams, len(fmt.texts))

    def admitted() -> Any:
        return core.admit({"max_thinking_tokens": draw.randrange(200, 600)}, prompt, ())

    rows = [admitted() for _ in range(streams)]

    def step() -> float:
        tokens = [row.row.forced[0] if row.row.forced else draw.choice(words) for row in rows]
        began = time.perf_counter()
        rows[:] = [admitted() if one.complete else one for one in rows]
        for row, token in zip(rows, tokens, strict=True):
            row.take(token)
        if ended := [row for row in rows if row.row.at_boundary]:
            core.decide(ended, outputs[: len(ended)])
        core.shape(logits, enumerate(rows))
        return time.perf_counter() - began

    return step


def host_times(seed: int, rounds: int) -> dict[str, float]:
    """Prints and returns the milliseconds of a step: its mean, in the fastest of some rounds."""
    found = {}
    for streams in HOST_STREAMS:
        step = host_step(streams, seed)
        means = [sum(step() for _ in range(HOST_STEPS)) / HOST_STEPS for _ in range(rounds)]
        found[f"host_ms_{streams}"] = ms = round(1e3 * min(means), 4)
        told = f"{ms:.3f} ms of a step, {1e3 * ms / streams:.1f} us of a stream"
        print(f"{streams:>4} streams: {told}")
    return found


def main() -> None:
    """Runs the benchmark; the last line is JSON."""
    # Without the budget: the shorter requests are, the more of its time is the batch's last rows.
    quick = "never stopping on the random base alone, half as long, one round: two minutes"
    sizes = {"rounds": (2, 1, "timed runs of each arm")}
    sizes |= {"tokens": (192, 96, "a request, of the random base")}
    parser = timing.options(__doc__, quick, before=True, sizes=sizes)
    add_case(parser, "512")
    parser.add_argument("--streams", type=int, default=STREAMS, help="at a time")
    # More than the streams, so that what has stopped makes room for what waits, as in a server.
    parser.add_argument("--requests", type=int, help="of each pass (default: twice the streams)")
    parser.add_argument("--layers", type=int, default=2, help="that the policy copies")
    parser.add_argument("--host-time", action="store_true", help="the plug-in's own, no engine")
    args = timing.parse(parser)
    if args.host_time:
        rounds = 1 if args.quick else HOST_ROUNDS
        timing.print_last_line(host_times(args.seed, rounds), args.json)
        return
    requests, often = args.requests or 2 * args.streams, (args.rounds, args.streams)
    with tempfile.TemporaryDirectory() as name:
        folder, tail = Path(name), {"tuning": args.tuning, "num_policy_layers": args.layers}
        if args.policy:
            case = policy_case(args.policy, args.labels, requests, args.price)
            result = measure(case, *often, args.dtype) | {"price": args.price}
        else:
            case = random_case(folder, requests, args.shape, args.tokens, args.seed, **tail)
            result = measure(replace(case, early={}) if args.quick else case, *often)
            result |= {"shape": args.shape, **tail}
            if not args.quick:
                case = reasoner_case(folder / "reasoner", requests, 600, **tail)
                result |= measure(case, *often, key="_reasoner")
    sizes_used = {"streams": args.streams, "requests": requests, "tokens": args.tokens}
    timing.print_last_line({**result, **sizes_used}, args.json)


if __name__ == "__main__":
    main()
