"""Tests what `run --compare` says of a run that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepytorch.cli.compare import failure

OUTPUT = """\
noise
[rank1]: Traceback (most recent call last):
[rank1]:   File "{cli}/runner.py", line 82, in <module>
[rank1]:     main(sys.argv[1:])
[rank1]:   File "<frozen runpy>", line 88, in _run_code
[rank1]:   File "/home/me/train.py", line 3, in <module>
[rank1]:     step()
[rank1]:     ~~~~^^
[rank1]: KeyError: 'weights'
[rank1]: of layer 3
Traceback (most recent call last):
  File "/home/me/train.py", line 9, in <module>
W1123 17:21:16.213 199 torch/distributed/elastic/multiprocessing/api.py:1028] Sending ...
============
"""


def said_of(output: str, status: int | None = 1, hint: str = "") -> list[str]:
    return failure.words(output, status, arm="ours", hint=hint, limit_s=9.0).splitlines()


def test_a_failure_is_the_scripts_own_error() -> None:
    output = OUTPUT.format(cli=Path(failure.__file__).parents[1])
    assert said_of(output, hint="the way out") == [
        "the script failed with exit status 1 under the arm 'ours': KeyError: 'weights'",
        "Traceback (most recent call last):",
        '  File "/home/me/train.py", line 3, in <module>',
        "    step()",
        "    ~~~~^^",
        "KeyError: 'weights'",
        "of layer 3",
        "the way out",
    ]
    chained = output.replace("of layer 3", "\nDuring handling of the above exception, another one:")
    assert '  File "/home/me/train.py", line 9, in <module>' in said_of(chained)
    assert said_of("one\ntwo\n") == [
        "the script failed with exit status 1 under the arm 'ours': two",
        "one",
        "two",
    ]


LAUNCHERS = """\
E1123 17:21:16.213 199 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 3)
============
/x/runner.py FAILED
"""
BEGINNING = "W1123 17:21:10.200 199 torch/distributed/run.py:851] *****\n"


@pytest.mark.parametrize(
    ("output", "ending", "shown"),
    [
        ("", "", []),
        (BEGINNING, "", []),
        (BEGINNING + "Error: no data\n\n", ": Error: no data", ["Error: no data"]),
        ("=====\nstart\n[rank1]: gone\n", ": gone", ["=====", "start", "gone"]),
    ],
)
def test_an_exit_without_a_traceback_is_told_by_the_scripts_last_words(
    output: str, ending: str, shown: list[str]
) -> None:
    first, *rest = said_of(output + LAUNCHERS, 3)
    assert first == f"the script failed with exit status 3 under the arm 'ours'{ending}"
    assert [line for line in rest if line] == shown


def test_a_run_that_took_too_long_shows_what_it_said_last() -> None:
    said = said_of("noise\n" * 99 + OUTPUT, None)
    assert said[0].endswith("did not take its steps within 9 s (--timeout-s) under the arm 'ours'")
    assert len(said) == 41


def test_ranks_that_a_script_starts_itself_are_why_it_took_too_long() -> None:
    warning = "the script starts processes itself; if these are its ranks, no launcher can start it"
    said = said_of(f"deepytorch: {warning}\n" + "noise\n" * 99, None)
    assert said[0].endswith(f"(--timeout-s) under the arm 'ours': {warning}")


def test_what_the_comparison_refuses_is_one_line() -> None:
    refusal = "deepytorch_core.base.errors.CompareError: the script would overwrite /w.pt"
    output = OUTPUT.replace("KeyError: 'weights'", refusal)
    library = '[rank1]:   File "/v/lib/python3.11/site-packages/torch/x.py", line 4, in save'
    output = output.replace("[rank1]:     step()", f"[rank1]:     step()\n{library}")
    said = "the script would overwrite /w.pt (/home/me/train.py, line 3)"
    assert said_of(output) == [said]
