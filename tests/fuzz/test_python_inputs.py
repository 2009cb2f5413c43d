"""Fuzzes what users write: whatever it is, it is taken or refused in words.

A short, repeatable part runs in `make test`. `make fuzz` runs the same properties with new examples
for as long as it is asked to: `pytest tests/fuzz --fuzz-seconds 60`.
"""

from __future__ import annotations

import dataclasses
import json
import string
import tempfile
from pathlib import Path
from typing import Any, Literal

import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from deepytorch.recipes.base.config import RecipeError, load_config
from deepytorch_core.base.config import Options
from deepytorch_core.c10d.deepspeed_flag import SECTION, _mentions_us

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=30)
    | st.sampled_from(["on", "off", "auto", "1e3", "0x_", "0b_", "1_0", "nan", "2001-99-99", ""])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(Options.names()) | st.text(max_size=12)


@dataclasses.dataclass(frozen=True)
class Config:
    """One field of every type that recipes have."""

    model: str = "tiny"
    steps: int = 10
    lr: float = 1e-3
    compare: bool = False
    data: str | None = None
    precision: Literal["on", "off", "bf16"] = "on"


FIELDS = st.sampled_from([field.name for field in dataclasses.fields(Config)])
# YAML that is nearly right, with the characters that mean something in it.
YAML_TEXT = st.text(
    alphabet=string.ascii_lowercase + "0123456789_.:-?!&*#|>[]{}%@\"'\n \t", max_size=80
)


def load(text: str) -> Config | None:
    """Return what the YAML gives; None if it was refused."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        path.write_text(text, encoding="utf-8")
        try:
            return load_config(Config, path)
        except RecipeError:
            return None


def has_types(config: Config) -> bool:
    return (
        isinstance(config.model, str)
        and isinstance(config.steps, int)
        and isinstance(config.lr, float)
        and isinstance(config.compare, bool)
        and (config.data is None or isinstance(config.data, str))
        and config.precision in ("on", "off", "bf16")
    )


@given(st.dictionaries(NAMES, VALUES, max_size=4))
@example({"timeout_s": 10**400})
@example({"staging_mb": float("nan")})
def test_options_are_taken_or_refused_by_name(section: dict[str, Any]) -> None:
    refusal = ""
    try:
        options = Options.from_mapping(section)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert any(repr(name) in refusal or name in refusal for name in section), refusal
        return
    # Options that were taken mean the same when they are said again.
    assert Options.from_mapping(options.to_dict()) == options


@given(st.dictionaries(st.text(max_size=12) | st.just(SECTION), VALUES, max_size=3))
def test_a_deepspeed_configuration_is_searched_without_an_error(config: dict[str, Any]) -> None:
    assert _mentions_us(config) == (SECTION in config)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ds.json")
        path.write_text(json.dumps(config), encoding="utf-8")
        if SECTION in config:
            assert _mentions_us(str(path))


@given(st.dictionaries(FIELDS | st.text(max_size=6), VALUES, max_size=4))
@example({"lr": 10**400})
@example({"steps": float("inf")})
def test_recipe_values_are_taken_or_refused(values: dict[str, Any]) -> None:
    found = load(yaml.safe_dump(values))
    assert found is None or has_types(found)


@given(YAML_TEXT)
@example("lr: 2001-99-99")
@example("lr: 0x_")
@example("lr: 0b_")
@example("? [1]\n: 2")
@example("steps: " + "[" * 600)
@example("lr: !!timestamp x")
@example("lr: !!bool x")
@example("lr: !!int ''")
@example("lr: 1:99999999999999999999")
def test_recipe_text_is_read_or_refused(text: str) -> None:
    found = load(text)
    assert found is None or has_types(found)


@given(YAML_TEXT)
@example("lr=2001-99-99")
@example("steps=" + "[" * 600)
def test_recipe_words_are_taken_or_refused(word: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        path.write_text("", encoding="utf-8")
        try:
            found = load_config(Config, path, [word])
        except RecipeError:
            return
        assert has_types(found)


@given(st.binary(max_size=60) | YAML_TEXT.map(str.encode))
def test_recipe_files_of_any_bytes_are_read_or_refused(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        path.write_bytes(data)
        try:
            found = load_config(Config, path)
        except RecipeError:
            return
        assert has_types(found)
