"""A real HTTP server on 127.0.0.1 that runs the embedded reasoner, in the dialects of two engines.

`/v1/completions` speaks as vLLM's server does, `/generate` as SGLang's; both were written by what
the real ones answered, which test_vllm.py and test_sglang.py check. Faults can be ordered.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from transformers import DynamicCache

from ospruner.demo.shipped import Reasoner

from ..served_app import ServedApp


@dataclass
class Generated:
    """What the model wrote after one prompt; the last id may be the one that ended it."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[float, int]]] = field(default_factory=list)
    all: list[list[float]] = field(default_factory=list)
    reason: str = "length"
    matched: int | str | None = None


class LocalServer(ServedApp):
    """The server; a context manager.

    Attributes:
        prompts: of all requests so far.
        faults: what to do with the next requests instead of answering them: a status, or "hang";
            "none" answers.
        gives_ids: whether answers hold token ids.
        knows_allowed: whether `allowed_token_ids` is looked at.
    """

    def __init__(self, reasoner: Reasoner) -> None:
        self.reasoner = reasoner
        self.prompts: list[list[int]] = []
        self.seeds: list[int | None] = []
        self.faults: deque[int | str] = deque()
        self.gives_ids = True
        self.knows_allowed = True
        self._lock = threading.Lock()
        app = FastAPI()
        app.post("/v1/completions")(self._completions)
        app.post("/generate")(self._generate)
        super().__init__(app)

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        made = await self._made(body["prompt"], body["max_tokens"], body)
        if isinstance(made, Response):
            return made
        choice: dict[str, Any] = {"index": 0, "finish_reason": made.reason}
        if self.gives_ids and body.get("return_token_ids"):
            choice["token_ids"] = made.ids
        if "logprobs" in body:
            name = "token_id:{}" if self.gives_ids else "t{}"
            choice["logprobs"] = {
                "tokens": [name.format(i) for i in made.ids],
                "token_logprobs": made.logprobs,
                "top_logprobs": [{name.format(i): v for v, i in row} for row in made.top],
            }
        return JSONResponse({"choices": [choice], "usage": {"prompt_tokens_details": None}})

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        sampling = body["sampling_params"]
        made = await self._made(body["input_ids"], sampling["max_new_tokens"], sampling)
        if isinstance(made, Response):
            return made
        finish = {"type": made.reason, "matched": made.matched}
        about: dict[str, Any] = {"cached_tokens": 0, "finish_reason": finish}
        if body.get("return_logprob"):
            chosen = zip(made.logprobs, made.ids, strict=True)
            about["output_token_logprobs"] = [[v, i, None] for v, i in chosen]
            about["output_top_logprobs"] = [[[v, i, None] for v, i in row] for row in made.top]
        if wanted := body.get("token_ids_logprob"):
            told = [[[row[i], i, None] for i in wanted] for row in made.all]
            about["output_token_ids_logprobs"] = told
        return JSONResponse({"output_ids": made.ids, "meta_info": about})

    async def _made(
        self, prompt: list[int], limit: int, sampling: dict[str, Any]
    ) -> Generated | Response:
        """What the model writes, or the next fault."""
        self.prompts.append(prompt)
        fault = self.faults.popleft() if self.faults else None
        if isinstance(fault, int):
            return JSONResponse({"error": {"message": f"fault {fault}"}}, fault)
        if fault == "hang":
            await asyncio.sleep(30)
        self.seeds.append(sampling.get("seed", sampling.get("sampling_seed")))
        return await asyncio.to_thread(self._decode, prompt, limit, sampling)

    @torch.inference_mode()
    def _decode(self, prompt: list[int], limit: int, sampling: dict[str, Any]) -> Generated:
        model, tokenizer = self.reasoner.model, self.reasoner.tokenizer
        allowed = sampling.get("allowed_token_ids") if self.knows_allowed else None
        ends, stops = sampling["stop_token_ids"], sampling.get("stop") or []
        made, cache, feed = Generated(), DynamicCache(config=model.config), prompt
        with self._lock:
            while len(made.ids) < limit:
                given = {"past_key_values": cache, "use_cache": True}
                logits = model(torch.tensor([feed]), **given).logits[0, -1]
                scores = logits.log_softmax(-1)
                if (heat := sampling["temperature"]) > 0:
                    token = int(torch.multinomial((logits / heat).softmax(-1), 1))
                else:
                    # What is allowed shapes the choice, not the log-probabilities.
                    token = max(allowed or range(len(scores)), key=scores.tolist().__getitem__)
                values, places = scores.topk(20)
                made.ids.append(token)
                made.logprobs.append(float(scores[token]))
                made.top.append(list(zip(values.tolist(), places.tolist(), strict=True)))
                made.all.append(scores.tolist())
                text = tokenizer.decode(made.ids[-8:])  # texts may be cut by tokens
                if token in ends or any(stop in text for stop in stops):
                    made.reason, made.matched = "stop", token if token in ends else stops[0]
                    break
                feed = [token]
        return made
