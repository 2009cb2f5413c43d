# SPDX-License-Identifier: Apache-2.0
"""A recipe's options: a dataclass, filled from a YAML file and then from ``key=value`` words."""

import argparse
import dataclasses
import difflib
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from deepytorch.recipes.base.aliases import ALIASES

ConfigT = TypeVar("ConfigT")


_NO_VALUE = ("", "~", "null")  # in YAML
_KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
}


class RecipeError(ValueError):
    """The user's options, data or machine do not allow this run; the text says what to change."""


class RankRecipeError(RecipeError):
    """A RecipeError that only this rank has met, so it must speak itself."""


@dataclass(frozen=True)
class RecipeArguments:
    """The arguments that the command line gives."""

    config: Path
    compare: bool
    dry_run: bool
    overrides: list[str]


def parse_arguments(argv: Sequence[str] | None, *, recipe: str, default: Path) -> RecipeArguments:
    """Parse every recipe's ``[--config F] [--compare] [--dry-run] [key=value ...]``.

    ``argv`` None means the process's own arguments. Exits with status 2 on an unknown flag.
    """
    parser = argparse.ArgumentParser(
        prog=recipe, description=f"Train {recipe}. Every key of the YAML can be set as key=value."
    )
    parser.add_argument(
        "--config", type=Path, default=default, help="YAML file (default: %(default)s)"
    )
    parser.add_argument(
        "--compare", action="store_true", help="train the stock stack and deepytorch side by side"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print how much memory training needs, and stop"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    found = parser.parse_intermixed_args(argv)
    return RecipeArguments(
        config=found.config,
        compare=found.compare,
        dry_run=found.dry_run,
        overrides=found.overrides,
    )


def kind_of(hint: Any) -> str:
    """The type of an option in words for help: its choices, or what it must be."""
    options = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return " | ".join(map(str, options))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(
            [kind_of(option) for option in options if option is not type(None)] + ["null"]
        )
    return _KINDS[hint].removeprefix("a ")


def load_config(cls: type[ConfigT], path: Path, overrides: Sequence[str] = ()) -> ConfigT:
    """Build ``cls`` from the YAML mapping in ``path``, then from ``overrides`` such as "steps=40".

    Raises RecipeError for an unreadable file, an unknown key or a value of the wrong type. For an
    unknown key it names the closest valid one. For a wrong type it names the key and what this
    accepts.
    """
    values = {key: (value, str(path)) for key, value in _read_yaml(path).items()}
    hints = typing.get_type_hints(cls)
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals:
            raise RecipeError(f"'{word}' is not an option: write key=value, for example steps=40")
        values[key.strip()] = (_parse_word(key, text, hints.get(key.strip())), "the command line")

    names = [field.name for field in dataclasses.fields(typing.cast(Any, cls))]
    for key, (_, origin) in values.items():
        if key not in names:
            raise RecipeError(_unknown_key(str(key), names, origin))
    return cls(**{key: _coerce(key, value, hints[key]) for key, (value, _) in values.items()})


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the configuration {path}: {error}") from error
    loaded = _parse_yaml(text, f"{path} is not valid YAML")
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise RecipeError(f"{path} must hold `key: value` lines, not a {type(loaded).__name__}")
    return loaded


def _parse_word(key: str, text: str, hint: Any) -> Any:
    text = text.strip()
    is_quoted = text[:1] in ("'", '"') and text[-1] == text[0] and len(text) > 1
    is_text = hint is str or str in typing.get_args(hint)
    is_word = is_text and text.lower() not in _NO_VALUE
    if not is_quoted and (is_word or "#" in text):
        # YAML would make 1.1 of the name 1.10, and cut "runs #2" at a comment.
        return text
    try:
        return _parse_yaml(text, f"{key}={text} is not a valid value")
    except RecipeError:
        if is_word:
            return text  # such as 'this' is 'that', whose quotes are not around it all
        raise


def _parse_yaml(text: str, wrong: str) -> Any:
    try:
        return yaml.safe_load(text)
    except Exception as error:
        # Not only YAMLError: PyYAML hands on whatever dates and numbers that are none raise in its
        # constructors (ValueError, AttributeError, KeyError, ...), and RecursionError.
        raise RecipeError(f"{wrong}: {error}") from error


def _unknown_key(key: str, names: list[str], origin: str) -> str:
    plain = key.lower().replace("-", "_")
    meant = ALIASES.get(plain, "")
    if meant.partition("=")[0] not in names and not meant.startswith("--"):
        meant = next(iter(difflib.get_close_matches(plain, names, n=1)), "")
    hint = f"Did you mean {meant}?" if meant else f"Valid keys: {', '.join(names)}"
    return f"unknown key '{key}' in {origin}. {hint}"


def _coerce(key: str, value: Any, hint: Any) -> Any:
    """Check ``value`` against the field's type, widening only where nothing is lost."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None:
            return None
        (hint,) = [option for option in typing.get_args(hint) if option is not type(None)]
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        word = "on" if value else "off"
        if isinstance(value, bool) and word in choices:
            value = word  # YAML reads these words as booleans
        if value in choices:
            return value
        close = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
        raise RecipeError(
            f"{key} must be one of {', '.join(map(str, choices))}, not {value!r}"
            f"{f'. Did you mean {close[0]}?' if close else ''}"
        )
    if hint is float and not isinstance(value, bool):
        # YAML 1.1 reads 2e-5 as a string: accept it, it is how people write learning rates.
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    elif hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    elif hint is str and isinstance(value, str) and value.startswith("~/"):
        return str(Path(value).expanduser())  # the shell does so only where it sees the ~
    elif isinstance(value, hint) and isinstance(value, bool) == (hint is bool):
        return value
    raise RecipeError(f"{key} must be {_KINDS[hint]}, not {value!r}")
