"""Tests what all commands share: help, wrong use, colours, pipes, ranks, completion, JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from deepytorch import cli

LONGEST_NAME = 42
"""An option's or example's own name is never broken, however narrow the terminal."""


def paths(group: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command and group of ours, as words after `deepytorch`."""
    yield prefix
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from paths(command, (*prefix, name))
        else:
            yield (*prefix, name)


PATHS = list(paths(typer.main.get_command(cli.app)))
COMMANDS = [path for path in PATHS if path not in ((), ("bench",))]
each = pytest.mark.parametrize("path", PATHS, ids=lambda path: " ".join(path) or "deepytorch")
each_command = pytest.mark.parametrize("path", COMMANDS, ids=" ".join)


def help_of(path: tuple[str, ...], columns: int) -> str:
    result = CliRunner().invoke(
        cli.app, [*path, "--help"], prog_name="deepytorch", env={"COLUMNS": str(columns)}
    )
    assert result.exit_code == 0, result.output
    return result.output


def fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[Any, str, str]:
    """Exit status and both streams of the real entry point."""
    monkeypatch.setattr(sys, "argv", ["deepytorch", *words])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    shown = capsys.readouterr()
    return exited.value.code, shown.out, shown.err


@each
@pytest.mark.parametrize("columns", [40, 80])
def test_help_fits_and_cuts_nothing(path: tuple[str, ...], columns: int) -> None:
    text = help_of(path, columns)
    assert "…" not in text
    assert not re.search(r"[─│╭╰\x1b]", text), "plain text, for pipes"
    for line in text.partition("Examples:")[0].splitlines():
        assert len(line) <= max(columns, LONGEST_NAME), line
    assert all(len(line) <= 80 for line in text.splitlines())


@each
def test_the_same_words_at_any_width(path: tuple[str, ...]) -> None:
    # A word with a hyphen may be broken after it.
    wide, narrow = ("".join(help_of(path, columns).split()) for columns in (80, 40))
    assert wide == narrow


@each_command
def test_every_option_says_what_it_does(path: tuple[str, ...]) -> None:
    command: Any = typer.main.get_command(cli.app)
    for word in path:
        command = command.commands[word]
    for parameter in command.params:
        words = getattr(parameter, "help", None)
        assert words, parameter.name
        assert words[-1] == ".", f"{parameter.name}: {words}"
    assert command.help.partition("\n")[0][-1:] in ".,:" or "\n" in command.help


@each_command
def test_every_command_has_examples_of_itself(path: tuple[str, ...]) -> None:
    examples = help_of(path, 80).partition("Examples:")[2].splitlines()
    lines = [line.strip() for line in examples if line.strip()]
    assert lines
    for line in lines:
        assert re.search(rf"\b{' '.join(path)}\b", line), line


@each_command
def test_options_of_examples_exist(path: tuple[str, ...]) -> None:
    known = help_of(path, 80).partition("Examples:")[0]
    examples = help_of(path, 80).partition("Examples:")[2]
    for line in examples.splitlines():
        # Words after their own options belong to torchrun or to the script.
        if path in (("run",), ("tune",)) or "torchrun" in line:
            continue
        for option in re.findall(r"(?<=\s)--[a-z-]+", line.partition("|")[0]):
            assert option in known, line


def test_group_help_has_whole_sentences() -> None:
    text = " ".join(help_of((), 80).split())
    for path in COMMANDS:
        if len(path) == 1:
            first = " ".join(help_of(path, 80).partition("\n\n")[2].partition("\n\n")[0].split())
            assert first in text, path


WRONG = {
    "banch": "No such command 'banch'",
    "topology --nope": "No such option",
    "explain all_reduce": "needs a size",
    "explain": "Missing argument",
    "train nothing": "no recipe 'nothing'",
    "doctor --only nonsense": "no check 'nonsense'",
    "report --pid 1": "go with --hang",
    "bench collectives --sizes x": "'x' is no size",
    "build --torch-wheels .": "goes with --torch or --all-torch",
    "run --nproc-per-node 2": "which script?",
    "run --rounds 0 x.py": "Invalid value",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_use_is_one_line_and_status_2(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = fail(monkeypatch, capsys, *words.split())
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert WRONG[words] in err
    assert "\x1b" not in err


def test_of_a_job_rank_0_alone_says_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, lines in ((0, 1), (1, 0)):
        monkeypatch.setenv("RANK", str(rank))
        code, out, err = fail(monkeypatch, capsys, "doctor", "--only", "nonsense")
        assert (code, out, err.count("\n")) == (2, "", lines)


def test_without_a_command_there_is_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = fail(monkeypatch, capsys)
    assert code == 2
    assert "Commands:" in out + err


@pytest.mark.parametrize("forced", [True, False])
def test_colours_only_where_wanted(
    forced: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # stands in for a terminal
    if not forced:
        monkeypatch.setenv("NO_COLOR", "1")
    _, _, err = fail(monkeypatch, capsys, "train", "nothing")
    assert ("\x1b[1;31m" in err) == forced


@pytest.mark.parametrize("words", ["topology --json", "report --json"])
def test_json_is_valid_and_alone(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = fail(monkeypatch, capsys, *words.split())
    assert code == 0
    assert isinstance(json.loads(out), dict)


def test_a_saved_report_as_json(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "run.json"
    saved.write_text(json.dumps({"native_calls": 3}))
    _, out, _ = fail(monkeypatch, capsys, "report", str(saved), "--json")
    shown = json.loads(out)[str(saved)]
    assert shown.pop("will_it_scale")["known"] is False
    assert shown == {"native_calls": 3}
    code, _, err = fail(monkeypatch, capsys, "report", str(saved), "--json", "--html", "x")
    assert code == 2
    assert "give one of them" in err


@pytest.mark.parametrize("terminal", [True, False])
def test_boxes_are_for_terminals(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")  # stands in for one
    shown = CliRunner().invoke(cli.app, ["topology"])
    assert shown.exit_code == 0
    assert ("╭" in shown.output) == terminal
    assert ("\x1b" in shown.output) == terminal


CHILD = """\
import sys
from deepytorch import cli
for words in {paths!r}:
    sys.argv = ["deepytorch", *words]
    try:
        cli.main()
    except SystemExit as exited:
        assert not exited.code, words
heavy = {{"torch", "numpy", "transformers", "matplotlib"}} & sys.modules.keys()
sys.exit(f"help imports {{heavy}}" if heavy else 0)
"""


def test_help_of_no_command_imports_torch() -> None:
    words = [[*path, "--help"] for path in PATHS]
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(paths=words)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


COMPLETIONS = {
    "deepytorch do": "doctor",
    "deepytorch train lla": "llama_sft",
    "deepytorch doctor --only nu": "numa",
    "deepytorch explain all_re": "all_reduce",
    "deepytorch build --all": "--all-torch",
}


@pytest.mark.parametrize("line", COMPLETIONS)
def test_completions(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    asked = CliRunner().invoke(
        cli.app, prog_name="deepytorch", env={"_DEEPYTORCH_COMPLETE": "complete_bash", **words}
    )
    assert asked.exit_code == 0
    assert COMPLETIONS[line] in asked.output.split()


def test_completion_in_bash() -> None:
    """The shell itself, with the script that we print, over the real command."""
    script = f"""
        folder=$(mktemp -d); PATH=$folder:$PATH
        printf '#!/bin/sh\nexec "{sys.executable}" -m deepytorch.cli "$@"\n' > "$folder/deepytorch"
        chmod +x "$folder/deepytorch"
        eval "$(deepytorch --show-completion bash)"
        COMP_WORDS=(deepytorch do); COMP_CWORD=1; _deepytorch_completion deepytorch
        rm -r "$folder"
        echo "${{COMPREPLY[*]}}"; complete -p deepytorch
    """
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    offered, registered = done.stdout.splitlines()
    assert offered == "doctor"
    assert "-F _deepytorch_completion" in registered


def test_the_versions_are_shown_without_importing_torch() -> None:
    main = "try: cli.main()\nfinally: print('torch' in sys.modules)"
    code = f"import sys; from deepytorch import cli\n{main}"
    shown = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True
    )
    versions, torch_is_loaded = shown.stdout.splitlines()
    assert re.fullmatch(r"deepytorch \d[\d.]+, torch \d\S+, Python 3\.\d+\.\d+", versions)
    assert torch_is_loaded == "False"
