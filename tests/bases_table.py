"""Which bases a policy works on: `PYTHONPATH=tests/stand_ins python -m tests.bases_table`.

Writes `docs/bases.json`, from which `make docs` fills the table of docs/bases.md: for each family a
tiny random base, the policy's answer on it compared with a reference, or why it is refused. In
transformers the copies of the base's last two layers must give its own last hidden states. For vLLM
it says which are compared in `tests/serving/vllm/bases_checks.py`: tokens with plain vLLM's, stop
probabilities with those of transformers. SGLang's column is made, and compared, by the Python of
its environment (`make test-sglang`).
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel

from modeling_ospruner.policy_ospruner import Reader
from ospruner.demo import REASONER
from ospruner.train.untrained import fresh_layers

from .families import MORE, ORDINARY, OTHERS, make_base, padded_prompts

FILE = Path(__file__).parents[1] / "docs/bases.json"
NO_POLICY = "refused: there is no policy to serve"


@torch.no_grad()
def in_transformers(base: PreTrainedModel, tuning: str) -> str:
    """The largest difference of a fresh policy's logits from those of the base's last states."""
    inputs = padded_prompts(20)
    mask = inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    try:
        policy = fresh_layers(base, 2, tuning)
    except ValueError as error:
        said = " ".join(str(error).split()).split(" cannot be a base: ")[-1]
        return f"refused: {said}"
    torch.nn.init.normal_(policy.head.weight)
    with Reader(base, policy) as reader:
        last = base.get_decoder()(**inputs, position_ids=positions).last_hidden_state
        found = policy(reader.hidden, positions, mask, None, reader.keys)
    apart = (found - policy.head(last.float())[..., 0])[mask.bool()].abs().max()
    return f"right ({apart:.0e})" if apart < 1e-4 else f"WRONG ({apart:.0e})"


def in_vllm(name: str, base: PreTrainedModel) -> str:
    """Whether the checks of bases in a real vLLM have it, or why vLLM takes none."""
    from ospruner.serving.vllm.servable import why_not

    from .serving.vllm.bases_checks import REFUSED, RIGHT

    why = why_not(base.config) or REFUSED.get(name)
    if why is not None:
        return f"refused: {why}"
    return "right" if name in RIGHT else "taken, not compared"


def main(names: Sequence[str]) -> None:
    """Makes the rows of families, or of all, anew."""
    rows = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
    tokenizer = AutoTokenizer.from_pretrained(REASONER)
    if importlib.util.find_spec("sglang") is not None:
        from .serving.sglang.bases_checks import check
    for name in names or (*ORDINARY, *OTHERS, *MORE):
        base, row = make_base(name, tokenizer), rows.setdefault(name, {})
        if importlib.util.find_spec("sglang") is not None:
            some = not row["queries"].startswith("refused")
            row["sglang"] = check(base, tokenizer) if some else NO_POLICY
        else:
            row |= {tuning: in_transformers(base, tuning) for tuning in ("queries", "layers")}
            some = not (row["queries"].startswith("refused") and row["layers"].startswith("refu"))
            if importlib.util.find_spec("vllm") is not None:
                row["vllm"] = in_vllm(name, base) if some else NO_POLICY
        print(name, row, flush=True)
        FILE.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
