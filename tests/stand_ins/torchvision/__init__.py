"""Stands in for torchvision, whose wheels need CUDA; text models only import its names."""

import enum
import sys
import types
from typing import Any

__version__ = "0.28.0"


class InterpolationMode(enum.Enum):
    """What transformers maps its own resampling filters to."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Names(types.ModuleType):
    """A module in which every public name is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.InterpolationMode = InterpolationMode

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for _name in ("io", "ops", "transforms", "transforms.functional", "transforms.v2"):
    sys.modules[f"{__name__}.{_name}"] = _Names(f"{__name__}.{_name}")
sys.modules[f"{__name__}.transforms.v2.functional"] = _Names("functional")
for _name, _module in list(sys.modules.items()):
    if _name.startswith(f"{__name__}."):
        _parent, _, _own = _name.rpartition(".")
        setattr(sys.modules[_parent], _own, _module)
