"""Asks a server of `ospruner serve` with and without the policy, and says what was saved.

    ospruner serve POLICY --port 8000
    python docs/examples/serving_client.py http://localhost:8000

Needs the package openai.
"""

import json
import sys
import urllib.request

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id
instruction = "Please reason step by step, and put your final answer within \\boxed{}."
messages = [{"role": "user", "content": "Solve 3x+54=102 for x.\n\n" + instruction}]

for name, extra in (
    ("plain", {"stop_policy": False}),
    ("pruned", {"stop_policy": True, "stop_id": "example"}),
    ("budget", {"max_thinking_tokens": 20, "stop_id": "example-budget"}),
):
    reply = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=800,
        extra_body={"vllm_xargs": extra},
    )
    thinking = reply.usage.completion_tokens_details.reasoning_tokens
    print(f"{name}: {thinking} thinking tokens, answer {reply.choices[0].message.content!r}")
    if "stop_id" in extra:
        with urllib.request.urlopen(f"{url}/ospruner/stops/{extra['stop_id']}") as answer:
            told = json.load(answer)
        print(f"  stopped by: {told['reason']}, after {told['thinking_tokens']} thinking tokens")

print("streamed: ", end="")
for part in client.chat.completions.create(
    model=model,
    messages=messages,
    temperature=0,
    max_tokens=800,
    stream=True,
    extra_body={"vllm_xargs": {"stop_policy": True}},
):
    print(part.choices[0].delta.content or "", end="", flush=True)
print()

with urllib.request.urlopen(f"{url}/metrics") as answer:
    lines = answer.read().decode().splitlines()
print(*[line for line in lines if line.startswith("ospruner_")], sep="\n")
