"""What one GPU shows in ten minutes: the policy at R1-Distill-Qwen-7B's sizes, random weights.

    make gpu [ARGS="--only generate train"]
    python benchmarks/gpu.py [--tiny] [--tuning layers] [--json FILE]

Each check runs in a process of its own, in order of worth, and says "held", "NOT HELD", or only
what was seen; the numbers are written after each. `--tiny` takes a width of 128, on a CPU too.

generate   benchmarks/generate.py in bfloat16, with sdpa and FlashAttention 2: a policy that never
           stops changes no token, one that stops changes none before its stop
train      one optimiser step on 32 traces of 15,000 tokens: seconds, and peak memory
serve      benchmarks/serve_http.py: `ospruner serve` with CUDA graphs, at 1, 16 and 64 streams
parity     vLLM's probabilities of stopping against transformers', where requests are preempted
labels     benchmarks/labels.py here: computed over unique tokens
"""

import argparse
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import bases
import timing
import torch
from bases import DEVICE, VLLM_NEVER
from timing import timed
from transformers.utils.import_utils import is_flash_attn_2_available

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.demo.shipped import Reasoner
from ospruner.scoring import stop_logits
from ospruner.train.config import StopConfig
from ospruner.train.labels.loading import Labels
from ospruner.train.trainer import StopTrainer

Found = dict[str, Any]
SIZES: dict[str, Found] = {
    "7b": {"dtype": "bfloat16", "tokens": 256, "traces": 32, "trace_tokens": 15_000}
    | {"streams": (1, 16, 64), "blocks": 400},
    "tiny": {"dtype": "float32", "tokens": 64, "traces": 8, "trace_tokens": 200}
    | {"streams": (1, 4), "blocks": 9},
}
"""A training step takes `traces` of `trace_tokens`; `blocks` are too few pages for all streams."""
TOLERANCE = {"bfloat16": 0.02, "float32": 1e-4}  # of two engines' probabilities of stopping
PEAK_GIB = 60.0  # what a training step may take


def benchmark(job: Namespace, script: str, *words: str) -> Found:
    """The numbers of another benchmark; what it raises ends the check."""
    file = job.folder / f"numbers-{script}.json"
    command = [sys.executable, str(Path(__file__).with_name(script)), *words]
    subprocess.run([*command, "--json", str(file), "--seed", str(job.seed)], check=True)
    return dict(json.loads(file.read_text()))


def check_generate(job: Namespace) -> Found:
    """Parity and speed in transformers, for each implementation of attention that is there."""
    kinds = ["sdpa", *(["flash_attention_2"] if is_flash_attn_2_available() else [])]
    sizes = ("--quick", "--shape", job.shape, "--dtype", job.dtype, "--attention")
    return {"held": True, **{one: benchmark(job, "generate.py", *sizes, one) for one in kinds}}


def check_train(job: Namespace) -> Found:
    """One optimiser step as `ospruner train` takes it: trunk, validation and saving included."""
    reasoner, shape = Reasoner(), bases.shape_of(job.shape)
    tokenizer, vocabulary = reasoner.tokenizer, len(reasoner.tokenizer)
    base = bases.random_base(shape, tokenizer, 2 * job.trace_tokens, job.seed, job.dtype)
    steps, made = job.trace_tokens // 40, reasoner.label_settings(job.seed)
    sizes = (job.traces, steps, job.trace_tokens, vocabulary, job.seed)
    batch = bases.random_traces(*sizes, spread=0.0)
    few = bases.random_traces(2, 5, 60, vocabulary, job.seed + 1)
    own: Found = {"head": "fixed", "prices": [1e-4], "tuning": job.tuning, "seed": job.seed}
    own |= {"batch_size": job.traces, "num_train_epochs": 1, "use_cpu": DEVICE == "cpu"}
    config = StopConfig(str(job.folder / "run"), disable_tqdm=True, **own)
    sets = (Labels(traces, made, "") for traces in (batch, few))
    trainer = StopTrainer(config, *sets, model=base, processing_class=tokenizer)
    _, taken = timed(trainer.train)
    found: Found = {"held": None, "seconds_a_step": taken.wall_seconds}
    if DEVICE == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
        found |= {"held": peak <= PEAK_GIB, "allowed_gib": PEAK_GIB, "peak_gib": peak}
    return found


def check_serve(job: Namespace) -> Found:
    """Latency and tokens a second over HTTP, with the policy off, never stopping, and on."""
    sizes = ["--shape", job.shape, "--dtype", job.dtype, "--tokens", str(job.tokens)]
    sizes += ["--tuning", job.tuning, "--streams", *map(str, job.streams)]
    return {"held": None, **benchmark(job, "serve_http.py", "--quick", *sizes)}


def check_parity(job: Namespace) -> Found:
    """Probabilities of stopping on vLLM's tokens, some of them preempted, by both engines."""
    shape, words = bases.shape_of(job.shape), bases.words_of(Reasoner().token_format)
    head = {"spread": 2.0 / shape.hidden_size**0.5, "init_bias": -4.0, "tuning": job.tuning}
    bases.save_random(job.folder, shape, 2048, job.seed, job.dtype, **head)
    gc.collect()
    torch.cuda.empty_cache()  # for vLLM
    from vllm import LLM, SamplingParams

    own = {"additional_config": {"ospruner": {"stop_policy": False}}, "disable_log_stats": False}
    own |= {"gpu_memory_utilization": 0.6} if DEVICE == "cuda" else {"block_size": 32}
    own |= {"dtype": job.dtype, "max_model_len": job.tokens + 96, "seed": job.seed}
    place, requests = str(job.folder / "policy"), range(max(job.streams))
    engine = LLM(model=place, num_gpu_blocks_override=job.blocks, **own)
    draw = random.Random(job.seed)
    asked = [{"prompt_token_ids": draw.choices(words[1:], k=32)} for _ in requests]
    common: Found = {"temperature": 1.0, "logit_bias": dict.fromkeys(words, 100.0)}
    common |= {"detokenize": False, "max_tokens": job.tokens}
    extra = [{**VLLM_NEVER, "stop_id": f"r{i}"} for i in requests]
    params = [SamplingParams(**common, seed=i, extra_args=extra[i]) for i in requests]
    outputs = engine.generate(asked, params, use_tqdm=False)
    model = OSPrunerForCausalLM.from_pretrained(place, dtype=getattr(torch, job.dtype))
    torch.nn.Module.to(model, DEVICE)
    gaps: list[float] = []
    for i, output in enumerate(outputs):
        [told] = engine.collective_rpc("ospruner_told", args=("stop_id", f"r{i}"))[0]
        prompt = asked[i]["prompt_token_ids"]
        ids = torch.tensor([[*prompt, *output.outputs[0].token_ids]], device=DEVICE)
        with torch.inference_mode():
            exact = torch.sigmoid(stop_logits(model, ids)[0].float()).cpu()
        at = torch.tensor(told["step_ends"], dtype=torch.int64) + len(prompt) - 1
        gaps += (exact[at] - torch.tensor(told["probabilities"])).abs().tolist()
    counts: Found = {metric.name: metric for metric in engine.get_metrics()}
    found: Found = {"preemptions": counts["vllm:num_preemptions"].value, "steps": len(gaps)}
    found |= {"largest_difference": max(gaps), "tolerance": TOLERANCE[job.dtype]}
    held = found["largest_difference"] <= found["tolerance"] and found["preemptions"] > 0
    return {"held": held, **found}


def check_labels(job: Namespace) -> Found:
    """What `benchmarks/labels.py` finds here; vLLM forks on the GPU."""
    quick = ["--quick"] if DEVICE == "cpu" else []
    return {"held": None, **benchmark(job, "labels.py", *quick)}


IN_ORDER = (check_generate, check_train, check_serve, check_parity, check_labels)  # of worth
CHECKS = {check.__name__.removeprefix("check_"): check for check in IN_ORDER}


def run_child(name: str, folder: Path, seconds: float) -> Found:
    """One check in a process of its own; its output goes to a log in the folder."""
    log, file = folder / f"{name}.log", folder / f"{name}.json"
    command = [sys.executable, *sys.argv, "--check", name, "--folder", str(folder)]
    started, error = time.monotonic(), dict[str, str]()
    with log.open("w") as output:
        to_log: Found = {"stdout": output, "stderr": subprocess.STDOUT}
        try:
            subprocess.run(command, timeout=seconds, check=True, **to_log)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as failed:
            error = {"error": str(failed), "last_words": log.read_text("utf-8", "replace")[-1500:]}
    found = json.loads(file.read_text()) if file.exists() else {"held": False}
    return {**found, **error, "seconds": round(time.monotonic() - started, 1)}


def main() -> None:
    """Runs the checks in turn; the last line is JSON."""
    parser = timing.options(__doc__)
    tiny: Found = {"action": "store_const", "dest": "shape", "const": "tiny", "default": "7b"}
    parser.add_argument("--tiny", **tiny, help="tiny sizes: minutes on a CPU")
    parser.add_argument("--tuning", choices=("queries", "layers"), default="queries")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=[*CHECKS], help="these checks")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all checks (default: 10)")
    parser.add_argument("--check", choices=CHECKS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = timing.parse(parser)
    if DEVICE == "cpu" and args.shape != "tiny":
        raise SystemExit("no GPU is here; --tiny runs the same checks on a CPU, at tiny sizes")
    if args.check:
        job = Namespace(**vars(args), **SIZES[args.shape])
        (args.folder / f"{args.check}.json").write_text(json.dumps(CHECKS[args.check](job)))
        return
    result: Found = {one: vars(args)[one] for one in ("shape", "seed", "tuning")}
    result |= {**timing.environment(), "checks": {}}
    end = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as folder:
        for check in args.only:
            found: Found = {"held": None, "not_run": "no time left"}
            if (left := end - time.monotonic()) >= 1:
                found = run_child(check, Path(folder), left)
            word = {True: "held", False: "NOT HELD", None: "seen"}[found.pop("held")]
            result["checks"][check] = {"verdict": word, **found}
            print(f"{check}: {word}")
            for key, value in found.items():
                print(f"  {key}: {json.dumps(value)}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(result) + "\n")
    timing.print_json(result, args.json)
    if any(found["verdict"] == "NOT HELD" for found in result["checks"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    bases.vllm_on_a_cpu()
    main()
