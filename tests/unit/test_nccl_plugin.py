"""The tuner plugin as NCCL loads it: by dlopen, through versions 3, 4 and 5 of its interface."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deepytorch_core.network import nccl_table
from deepytorch_core.network.nccl_table import ALGORITHMS, PROTOCOLS, Entry

ALL_REDUCE, ALL_GATHER = 4, 2
TREE, RING = ALGORITHMS.index("tree"), ALGORITHMS.index("ring")
LL, SIMPLE = PROTOCOLS.index("ll"), PROTOCOLS.index("simple")
ENTRIES = [
    Entry(
        collective="all_reduce",
        first_bytes=1 << 20,
        last_bytes=32 << 20,
        nodes=2,
        algorithm="tree",
        protocol="simple",
        channels=4,
    ),
    Entry(
        collective="all_reduce", first_bytes=0, last_bytes=1 << 40, algorithm="ring", protocol="ll"
    ),
    Entry(
        collective="all_gather",
        first_bytes=0,
        last_bytes=1 << 40,
        ranks=8,
        algorithm="pat",
        protocol="simple",
    ),
]

VOIDP, INT, SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
# As printf; a warning's two arguments are texts (here C's calls pass more as they pass others).
LOG = ctypes.CFUNCTYPE(
    None, INT, ctypes.c_ulong, ctypes.c_char_p, INT, ctypes.c_char_p, VOIDP, VOIDP
)
WARNING = 2
INIT = {
    3: ctypes.CFUNCTYPE(INT, SIZE, SIZE, VOIDP, VOIDP),
    4: ctypes.CFUNCTYPE(INT, SIZE, SIZE, VOIDP, VOIDP),
    5: ctypes.CFUNCTYPE(INT, VOIDP, ctypes.c_uint64, SIZE, SIZE, VOIDP, VOIDP, VOIDP),
}
_COMMON = (VOIDP, INT, SIZE, INT, VOIDP, INT, INT)
GET = {
    3: ctypes.CFUNCTYPE(INT, *_COMMON, VOIDP),
    4: ctypes.CFUNCTYPE(INT, *_COMMON, INT, VOIDP),
    5: ctypes.CFUNCTYPE(INT, *_COMMON, INT, VOIDP),
}
CLOSE = ctypes.CFUNCTYPE(INT, VOIDP)


class Tuner:
    """One communicator's view of the plugin, through the functions of one version."""

    def __init__(self, version: int, *, ranks: int, nodes: int) -> None:
        class Functions(ctypes.Structure):
            _fields_ = [
                ("name", ctypes.c_char_p),
                ("init", INIT[version]),
                ("get", GET[version]),
                ("close", CLOSE),
            ]

        library = ctypes.CDLL(str(nccl_table.plugin()))
        self.version = version
        self.functions = Functions.in_dll(library, f"ncclTunerPlugin_v{version}")
        assert self.functions.name == b"deepytorch"
        self.said: list[int] = []
        self.warnings: list[str] = []
        self._log = LOG(self._hear)
        log = ctypes.cast(self._log, VOIDP)
        self.context = VOIDP()
        place = ctypes.byref(self.context)
        if version < 5:
            assert self.functions.init(ranks, nodes, log, place) == 0
        else:
            assert self.functions.init(place, 77, ranks, nodes, log, None, None) == 0

    def _hear(self, level: int, *more) -> None:
        self.said.append(level)
        if level == WARNING:
            form, *texts = more[3:]
            self.warnings.append((form % tuple(ctypes.string_at(each) for each in texts)).decode())

    def costs(self, function: int, num_bytes: int, *, algorithms=7, off=()) -> tuple[list, int]:
        """The changed entries of a cost table that was 5.0 throughout (-1 at `off`), channels."""
        table = ((ctypes.c_float * 3) * algorithms)()
        for algorithm in range(algorithms):
            for protocol in range(3):
                table[algorithm][protocol] = -1.0 if (algorithm, protocol) in off else 5.0
        channels = INT(0)
        more = (0,) if self.version > 3 else ()
        assert (
            self.functions.get(
                self.context,
                function,
                num_bytes,
                1,
                ctypes.cast(table, VOIDP),
                algorithms,
                3,
                *more,
                ctypes.byref(channels),
            )
            == 0
        )
        changed = [
            (algorithm, protocol)
            for algorithm in range(algorithms)
            for protocol in range(3)
            if table[algorithm][protocol] == 0.0
        ]
        return changed, channels.value

    def close(self) -> None:
        assert self.functions.close(self.context) == 0


def check(version: int) -> None:
    """Run in a process of its own: the plugin reads its environment once."""
    two = Tuner(version, ranks=4, nodes=2)
    assert two.costs(ALL_REDUCE, 16 << 20) == ([(TREE, SIMPLE)], 4)
    assert two.costs(ALL_REDUCE, 32 << 20) == ([(TREE, SIMPLE)], 4), "the last size is inclusive"
    assert two.costs(ALL_REDUCE, (32 << 20) + 1) == ([(RING, LL)], 0)
    assert two.costs(ALL_REDUCE, 1024) == ([(RING, LL)], 0)
    assert two.costs(ALL_GATHER, 1024) == ([], 0), "the table is for 8 ranks"
    # A choice that NCCL rules out, or does not know, is not made.
    assert two.costs(ALL_REDUCE, 16 << 20, off={(TREE, SIMPLE)}) == ([], 0)
    eight = Tuner(version, ranks=8, nodes=1)
    assert eight.costs(ALL_REDUCE, 16 << 20) == ([(RING, LL)], 0), "the tree is for two nodes"
    assert eight.costs(ALL_GATHER, 1 << 20) == ([(ALGORITHMS.index("pat"), SIMPLE)], 0)
    assert eight.costs(ALL_GATHER, 1 << 20, algorithms=6) == ([], 0)
    assert two.said == eight.said == [3]
    two.close()
    eight.close()


def check_silent(level: int) -> None:
    """No usable table: NCCL's own choice throughout, said at `level` (0: not at all)."""
    tuner = Tuner(5, ranks=4, nodes=2)
    assert tuner.costs(ALL_REDUCE, 16 << 20) == ([], 0)
    assert tuner.said == ([level] if level else [])
    tuner.close()


def run(call: str, table: Path | None) -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    code += f"import test_nccl_plugin as t; t.{call}"
    # A clean environment, with the table named as a job would have it.
    environment = {"DEEPYTORCH_NCCL_TABLE": str(table)} if table else {}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("version", [3, 4, 5])
def test_the_table_decides(tmp_path, version):
    table = tmp_path / "table.json"
    nccl_table.write(table, ENTRIES)
    run(f"check({version})", table)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "[]",
        '{"version": 2, "choices": []}',
        '{"version": 1, "choices": [{"collective": "all_reduce"}]}',
        json.dumps(
            {
                "version": 1,
                "choices": [
                    {
                        **{"collective": "all_reduce", "first_bytes": 0, "last_bytes": 9},
                        **{"nodes": 0, "ranks": 0, "channels": 0, "protocol": "simple"},
                        "algorithm": "star",
                    }
                ],
            }
        ),
    ],
)
def test_a_table_that_cannot_be_read_leaves_nccl_alone_and_is_said(tmp_path, text):
    table = tmp_path / "table.json"
    if text is not None:
        table.write_text(text)
    run("check_silent(2)", table)  # a warning


def check_refused(reason: str) -> None:
    """As `check_silent`, and what is said has the `reason`."""
    tuner = Tuner(5, ranks=4, nodes=2)
    assert tuner.costs(ALL_REDUCE, 16 << 20) == ([], 0)
    assert tuner.said == [WARNING]
    (text,) = tuner.warnings
    assert text.startswith("deepytorch: NCCL chooses by itself, the table ")
    assert reason in text
    tuner.close()


def given_away(table: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(table, 12345, 12345)


def replaced_by_a_pipe(table: Path) -> None:
    table.unlink()
    os.mkfifo(table)


def replaced_by_a_folder(table: Path) -> None:
    table.unlink()
    table.mkdir()


def blown_up(table: Path) -> None:
    with table.open("a") as file:
        file.write(" " * (4 << 20))  # still JSON, and a table's


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda table: table.chmod(0o666), "can be written by others: make it yours alone"),
        (given_away, "belongs to another user (id 12345): make it yours alone"),
        (replaced_by_a_pipe, "is no regular file"),
        (replaced_by_a_folder, "is no regular file"),
        (blown_up, "at most 4194304 are read"),
    ],
)
def test_a_table_that_somebody_else_could_have_written_is_ignored_and_said(
    tmp_path: Path, spoil: Callable[[Path], None], reason: str
):
    table = tmp_path / "table.json"
    nccl_table.write(table, ENTRIES)
    spoil(table)
    run(f"check_refused({reason!r})", table)


def test_a_groups_table_is_believed_as_python_believes_it(tmp_path: Path):
    table = tmp_path / "table.json"
    nccl_table.write(table, ENTRIES)
    table.chmod(0o664)
    assert nccl_table.choose(table, set()).settings
    run("check(5)", table)


def test_without_a_table_nothing_is_said():
    run("check_silent(0)", None)


def test_it_can_be_unloaded_and_shows_nothing_but_its_functions():
    library = ctypes.CDLL(str(nccl_table.plugin()))
    maps = Path("/proc/self/maps")
    assert nccl_table.plugin().name in maps.read_text()
    close = ctypes.CDLL(None).dlclose
    close.argtypes = [VOIDP]
    assert close(library._handle) == 0
    assert nccl_table.plugin().name not in maps.read_text()
    with pytest.raises(AttributeError):
        ctypes.CDLL(str(nccl_table.plugin())).ncclTunerPlugin_v6  # noqa: B018


def test_tables_read_back(tmp_path):
    path = tmp_path / "new" / nccl_table.FILE
    nccl_table.write(path, ENTRIES)
    assert nccl_table.read(path) == ENTRIES
    assert list(path.parent.iterdir()) == [path]
    path.write_text('{"version": 1, "choices": [{}]}')
    with pytest.raises(ValueError, match="no table for NCCL"):
        nccl_table.read(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"collective": "all_to_all"}, "collective 'all_to_all': known are broadcast"),
        ({"algorithm": "star"}, "known are tree, ring"),
        ({"protocol": "udp"}, "known are ll, ll128, simple"),
        ({"first_bytes": 8, "last_bytes": 4}, "no sizes from 8 to 4"),
        ({"nodes": -1}, "0 or more"),
    ],
)
def test_bad_entries_are_refused(changes, message):
    fields = {"collective": "all_reduce", "first_bytes": 0, "last_bytes": 1}
    with pytest.raises(ValueError, match=message):
        Entry(**{**fields, "algorithm": "ring", "protocol": "ll", **changes})


def test_nccl_is_pointed_at_the_table_unless_the_user_chose(tmp_path):
    path = tmp_path / "table.json"
    assert nccl_table.choose(path, set()).settings == {}, "no table yet"
    nccl_table.write(path, ENTRIES)
    settings = nccl_table.choose(path, set()).settings
    assert settings["DEEPYTORCH_NCCL_TABLE"] == str(path)
    assert Path(settings["NCCL_TUNER_PLUGIN"]).exists()
    for variable in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_TUNER_PLUGIN"):
        assert nccl_table.choose(path, {variable}).settings == {}
