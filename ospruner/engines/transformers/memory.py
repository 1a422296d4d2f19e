"""How many rows fit into memory: by what is free, and by what a row was seen to hold."""

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # a dependency of accelerate
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ospruner.bases import input_device

from .batch import spare_columns

_CGROUP = Path("/sys/fs/cgroup")


class MemoryBudget:
    """Counts the rows whose keys, values and states fit into a share of the free memory.

    One token is run, whose cache says what a row holds and where. The rest of the memory is for
    what a forward needs beside the cache: masks, hidden states, logits. Attention `repeats` keys
    and values for each query head of a group, as transformers' own do under a mask, or not.

    Raises:
        ValueError: the share is not in (0, 1).
    """

    def __init__(self, model: PreTrainedModel, share: float, repeats: bool) -> None:
        if not 0 < share < 1:
            raise ValueError(f"memory_share is {share}; it must lie between 0 and 1")
        self.share = share
        self._copies = 1.0  # of one layer, beside the cache: while it grows
        fields = model.config.get_text_config().to_dict()
        if repeats and fields.get("num_key_value_heads"):
            self._copies = fields["num_attention_heads"] / fields["num_key_value_heads"]
        self._cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            ids = torch.zeros(1, 1, dtype=torch.long, device=input_device(model))
            model(input_ids=ids, past_key_values=self._cache, use_cache=True)

    def free(self) -> dict[torch.device, int | None]:
        """What is free now on each device that holds keys, values or states; see `free_bytes`."""
        return {device: free_bytes(device) for device in self._needed(1)}

    def rows(self, columns: int, free: Mapping[torch.device, int | None] | None = None) -> int:
        """How many rows of so many tokens fit into what is, or was, `free`; perhaps none."""
        sizes = self.free() if free is None else free
        needed = self._needed(columns).items()
        fit = [
            int(self.share * size / one) for on, one in needed if (size := sizes[on]) is not None
        ]
        return min(fit, default=sys.maxsize)

    def refusal(self, columns: int) -> ValueError:
        """The error where not even one row of so many tokens fits."""
        sizes = ", ".join(
            f"{size / 1e9:.2f} GB of {(free_bytes(device) or 0) / 1e9:.2f} GB free on {device}"
            for device, size in self._needed(columns).items()
        )
        return ValueError(
            f"the keys and values of one text of {columns} tokens need {sizes}, and may take the "
            f"share {self.share} of that: lower the cap on the thinking (--max-tokens), raise "
            f"memory_share (--engine-arg memory_share={(1 + self.share) / 2:.2g}), or free memory"
        )

    def _needed(self, columns: int) -> dict[torch.device, float]:
        """Bytes of one row of so many columns on each device."""
        needed: Counter[torch.device] = Counter()
        largest: Counter[torch.device] = Counter()
        for layer in self._cache.layers:
            kept = columns + spare_columns(columns)
            held: Counter[torch.device] = Counter()
            if isinstance(layer, DynamicLayer) and layer.keys is not None:
                kept = min(kept, layer.get_max_length()) if layer.is_sliding else kept
                for states in (layer.keys, layer.values):
                    assert states is not None
                    held[states.device] += kept * states.nbytes
            for kind in vars(layer).values():  # of recurrent layers: the same at any length
                for state in kind.values() if isinstance(kind, dict) else ():
                    if isinstance(state, torch.Tensor):
                        held[state.device] += state.nbytes
            needed += held
            largest |= held
        return {device: size + self._copies * largest[device] for device, size in needed.items()}


def free_bytes(device: torch.device) -> int | None:
    """Memory that may still be taken on a device; None where nobody says."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    free = int(psutil.virtual_memory().available)
    limit = _CGROUP / "memory.max"  # a container's, of which psutil knows nothing
    if limit.is_file() and (text := limit.read_text("ascii").strip()) != "max":
        used = int((_CGROUP / "memory.current").read_text("ascii"))
        lines = (_CGROUP / "memory.stat").read_text("ascii").splitlines()
        # The page cache counts as used there, and is given up when it is needed.
        cache = int(dict(line.split() for line in lines)["inactive_file"])
        free = min(free, int(text) - used + cache)
    return max(free, 0)
