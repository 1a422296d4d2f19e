"""What one GPU shows of the policy at R1-Distill-Qwen-7B's sizes, with random weights.

    python benchmarks/gpu.py {train,parity} [--tiny] [--tuning layers] [--json FILE]

Nothing is downloaded. `make gpu` makes both checks, and runs the benchmarks that have a GPU's
sizes. `--tiny` takes a width of 128, on a CPU too: the test of this file.

train      one optimiser step on 32 traces of 15,000 tokens: seconds, and peak memory
parity     vLLM's probabilities of stopping against transformers', where requests are preempted
"""

import gc
import random
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import bases
import timing
import torch
from bases import DEVICE, VLLM_NEVER
from timing import timed

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.demo.shipped import Reasoner
from ospruner.scoring import stop_logits
from ospruner.train.config import StopConfig
from ospruner.train.labels.loading import Labels
from ospruner.train.trainer import StopTrainer

Found = dict[str, Any]
SIZES: dict[str, Found] = {
    "7b": {"dtype": "bfloat16", "traces": 32, "trace_tokens": 15_000}
    | {"streams": 64, "tokens": 256, "blocks": 400},
    "tiny": {"dtype": "float32", "traces": 8, "trace_tokens": 200}
    | {"streams": 4, "tokens": 64, "blocks": 9},
}
"""A training step takes `traces` of `trace_tokens`; `streams` requests of `tokens` each are in vLLM
at a time, in `blocks` pages, which are too few for all."""
TOLERANCE = {"bfloat16": 0.02, "float32": 1e-4}
"""How far two engines' probabilities of stopping may lie apart."""
PEAK_GIB = 60.0  # what a training step may take


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


def check_parity(job: Namespace) -> Found:
    """Probabilities of stopping on vLLM's own tokens: vLLM's against transformers'.

    The pages are too few for all requests: some are preempted and taken up again.
    """
    shape, words = bases.shape_of(job.shape), bases.words_of(Reasoner().token_format)
    head = {"spread": 2.0 / shape.hidden_size**0.5, "init_bias": -4.0, "tuning": job.tuning}
    bases.save_random(job.folder, shape, 2048, job.seed, job.dtype, **head)
    gc.collect()
    torch.cuda.empty_cache()  # for vLLM
    from vllm import LLM, SamplingParams

    own = {"additional_config": {"ospruner": {"stop_policy": False}}, "disable_log_stats": False}
    own |= {"gpu_memory_utilization": 0.6} if DEVICE == "cuda" else {"block_size": 32}
    own |= {"dtype": job.dtype, "max_model_len": job.tokens + 96, "seed": job.seed}
    place, requests = str(job.folder / "policy"), range(job.streams)
    engine = LLM(model=place, num_gpu_blocks_override=job.blocks, **own)
    draw = random.Random(job.seed)
    prompts = [draw.choices(words[1:], k=32) for _ in requests]
    common: Found = {"temperature": 1.0, "logit_bias": dict.fromkeys(words, 100.0)}
    common |= {"detokenize": False, "max_tokens": job.tokens}
    extra = [{**VLLM_NEVER, "stop_id": f"r{i}"} for i in requests]
    params = [SamplingParams(**common, seed=i, extra_args=extra[i]) for i in requests]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.generate(asked, params, use_tqdm=False)
    model = OSPrunerForCausalLM.from_pretrained(place, dtype=getattr(torch, job.dtype))
    torch.nn.Module.to(model, DEVICE)
    gaps: list[float] = []
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        [told] = engine.collective_rpc("ospruner_told", args=("stop_id", f"r{i}"))[0]
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


def main() -> None:
    """Makes one check; the last line is JSON, the exit status 1 where it is not held."""
    parser = timing.options(__doc__)
    checks = {"train": check_train, "parity": check_parity}
    parser.add_argument("check", choices=checks)
    tiny: Found = {"action": "store_const", "dest": "shape", "const": "tiny", "default": "7b"}
    parser.add_argument("--tiny", **tiny, help="tiny sizes: minutes on a CPU")
    parser.add_argument("--tuning", choices=("queries", "layers"), default="queries")
    args = timing.parse(parser)
    if DEVICE == "cpu" and args.shape != "tiny":
        raise SystemExit("no GPU is here; --tiny makes the same check on a CPU, at tiny sizes")
    with tempfile.TemporaryDirectory() as folder:
        job = Namespace(**vars(args), **SIZES[args.shape], folder=Path(folder))
        found = checks[args.check](job)
    asked = {"check": args.check, "shape": args.shape, "seed": args.seed, "tuning": args.tuning}
    timing.print_last_line({**asked, **found}, args.json)
    if found["held"] is False:
        raise SystemExit(f"{args.check}: NOT HELD")


if __name__ == "__main__":
    bases.vllm_on_a_cpu()
    main()
