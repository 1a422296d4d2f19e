"""What one GPU shows in ten minutes: the policy at R1-Distill-Qwen-7B's sizes, random weights.

    make gpu [ARGS="--only generate train"]
    python benchmarks/gpu.py [--tiny] [--tuning layers] [--json FILE]

Nothing is downloaded. Each check runs in a process of its own, in order of worth, and says "held",
"NOT HELD", or only what was seen; the numbers are written after each, so that what is cut off
loses one check. `--tiny` takes a width of 64, on a CPU too: the test of this file.

generate   transformers in bfloat16, sdpa and FlashAttention 2: a policy that never stops changes no
           token, one that stops changes none before its stop
train      one optimiser step on 32 traces of 15,000 tokens: peak memory, share of a matrix
           product's speed
vllm       plain vLLM at its own defaults, then the policy with CUDA graphs: tokens a second at 1,
           16 and 64 streams, time saved over tokens saved, and the probabilities of stopping
           against transformers', also where requests are preempted
labels     benchmarks/labels.py here: computed over unique tokens
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from generate import SHAPES, Bench, Shape, breaks_of, random_base
from timing import environment, print_last_line, random_traces, timed
from torch.utils.flop_counter import FlopCounterMode

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.formats_ospruner import VISIBLE
from ospruner.demo.shipped import Reasoner
from ospruner.scoring import stop_logits
from ospruner.train.config import StopConfig
from ospruner.train.label_sets import Labels
from ospruner.train.trainer import StopTrainer
from ospruner.train.untrained import untrained

Found = dict[str, Any]
NEVER = {"stop_mode": "threshold", "stop_threshold": 1.0, "stop_answer": "free"}


@dataclass(frozen=True)
class Sizes:
    """How large the checks are.

    Attributes:
        shape: the base's, for transformers and training.
        served: the base's inside vLLM.
        tokens: a request or trace writes so many.
        runs: of each pair of arms of `generate`.
        traces, trace_tokens: of the training step.
        streams: requests at a time inside vLLM.
        blocks: pages of vLLM that are too few for all streams.
        tolerance: how far two engines' probabilities of stopping may lie apart.
        peak_gib: what a training step may take.
    """

    shape: Shape
    served: Shape
    dtype: str
    tokens: int
    runs: int
    traces: int
    trace_tokens: int
    streams: tuple[int, ...]
    blocks: int
    tolerance: float
    peak_gib: float


FULL = Sizes(
    shape=SHAPES["7b"],
    served=SHAPES["7b"],
    dtype="bfloat16",
    tokens=256,
    runs=2,
    traces=32,
    trace_tokens=15_000,
    streams=(1, 16, 64),
    blocks=400,
    tolerance=0.02,
    peak_gib=60.0,
)
TINY = Sizes(
    shape=SHAPES["tiny"],
    served=Shape(4, 128, 256, 4, 2, 1024),  # vLLM on a CPU wants heads of at least 32
    dtype="float32",
    tokens=64,
    runs=1,
    traces=8,
    trace_tokens=200,
    streams=(1, 4),
    blocks=9,
    tolerance=1e-4,
    peak_gib=60.0,
)


@dataclass(frozen=True)
class Job:
    """What a check is given.

    Attributes:
        folder: shared by all checks of one run.
        device: "cuda" or "cpu".
        tuning: of the policies.
    """

    sizes: Sizes
    folder: Path
    device: str
    seed: int
    tuning: Literal["queries", "layers"]


def check_generate(job: Job) -> Found:
    """Parity and speed in transformers, for each implementation of attention that is there."""
    kinds = ["sdpa"]
    if job.device == "cuda":
        kinds.append("flash_attention_2")
    found: Found = {}
    for kind in kinds:
        try:
            found[kind] = _generate(job, kind)
        except ImportError as error:  # flash-attn is a package of its own
            found[kind] = {"not_run": str(error).splitlines()[0]}
        gc.collect()
    ran = [one for one in found.values() if "not_run" not in one]
    return {"held": all(one["tokens_equal"] for one in ran), **found}


def _generate(job: Job, attention: str) -> Found:
    args = argparse.Namespace(
        prompt_tokens=64,
        trace_tokens=job.sizes.tokens,
        seed=job.seed,
        device=job.device,
        dtype=job.sizes.dtype,
        policy_layers=2,
        tunings=[job.tuning],
        attention=attention,
    )
    bench = Bench(job.sizes.shape, args)
    found: Found = {"tokens_equal": True}
    for batch in (1, 8):
        try:
            ratio, _ = bench.ratios(batch, "never", job.tuning, job.sizes.runs)
            bench.ratios(batch, "half", job.tuning, 1)
        except RuntimeError as error:
            found |= {"tokens_equal": False, f"batch{batch}": str(error)}
            continue
        found[f"never_stop_ratio_batch{batch}"] = [ratio.median, ratio.low, ratio.high]
    return found


def check_train(job: Job) -> Found:
    """One optimiser step as `ospruner train` takes it: trunk, validation and saving included."""
    sizes, reasoner = job.sizes, Reasoner()
    base = random_base(
        sizes.shape,
        reasoner.tokenizer,
        2 * sizes.trace_tokens,
        job.seed,
        job.device,
        sizes.dtype,
    )
    vocabulary = len(reasoner.tokenizer)
    steps = sizes.trace_tokens // 40
    batch = random_traces(sizes.traces, steps, sizes.trace_tokens, vocabulary, job.seed, spread=0.0)
    few = random_traces(2, 5, 60, vocabulary, job.seed + 1)
    few = few.add_column("new_id", ["v0", "v1"]).remove_columns("problem_id")  # other problems
    few = few.rename_column("new_id", "problem_id")
    made = reasoner.label_settings(job.seed)
    config = StopConfig(
        str(job.folder / "run"), head="fixed", prices=[1e-4], batch_size=sizes.traces,
        num_train_epochs=1, seed=job.seed, tuning=job.tuning, use_cpu=job.device == "cpu",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = StopTrainer(
        config, Labels(batch, made, ""), Labels(few, made, ""), model=base,
        processing_class=reasoner.tokenizer,
    )  # fmt: skip
    if job.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with FlopCounterMode(display=False) as counter:
        taken = timed(trainer.train)
    found: Found = {"seconds_a_step": taken.wall_seconds, "operations": counter.get_total_flops()}
    found["share_of_matrix_product"] = found["operations"] / taken.wall_seconds / matrix_limit(job)
    if job.device == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return {"held": found["peak_gib"] <= sizes.peak_gib, "allowed_gib": sizes.peak_gib, **found}
    return {"held": None, **found}


def matrix_limit(job: Job) -> float:
    """Operations a second of one large matrix product in the base's precision."""
    size = 8192 if job.device == "cuda" else 512
    a = torch.randn(size, size, device=job.device, dtype=getattr(torch, job.sizes.dtype))
    a @ a
    best = min(timed(lambda: a @ a).wall_seconds for _ in range(5))
    return 2 * size**3 / best


def check_vllm_base(job: Job) -> Found:
    """Writes the base and its policy, for the checks of vLLM."""
    tokenizer, shape = Reasoner().tokenizer, job.sizes.served
    base = random_base(shape, tokenizer, 2048, job.seed, job.device, job.sizes.dtype)
    base.save_pretrained(job.folder / "base")
    tokenizer.save_pretrained(job.folder / "base")
    model = untrained(
        base, tokenizer, base_model_name_or_path=str(job.folder / "base"), tuning=job.tuning
    )
    with torch.no_grad():  # a head of zeros would hide the states
        model.policy.head.weight.normal_(0.0, 2.0 / shape.hidden**0.5)
        model.policy.head.bias.fill_(-4.0)
    model.save_pretrained(job.folder / "policy")
    return {"held": None, "parameters": base.num_parameters()}


class Served:
    """vLLM, plain or with the policy, and requests that write among few tokens, breaks included."""

    def __init__(self, job: Job, policy: bool, **further: Any) -> None:
        from vllm import LLM

        from ospruner.serving.vllm.plugin import PROCESSOR, WORKER_EXTENSION

        self.job = job
        longest = 32 + job.sizes.tokens + 64
        arguments: dict[str, Any] = {"dtype": job.sizes.dtype, "max_model_len": longest}
        if job.device == "cuda":
            arguments["gpu_memory_utilization"] = 0.8
        else:
            arguments["block_size"] = 32
        if policy:
            arguments["logits_processors"] = [PROCESSOR]
            arguments["worker_extension_cls"] = WORKER_EXTENSION
        name = "policy" if policy else "base"
        self.llm = LLM(model=str(job.folder / name), seed=job.seed, **{**arguments, **further})
        fmt = Reasoner().token_format
        draw = random.Random(job.seed)
        break_id, banned = breaks_of(fmt, len(fmt.kinds))
        closed = {break_id, *banned}
        visible = [i for i, kind in enumerate(fmt.kinds) if kind & VISIBLE and i not in closed]
        self.allowed = [break_id, *draw.sample(visible, 31)]
        self.prompts = [draw.choices(visible, k=32) for _ in range(3 * max(job.sizes.streams))]

    def run(self, requests: int, extra: Callable[[int], Found] = lambda i: {}) -> Found:
        """One pass: seconds, and each request's tokens."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=1.0,
                seed=self.job.seed + i,
                max_tokens=self.job.sizes.tokens,
                ignore_eos="max_thinking_tokens" not in extra(i),
                allowed_token_ids=self.allowed,  # what the policy forces comes after this mask
                extra_args=extra(i) or None,
                detokenize=False,
            )
            for i in range(requests)
        ]
        asked = [{"prompt_token_ids": prompt} for prompt in self.prompts[:requests]]
        outputs: list[Any] = []
        seconds = timed(
            lambda: outputs.extend(self.llm.generate(asked, params, use_tqdm=False))
        ).wall_seconds
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        return {"seconds": seconds, "tokens": tokens, "written": sum(map(len, tokens))}

    def speeds(self, extra: Found) -> Found:
        """Tokens a second at each number of streams, the better of two passes after a first."""
        found: Found = {}
        for streams in self.job.sizes.streams:
            passes = [self.run(streams, lambda i: extra) for _ in range(3)][1:]
            found[str(streams)] = max(one["written"] / one["seconds"] for one in passes)
        return found

    def queued(self, extra: Found) -> Found:
        """Three times as many requests as streams: seconds and tokens of the better pass."""
        passes = [self.run(len(self.prompts), lambda i: extra) for _ in range(2)]
        best = min(passes, key=lambda one: one["seconds"])
        return {"seconds": best["seconds"], "written": best["written"]}

    def records(self) -> list[Found]:
        """What the policy saw in one pass: prompt, tokens, step ends and their probabilities."""
        requests = max(self.job.sizes.streams)
        done = self.run(requests, lambda i: {**NEVER, "stop_id": f"r{i}"})
        seen = []
        for i, tokens in enumerate(done["tokens"]):
            told = self.llm.collective_rpc("ospruner_record", args=(f"r{i}",))[0]
            seen.append({"prompt": self.prompts[i], "tokens": tokens, **told})
        return seen


def check_vllm_plain(job: Job) -> Found:
    """Plain vLLM at its own defaults."""
    served = Served(job, policy=False)
    return {"held": None, "tokens_per_second": served.speeds({}), "queued": served.queued({})}


def check_vllm_policy(job: Job) -> Found:
    """The policy inside vLLM, with the graphs that vLLM captures by default."""
    served = Served(job, policy=True)
    ours = {"tokens_per_second": served.speeds(NEVER), "queued": served.queued(_early(job))}
    (job.folder / "records.json").write_text(json.dumps(served.records()))
    plain = _earlier(job, "vllm_plain")
    if plain is None:
        return {"held": None, **ours}
    ratios = {
        streams: speed / plain["tokens_per_second"][streams]
        for streams, speed in ours["tokens_per_second"].items()
    }
    saved = 1 - ours["queued"]["written"] / plain["queued"]["written"]
    time_saved = 1 - ours["queued"]["seconds"] / plain["queued"]["seconds"]
    return {
        "held": None,
        **ours,
        "never_stop_ratio": ratios,
        "tokens_saved": saved,
        "time_saved_over_tokens_saved": time_saved / saved,
    }


def _early(job: Job) -> Found:
    return {
        **NEVER,
        "stop_answer": "forced",
        "max_thinking_tokens": job.sizes.tokens // 4,
        "max_answer_tokens": 8,
    }


def check_vllm_preempted(job: Job) -> Found:
    """The policy where the pages are too few for all: requests are preempted and taken up again."""
    served = Served(
        job, policy=True, num_gpu_blocks_override=job.sizes.blocks, disable_log_stats=False
    )
    (job.folder / "preempted.json").write_text(json.dumps(served.records()))
    counts = {metric.name: metric for metric in served.llm.get_metrics()}
    preemptions = getattr(counts["vllm:num_preemptions"], "value", 0)
    return {"held": preemptions > 0, "preemptions": preemptions}


def check_vllm_parity(job: Job) -> Found:
    """Probabilities of stopping on vLLM's own tokens: vLLM's against transformers'."""
    model = OSPrunerForCausalLM.from_pretrained(
        job.folder / "policy", dtype=getattr(torch, job.sizes.dtype)
    )
    torch.nn.Module.to(model, job.device)
    found: Found = {}
    for name in ("records", "preempted"):
        file = job.folder / f"{name}.json"
        if not file.exists():
            continue
        gaps: list[float] = []
        for one in json.loads(file.read_text()):
            ids = torch.tensor([[*one["prompt"], *one["tokens"]]], device=job.device)
            with torch.inference_mode():
                exact = torch.sigmoid(stop_logits(model, ids)[0].float()).cpu()
            at = [len(one["prompt"]) + end - 1 for end in one["step_ends"]]
            told = zip(at, one["probabilities"], strict=True)
            gaps += [abs(float(exact[place]) - value) for place, value in told]
        found[name] = {"steps": len(gaps), "largest_difference": max(gaps)}
    held = bool(found) and all(
        one["largest_difference"] <= job.sizes.tolerance for one in found.values()
    )
    return {"held": held, "tolerance": job.sizes.tolerance, **found}


def check_labels(job: Job) -> Found:
    """What `benchmarks/labels.py` finds here; vLLM forks on the GPU."""
    file = job.folder / "labels_numbers.json"
    script = Path(__file__).with_name("labels.py")
    quick = ["--quick"] if job.device == "cpu" else []
    command = [sys.executable, str(script), *quick, "--json", str(file), "--seed", str(job.seed)]
    subprocess.run(command, check=True)
    return {"held": None, **json.loads(file.read_text())}


CHECKS: dict[str, Callable[[Job], Found]] = {
    "generate": check_generate,
    "train": check_train,
    "vllm_base": check_vllm_base,
    "vllm_plain": check_vllm_plain,
    "vllm_policy": check_vllm_policy,
    "vllm_preempted": check_vllm_preempted,
    "vllm_parity": check_vllm_parity,
    "labels": check_labels,
}


def _earlier(job: Job, name: str) -> Found | None:
    """What an earlier check of this run found."""
    file = job.folder / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def run_child(name: str, job: Job, tiny: bool, seconds: float) -> Found:
    """One check in a process of its own; its output goes to a log in the folder."""
    started = time.monotonic()
    log = job.folder / f"{name}.log"
    command = [sys.executable, __file__, "--check", name, "--folder", str(job.folder)]
    command += ["--seed", str(job.seed), "--tuning", job.tuning, *(["--tiny"] if tiny else [])]
    with log.open("w") as output:
        try:
            done = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, timeout=seconds, check=False
            )
            error = None if done.returncode == 0 else f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            error = f"not done within {seconds:.0f} s"
    found = _earlier(job, name) or {"held": False, "error": error or "no result"}
    if error is not None:
        found["last_words"] = log.read_text(errors="replace").splitlines()[-12:]
    return {**found, "seconds": round(time.monotonic() - started, 1)}


def main() -> None:
    """Runs the checks in turn; the last line is JSON."""
    args = _arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = TINY if args.tiny else FULL
    if args.check:
        job = Job(sizes, Path(args.folder), device, args.seed, args.tuning)
        found = CHECKS[args.check](job)
        (job.folder / f"{args.check}.json").write_text(json.dumps(found))
        return
    if device == "cpu" and not args.tiny:
        raise SystemExit("no GPU is here; --tiny runs the same checks on a CPU, at tiny sizes")
    result: Found = {
        "tiny": args.tiny,
        "seed": args.seed,
        "tuning": args.tuning,
        **environment(),
        "checks": {},
    }
    end = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as name:
        job = Job(sizes, Path(name), device, args.seed, args.tuning)
        for check in args.only or CHECKS:
            if (left := end - time.monotonic()) < 1:
                result["checks"][check] = found = {"held": None, "not_run": "no time left"}
            else:
                found = result["checks"][check] = run_child(check, job, args.tiny, left)
            word = {True: "held", False: "NOT HELD", None: "seen"}[found.pop("held")]
            result["checks"][check] = {"verdict": word, **found}
            print(f"{check}: {word}")
            for key, value in found.items():
                print(f"  {key}: {value if not isinstance(value, list) else json.dumps(value)}")
            sys.stdout.flush()
            if args.json:
                args.json.write_text(json.dumps(result) + "\n")
    print_last_line(result, args.json)
    if any(found["verdict"] == "NOT HELD" for found in result["checks"].values()):
        raise SystemExit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: minutes on a CPU")
    parser.add_argument("--tuning", choices=("queries", "layers"), default="queries")
    parser.add_argument("--only", nargs="+", choices=CHECKS, help="these checks")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all checks (default: 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the numbers there")
    parser.add_argument("--check", choices=CHECKS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    main()
