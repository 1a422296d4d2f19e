"""Packages that only some engines need: imported where used, with a clear word where missing."""

import importlib
from types import ModuleType


class MissingPackageError(ImportError, ValueError):
    """An optional package is not installed; whoever asked for it gave a value that cannot be."""


def needed(module: str, feature: str, pip_line: str) -> ModuleType:
    """Imports a module of an optional package.

    Args:
        module: what to import.
        feature: what it is needed for, as the subject of a sentence.
        pip_line: the command that installs it.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise MissingPackageError(
            f"{feature} needs the package {package}, which is not installed: {pip_line}"
        ) from error
