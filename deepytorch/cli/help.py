"""How help and wrong use look: plain text that loses nothing in a pipe or a narrow terminal."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

_WIDEST, _NARROWEST = 80, 24


def examples(*lines: str) -> str:
    """An epilogue: commands as they are typed, one a line; `\\b` keeps click from filling them."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def matching(words: Iterable[str], incomplete: str) -> list[str]:
    """Return what the shell offers where `incomplete` is typed."""
    return [word for word in words if word.startswith(incomplete)]


class Command(TyperCommand):
    """A command whose help fits the terminal."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _fit(formatter)
        super().format_help(ctx, formatter)


class CommandGroup(TyperGroup):
    """A group whose help fits the terminal and says each command's first sentence in full."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _fit(formatter)
        super().format_help(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                first = (command.help or "").partition("\n\n")[0]
                rows.append((name, " ".join(first.split())))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def dress(app: typer.Typer) -> None:
    """Give an app, its commands and its groups this help."""
    app.info.cls = CommandGroup
    for command in app.registered_commands:
        if not issubclass(command.cls or TyperCommand, Command):
            command.cls = Command
    for group in app.registered_groups:
        group.cls = CommandGroup
        if group.typer_instance is not None:
            dress(group.typer_instance)


def usage_error(error: Exception) -> str | None:
    """The one line for a wrong command line; None for any other error.

    By their shape: typer brings its own copy of click's exceptions, or uses those installed.
    """
    format_message = getattr(error, "format_message", None)
    if format_message is None or not hasattr(error, "exit_code"):
        return None
    context = getattr(error, "ctx", None)
    where = f" (deepytorch {_path(context)}--help)" if context is not None else ""
    return f"{' '.join(str(format_message()).split())}{where}"


def _path(context: Any) -> str:
    words = context.command_path.split()[1:]
    return "".join(f"{word} " for word in words)


def _fit(formatter: Any) -> None:
    """Click never goes below 50 columns, and gives names 30 of them."""
    columns = shutil.get_terminal_size((_WIDEST, 24)).columns
    formatter.width = max(_NARROWEST, min(columns, _WIDEST) - 2)
    write, column = formatter.write_dl, min(30, formatter.width // 3)

    def write_dl(rows: Any, col_max: int = column, col_spacing: int = 2) -> None:
        write(rows, col_max=min(col_max, column), col_spacing=col_spacing)

    formatter.write_dl = write_dl
