"""Options: defaults, where they come from, and what a wrong one says."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepytorch_core.base import config
from deepytorch_core.base.config import Options

DEFAULTS = Options().to_dict()  # test_public_interface.py has what they must be


def test_every_option_says_what_it_is_for() -> None:
    assert all(meaning for _, _, meaning in config.documented())


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("enabled", "0", False),
        ("enabled", "False", False),
        ("enabled", "on", True),
        ("collectives", "STOCK", "stock"),
        ("compile", "regional", "regional"),
        ("timeout_s", "12.5", 12.5),
        ("staging_mb", "64", 64),
        ("debug", "on", True),
        ("deterministic", "yes", True),
        ("ifname", "eth0,eth1", "eth0,eth1"),
    ],
)
def test_environment_variables_are_converted(name: str, text: str, value: Any) -> None:
    options = Options.from_env({"DEEPYTORCH_" + name.upper(): text})
    assert getattr(options, name) == value
    assert dataclasses.replace(options, **{name: DEFAULTS[name]}) == Options()


def test_an_empty_variable_counts_as_unset() -> None:
    assert Options.from_env({"DEEPYTORCH_ENABLED": "", "DEEPYTORCH_PROFILE": ""}) == Options()


def test_a_keyword_wins_over_the_environment_and_that_over_the_default() -> None:
    base = Options.from_env({"DEEPYTORCH_LOG": "error", "DEEPYTORCH_TUNE": "off"})
    options = Options.from_mapping({"log": "debug"}, base=base)
    assert (options.log, options.tune, options.kernels) == ("debug", "off", "auto")


def test_json_and_yaml_booleans_mean_on_and_off() -> None:
    # YAML reads `kernels: off` as False.
    options = Options.from_mapping({"kernels": False, "padding_free": True, "compile": False})
    assert (options.kernels, options.padding_free, options.compile) == ("off", "on", "off")


@pytest.mark.parametrize(
    ("mapping", "parts"),
    [
        ({"colectives": "auto"}, ["'colectives'", "did you mean collectives?", "timeout_s"]),
        ({"collectives": "nativ"}, ["collectives='nativ'", "auto, native, stock", "mean native?"]),
        ({"enabled": "maybe"}, ["enabled='maybe'", "true", "false"]),
        ({"timeout_s": 0}, ["timeout_s=0", "above 0"]),
        ({"timeout_s": "nan"}, ["timeout_s='nan'"]),
        ({"staging_mb": 1.5}, ["staging_mb=1.5", "whole number"]),
        ({"staging_mb": True}, ["staging_mb=True"]),
        ({"compile": " "}, ["compile=' '"]),
    ],
)
def test_a_wrong_option_says_what_is_valid(mapping: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError, match="=|unknown option") as caught:
        Options.from_mapping(mapping)
    for part in parts:
        assert part in str(caught.value)


def test_a_wrong_variable_is_named_as_a_variable() -> None:
    with pytest.raises(ValueError, match=r"DEEPYTORCH_TIMEOUT_S='soon': expected a number"):
        Options.from_env({"DEEPYTORCH_TIMEOUT_S": "soon"})


def test_options_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().log = "debug"  # type: ignore[misc]


@given(st.dictionaries(st.sampled_from(list(DEFAULTS)), st.text(max_size=8) | st.integers()))
def test_any_mapping_gives_options_or_a_value_error(mapping: dict[str, Any]) -> None:
    message = None
    try:
        options = Options.from_mapping(mapping)
    except ValueError as error:
        message = str(error)
    if message is None:
        assert Options.from_mapping(options.to_dict()) == options
    else:
        assert any(name in message for name in mapping)


def test_current_options_follow_the_environment_until_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPYTORCH_TUNE", "force")
    config.set_current(None)  # the import of deepytorch by another module puts options in force
    assert config.current().tune == "force"
    config.set_current(Options(tune="off"))
    try:
        assert config.current().tune == "off"
    finally:
        config.set_current(None)
    assert config.current().tune == "force"


def test_misspelt_variables_are_found() -> None:
    found = config.unknown_variables(
        {
            "DEEPYTORCH_TIMEOUT": "3",
            "DEEPYTORCH_LOG": "info",
            "DEEPYTORCH_CACHE_DIR": "/x",
            "A": "b",
        }
    )
    assert found == [
        "DEEPYTORCH_TIMEOUT is no variable of deepytorch (did you mean DEEPYTORCH_TIMEOUT_S?)"
    ]


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DEEPYTORCH_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert config.cache_dir() == Path("/home/somebody/.cache/deepytorch")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/user")
    assert config.cache_dir() == Path("/var/cache/user/deepytorch")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/does/not/count")
    assert config.cache_dir() == Path("/home/somebody/.cache/deepytorch")
    monkeypatch.setenv("DEEPYTORCH_CACHE_DIR", "/scratch/dpt")
    assert config.cache_dir() == Path("/scratch/dpt")


def test_launcher_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert (config.rank(), config.world_size(), config.local_rank()) == (0, 1, 0)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "not a number")
    assert (config.rank(), config.local_rank()) == (3, 0)


def test_compiler_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "my-c++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"{compiler} -v")
    assert config.compiler() == [str(compiler), "-v"]
    monkeypatch.setenv("CXX", str(tmp_path / "absent"))
    assert config.compiler() is None


def test_the_core_sees_what_is_given_as_keyword() -> None:
    program = (
        "import os\n"
        "from deepytorch_core.base import config\n"
        "before = dict(os.environ)\n"
        "config.set_current(config.Options(log='error', reduce_threads=3))\n"
        "assert config.for_core()['DEEPYTORCH_LOG'] == 'error'\n"
        "assert config.for_core()['DEEPYTORCH_REDUCE_THREADS'] == '3'\n"
        "assert 'DEEPYTORCH_IFNAME' not in config.for_core()\n"
        "from deepytorch_core import _core\n"
        "for name, value in config.for_core().items():\n"
        "    _core.set_variable(name, value)\n"
        "assert dict(os.environ) == before\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=_environment())


def test_what_is_put_into_the_environment_can_be_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_set", {})
    monkeypatch.setenv("NCCL_THEIRS", "user")
    for name in ("NCCL_OURS", "GLOO_OURS", "NCCL_CHANGED"):
        monkeypatch.delenv(name, raising=False)
    config.set_where_unset({"NCCL_THEIRS": "1", "GLOO_OURS": "eth1"})
    config.set_for_nccl({"NCCL_OURS": "2", "NCCL_CHANGED": "3"})
    monkeypatch.setenv("NCCL_CHANGED", "user")
    for _ in range(2):
        config.withdraw()
        here = config.child_environment()
        assert "GLOO_OURS" not in here
        assert "NCCL_OURS" not in here
        assert (here["NCCL_THEIRS"], here["NCCL_CHANGED"]) == ("user", "user")
        config.renew()
        here = config.child_environment()
        assert (here["GLOO_OURS"], here["NCCL_OURS"]) == ("eth1", "2")
        assert (here["NCCL_THEIRS"], here["NCCL_CHANGED"]) == ("user", "user")
    config.withdraw()


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": root}  # noqa: TID251


def test_the_native_cores_variables_are_known_here() -> None:
    header = (Path(__file__).parents[2] / "csrc" / "base" / "env.hpp").read_text()
    names = set(re.findall(r"DEEPYTORCH_[A-Z_]+", header))
    assert names
    assert config.unknown_variables(dict.fromkeys(names, "1")) == []
