"""Options that are fields of a dataclass: shown ones by name, all others by --set and --config.

A command names the dataclass of its settings and the few fields that people change; these become
options with the fields' own names, types, defaults and help. The dataclass is imported when the
command is called, so that `ospruner --help` loads nothing.
"""

import dataclasses
import difflib
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

__all__ = ["Fields", "LazyGroup", "arg", "opt", "with_fields"]


def opt(text: str, *names: str, **more: Any) -> Any:
    """An option with its help."""
    return typer.Option(*names, help=text, **more)


def arg(text: str) -> Any:
    """An argument with its help."""
    return typer.Argument(help=text)


@dataclass(frozen=True)
class Fields:
    """The dataclass of a command's settings."""

    where: str  # Its module and name, as "package.module:Name"
    # Names of fields that are options of their own, with blanks between them; None for all,
    # without --set and --config
    shown: str | None = ""
    hidden: str = ""  # Names of fields that the command's own arguments set

    def load(self) -> Any:
        """The dataclass."""
        module, _, name = self.where.partition(":")
        return getattr(import_module(module), name)

    def options(self) -> list[inspect.Parameter]:
        """The shown fields, and --set and --config for all, as parameters of a command."""
        cls = self.load()
        kinds = typing.get_type_hints(cls)
        told, said = {one.name: one for one in dataclasses.fields(cls)}, _said_of(cls)
        free = [name for name in told if name not in self.hidden.split()]
        names = free if self.shown is None else self.shown.split()
        options = [_option(told[name], kinds[name], said.get(name, "")) for name in names]
        if self.shown is not None:
            others = f"Any other field of {cls.__name__}: field=value. Repeatable."
            options += [
                _parameter("config", str | None, "Fields in a YAML or JSON file: `field: value`."),
                _parameter("set", list[str] | None, others),
            ]
        return options

    def read(self, said: dict[str, Any]) -> dict[str, Any]:
        """What a user said: options before --set, --set before --config.

        Raises:
            typer.BadParameter: A field that is none (the nearest is named), or a value that none
                is.
        """
        import yaml  # type: ignore[import-untyped]  # a dependency of huggingface_hub

        file, texts = said.pop("config", None), said.pop("set", None) or ()
        found: dict[str, Any] = {}
        if file is not None:
            try:
                content = yaml.safe_load(Path(file).read_text("utf-8"))
            except (OSError, ValueError, yaml.YAMLError) as error:
                raise typer.BadParameter(f"--config {file} cannot be read ({error}).") from None
            if not isinstance(content, Mapping):
                raise typer.BadParameter(f"--config {file} holds no fields: write `field: value`.")
            found |= content
        for text in texts:
            name, equals, value = text.partition("=")
            if not equals:
                raise typer.BadParameter(f"--set {text!r} is no field=value.")
            try:
                found[name.strip()] = yaml.safe_load(value)
            except yaml.YAMLError:
                found[name.strip()] = value
        cls = self.load()
        kinds = typing.get_type_hints(cls)
        names = [one.name for one in dataclasses.fields(cls) if one.init]
        for name in found:
            if name not in names:
                near = difflib.get_close_matches(str(name), names, 1)
                hint = f" Did you mean {near[0]}?" if near else ""
                raise typer.BadParameter(f"{cls.__name__} has no field {name!r}.{hint}")
            if name in self.hidden.split():
                raise typer.BadParameter(
                    f"{name} is said by an argument of this command, not here."
                )
        # A 0 was said, and is not the same as a flag's False.
        found |= {n: v for n, v in said.items() if v not in (None, [], ()) and v is not False}
        return {name: _as(kinds[name], name, value) for name, value in found.items()}


def with_fields(fields: Fields) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Marks a command whose further options are fields: it takes those said as keywords."""

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        vars(function).update(fields=fields, __signature__=signature.replace(parameters=own))
        return function

    return mark


class LazyGroup(TyperGroup):
    """A group whose commands get their fields' options when they are called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As typer does, with the fields' options."""
        name, command, rest = super().resolve_command(ctx, args)
        function: Any = getattr(command and command.callback, "__wrapped__", None)
        if command is None or not hasattr(function, "fields"):
            return name, command, rest
        options = function.fields.options()
        parameters = [*function.__signature__.parameters.values(), *options]

        def called(**values: Any) -> None:
            said = {one.name: values.pop(one.name) for one in options}
            function(**values, **function.fields.read(said))

        vars(called)["__signature__"] = inspect.Signature(parameters)
        called.__annotations__ = {one.name: one.annotation for one in parameters}
        called.__doc__ = function.__doc__
        alone = typer.Typer(add_completion=False)
        alone.command(command.name, context_settings=dict(command.context_settings))(called)
        return name, typer.main.get_command(alone), rest


def _said_of(cls: type) -> dict[str, str]:
    """What a docstring's section "Attributes" says of each field, as a sentence."""
    section = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for name, text in entries}


def _option(field: dataclasses.Field[Any], kind: Any, said: str) -> inspect.Parameter:
    """An option for a field; what is not said stays the dataclass's own default."""
    text, members = str(field.metadata.get("help", said)), _members(kind)
    if bool in members:
        return _parameter(field.name, bool, text, default=False)
    if str not in members and any(typing.get_origin(one) in (tuple, list) for one in members):
        return _parameter(field.name, list[str] | None, text)
    scalar = next((one for one in (str, float, int) if one in members), str)
    silent = field.default in (dataclasses.MISSING, None, "", ())
    return _parameter(field.name, scalar | None, text, shown=not silent and f"{field.default}")


def _parameter(
    name: str, kind: Any, text: str, *, default: Any = None, shown: str | bool = False
) -> inspect.Parameter:
    flag = "--" + name.replace("_", "-")
    option = opt(text, flag, show_default=shown, rich_help_panel="Settings")
    annotation = Annotated[kind, option]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _members(kind: Any) -> list[Any]:
    """The types that a field's type allows."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return [one for one in typing.get_args(kind) if one is not type(None)]
    return [kind]


def _as(kind: Any, name: str, value: Any) -> Any:
    """A value as its field holds it: 1e-4 is a number, one of several texts a tuple."""
    members = _members(kind)
    if any(typing.get_origin(one) is tuple for one in members) and isinstance(
        value, str | list | tuple
    ):
        return (value,) if isinstance(value, str) else tuple(value)
    if str in members or value is None:
        return str(value) if set(members) == {str} and not isinstance(value, list) else value
    if float in members and isinstance(value, str | int) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            raise typer.BadParameter(f"{name} is {value!r}; it must be a number.") from None
    return value
