"""The one command, `ospruner`. Only wiring: a sub-command calls one function."""

from .commands import app, main

__all__ = ["app", "main"]
