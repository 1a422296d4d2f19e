"""OS-Pruner: stops a reasoning model at the right paragraph of its thinking.

```python
import ospruner

labels = ospruner.label("Qwen/Qwen3-8B", "deepscaler", out="labels")
trainer = ospruner.StopTrainer(ospruner.StopConfig("policy"), labels)
trainer.train()
report = ospruner.compare(
    labels["test"], ["policy", ospruner.rules.Budget(400)], choose_on=labels["validation"]
)
ospruner.publish("policy", "org/ospruner-qwen3-8b")
```

Everything is loaded when it is first used: `import ospruner` loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modeling_ospruner import OSPrunerForCausalLM, StopPolicyConfig
    from ospruner import demo, rules
    from ospruner.calibrating import calibrate
    from ospruner.comparing import compare
    from ospruner.hub_cards.publish import publish
    from ospruner.hub_cards.verify import verify
    from ospruner.rounds import make
    from ospruner.train.config import StopConfig
    from ospruner.train.labels.label import label
    from ospruner.train.trainer import StopTrainer

__all__ = ["OSPrunerForCausalLM", "StopConfig", "StopPolicyConfig", "StopTrainer"]
__all__ += ["calibrate", "compare", "demo", "label", "make", "publish", "rules", "verify"]

_WHERE = {
    "OSPrunerForCausalLM": "modeling_ospruner",
    "StopConfig": "ospruner.train.config",
    "StopPolicyConfig": "modeling_ospruner",
    "StopTrainer": "ospruner.train.trainer",
    "calibrate": "ospruner.calibrating",
    "compare": "ospruner.comparing",
    "label": "ospruner.train.labels.label",
    "make": "ospruner.rounds",
    "publish": "ospruner.hub_cards.publish",
    "verify": "ospruner.hub_cards.verify",
}


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first asked for."""
    if name in _WHERE:
        found = getattr(import_module(_WHERE[name]), name)
    elif name in __all__:
        found = import_module(f"ospruner.{name}")
    else:
        raise AttributeError(f"module 'ospruner' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
