"""The flight record of this very process, read as another would; and bytes that are none."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from deepytorch_core import _core
from deepytorch_core.base import unlisted
from deepytorch_core.hang import answer, collect, evidence, processes, record, stacks
from deepytorch_core.hang.record import Record, RecordError

NOW_NS = 1 << 60


class NoStore:
    """A group of one rank asks nothing."""

    def set(self, key: str, value: bytes) -> None:
        raise AssertionError(key)

    def get(self, key: str, timeout_ms: int) -> bytes | None:
        raise AssertionError(key)


@pytest.fixture
def alone() -> Iterator[_core.Communicator]:
    made = _core.Communicator(NoStore(), 0, 1, name=f"alone-{time.monotonic_ns()}")
    yield made
    made.close()


def own() -> Record:
    return record.read(os.getpid())


def raw() -> bytearray:
    descriptor = _core.flight_record_fd()
    return bytearray(os.pread(descriptor, os.fstat(descriptor).st_size, 0))


def own_group(seen: Record) -> evidence.Group:
    (group,) = [group for group in seen.groups if group.name.startswith("alone-")]
    return group


def test_operations_are_recorded_in_order(alone: _core.Communicator) -> None:
    alone.all_reduce("float32", "max", bytearray(12), bytearray(12))
    alone.broadcast("int64", bytearray(80), 0)
    alone.barrier()
    seen = own()
    group = own_group(seen)
    assert (group.ranks, group.collectives, group.messages) == ((0,), 3, 0)
    mine = [operation for operation in seen.operations if operation.group == group.name]
    assert [(each.sequence, each.op) for each in mine] == [
        (1, "all_reduce"),
        (2, "broadcast"),
        (3, "barrier"),
    ]
    first = mine[0]
    assert (first.dtype, first.reduce_op, first.count, first.bytes) == ("float32", "max", 3, 12)
    for each in mine:
        assert each.state == evidence.ENDED
        assert each.ended_age_s is not None
        assert 0 <= each.ended_age_s <= each.age_s < 60
    assert seen.idle_s < 60
    assert seen.pid == os.getpid()
    assert seen.host == os.uname().nodename[:63]


def test_failed_operations_say_so(alone: _core.Communicator) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        alone.all_gather("float32", bytearray(8), [bytearray(12)])
    seen = own()
    assert not [each for each in seen.operations if each.group == own_group(seen).name]


def test_the_ring_keeps_the_newest(alone: _core.Communicator) -> None:
    begun = own().begun
    for _ in range(5000):
        alone.barrier()
    seen = own()
    assert seen.begun == begun + 5000
    assert own_group(seen).collectives == 5000
    numbers = [each.sequence for each in seen.operations]
    assert numbers == list(range(5000 - len(numbers) + 1, 5001))
    assert len(numbers) == 2048


def test_a_closed_group_is_not_shown(alone: _core.Communicator) -> None:
    other = _core.Communicator(NoStore(), 0, 1, name="short-lived")
    other.barrier()
    assert [group for group in own().groups if group.name == "short-lived"]
    other.close()
    seen = own()
    assert not [group for group in seen.groups if group.name == "short-lived"]
    assert not [each for each in seen.operations if each.group == "short-lived"]


def test_many_groups_one_after_the_other_leave_room(alone: _core.Communicator) -> None:
    for number in range(600):
        made = _core.Communicator(NoStore(), 0, 1, name=f"many-{number}")
        made.barrier()
        made.close()
    last = _core.Communicator(NoStore(), 0, 1, name="the last")
    last.barrier()
    assert [each.sequence for each in own().operations if each.group == "the last"] == [1]
    last.close()


def test_a_group_made_again_counts_anew(alone: _core.Communicator) -> None:
    kept = []
    for closes in (True, False, False, True):
        made = _core.Communicator(NoStore(), 0, 1, name="again")
        kept.append(made)  # as whatever holds on to a group of a job that is over
        made.barrier()
        made.barrier()
        seen = own()
        (group,) = [group for group in seen.groups if group.name == "again"]
        assert group.collectives == 2
        numbers = [each.sequence for each in seen.operations if each.group == "again"]
        assert numbers == [1, 2]
        if closes:
            made.close()


def test_names_and_descriptions(alone: _core.Communicator) -> None:
    name = own_group(own()).name
    _core.describe_group(name, "data parallel\x1b[31m" + "x" * 200)
    description = own_group(own()).description
    assert description.startswith("data parallel?[31m")
    assert len(description) == 95


def test_this_process_is_found(alone: _core.Communicator) -> None:
    assert os.getpid() in record.find()
    (job,) = collect.jobs([os.getpid()])
    assert os.getpid() in [process.pid for process in job.records]


def test_what_a_rank_has_started_is_of_its_job(alone: _core.Communicator) -> None:
    worker = "import sys, subprocess; subprocess.run([sys.executable, '-c', 'import time; "
    worker += "print(1, flush=True); time.sleep(60)'])"
    with subprocess.Popen([sys.executable, "-c", worker], stdout=subprocess.PIPE) as started:
        try:
            assert started.stdout is not None
            started.stdout.readline()
            (below,) = [
                int(pid)
                for pid in os.listdir("/proc")
                if pid.isdecimal() and processes.ancestors(int(pid))[:1] == [started.pid]
            ]
            own = [job.name for job in collect.jobs([os.getpid()])]
            for pid in (started.pid, below):
                assert [job.name for job in collect.jobs([pid])] == own
            # The process that has started the rank finds its job, too.
            assert set(own) <= {job.name for job in collect.jobs([os.getppid()])}
        finally:
            started.kill()
            os.kill(below, signal.SIGKILL)


def test_a_process_of_no_job_names_the_way_out() -> None:
    with pytest.raises(RecordError, match="there is no process 4194304, and .*leave --pid out"):
        collect.jobs([1 << 22])


def test_a_process_without_one_is_told() -> None:
    with pytest.raises(RecordError, match="no flight record"):
        record.read(os.getppid())
    with pytest.raises(RecordError, match="there is no process 4194304"):
        record.read(1 << 22)


HEADER_FIELDS = {"version": 8, "header": 12, "group": 16, "peer": 20, "place": 24, "entry": 28}
COUNT_FIELDS = {"groups": 32, "peers": 36, "places": 40, "entries": 44}
# Tables fill whole pages; they lie in this order, and the ring comes last.
GROUPS, GROUP_BYTES, PEERS, PEER_BYTES, PLACES, PLACE_BYTES = 256, 720, 256, 16, 256, 256
PLACES_AT = 4096 + GROUPS * GROUP_BYTES + PEERS * PEER_BYTES
ENTRIES_AT, ENTRY_BYTES, PLACE_IN_ENTRY = PLACES_AT + PLACES * PLACE_BYTES, 128, 66


@pytest.mark.parametrize("name", [*HEADER_FIELDS, *COUNT_FIELDS])
def test_lengths_are_checked_before_use(alone: _core.Communicator, name: str) -> None:
    at = (HEADER_FIELDS | COUNT_FIELDS)[name]
    for value in (0, 1, 4097, 1 << 16, (1 << 32) - 1):
        data = raw()
        struct.pack_into("<I", data, at, value)
        if name in COUNT_FIELDS and value < 2:
            record.parse(bytes(data), now_ns=NOW_NS)  # fewer is no harm
            continue
        if bytes(data) == bytes(raw()):
            continue  # what it was
        with pytest.raises(RecordError):
            record.parse(bytes(data), now_ns=NOW_NS)


def test_a_newer_version_names_the_way_out(alone: _core.Communicator) -> None:
    data = raw()
    struct.pack_into("<I", data, 8, 7)
    with pytest.raises(RecordError, match="version 7.*reads version 3"):
        record.parse(bytes(data), now_ns=NOW_NS)


def test_an_older_version_names_the_way_out(alone: _core.Communicator) -> None:
    data = raw()
    struct.pack_into("<I", data, 8, 1)  # without places
    with pytest.raises(RecordError, match="version 1; .* use the deepytorch that the job runs"):
        record.parse(bytes(data), now_ns=NOW_NS)


def put_place(data: bytearray, index: int, state: int, line: int, *names: str) -> None:
    """`names`: the function, the file."""
    texts = [name.encode() for name in names]
    struct.pack_into("<Ii56s192s", data, PLACES_AT + index * PLACE_BYTES, state, line, *texts)


def called_from(data: bytearray, index: int) -> evidence.Place | None:
    """Return what the reader says of the newest operation, if its entry names this place."""
    begun = own().begun
    at = ENTRIES_AT + (begun - 1) % 2048 * ENTRY_BYTES
    struct.pack_into("<H", data, at + PLACE_IN_ENTRY, index)
    seen = record.parse(bytes(data), now_ns=time.clock_gettime_ns(time.CLOCK_MONOTONIC))
    return seen.operations[-1].at


def test_the_line_that_called(alone: _core.Communicator) -> None:
    alone.barrier()
    assert own().operations[-1].at is None  # without torch nobody looks for it
    data = raw()
    assert len(data) == ENTRIES_AT + 2048 * ENTRY_BYTES
    put_place(data, 6, 2, 57, "step\x1b[31m", "/home/me/train.py")
    found = called_from(data, 7)
    assert found == evidence.Place("/home/me/train.py", 57, "step?[31m")
    put_place(data, 255, 2, 3, "f" * 56, "d" * 192)  # without an end
    found = called_from(data, 256)
    assert found == evidence.Place("d" * 192, 3, "f" * 56)


def test_lines_that_are_none_are_not_believed(alone: _core.Communicator) -> None:
    alone.barrier()
    data = raw()
    put_place(data, 6, 1, 57, "step", "/home/me/train.py")  # still being written
    put_place(data, 7, 3, 57, "step", "/home/me/train.py")
    put_place(data, 8, 2, -1, "step", "/home/me/train.py")
    for index in (0, 7, 8, 9, 257, 65535):
        assert called_from(data, index) is None, index


def test_the_line_travels(alone: _core.Communicator) -> None:
    alone.barrier()
    data = raw()
    put_place(data, 6, 2, 57, "step", "/home/me/train.py")
    struct.pack_into("<H", data, ENTRIES_AT + (own().begun - 1) % 2048 * 128 + PLACE_IN_ENTRY, 7)
    seen = record.parse(bytes(data), now_ns=time.clock_gettime_ns(time.CLOCK_MONOTONIC))
    rank = evidence.Rank(0, groups=seen.groups, operations=seen.operations)
    text = evidence.to_json(rank)
    assert evidence.from_json(text) == rank
    for wrong in ('"line":"57"', '"row":57', '"line":57,"more":1'):
        with pytest.raises(ValueError, match="no evidence of a rank"):
            evidence.from_json(text.replace('"line":57', wrong))
    at = '"at":{"file":"/home/me/train.py","line":57,"function":"step"}'
    assert at in text
    for wrong in ('"at":[]', '"at":"train.py:57"', '"at":{}'):
        with pytest.raises(ValueError, match="no evidence of a rank"):
            evidence.from_json(text.replace(at, wrong))


def test_cut_records(alone: _core.Communicator) -> None:
    data = bytes(raw())
    for length in (0, 7, 8, 200, 4096, 100_000, len(data) - 4096):
        with pytest.raises(RecordError):
            record.parse(data[:length], now_ns=NOW_NS)


def test_any_content_is_a_record_or_an_error(alone: _core.Communicator) -> None:
    """Let another process write anything: the reader neither fails otherwise nor believes it."""
    alone.barrier()
    good = raw()
    chance = random.Random(11)
    for _ in range(60):
        data = bytearray(good)
        for _ in range(chance.choice((1, 10, 1000))):
            start = chance.choice((40, 4096, 4096 + 256 * 720, PLACES_AT, ENTRIES_AT))
            at = min(start + chance.randrange(8000), len(data) - 8)
            data[at : at + 8] = chance.randbytes(8)
        try:
            seen = record.parse(bytes(data), now_ns=NOW_NS)
        except RecordError:
            with pytest.raises(RecordError):
                record.parse_calls(bytes(data))
            continue
        check_plain(seen)
        brief = record.parse_calls(bytes(data))
        assert (brief.rank, brief.job, brief.peers) == (seen.rank, seen.job, seen.peers)
        assert brief.groups == {group.name for group in seen.groups}
        assert {
            (each.group, each.sequence, each.op)
            for each in seen.operations
            if not each.is_message and (each.on_device or each.how == "delegated")
        } <= brief.begun_ns.keys()


def check_plain(seen: Record) -> None:
    names = {group.name for group in seen.groups}
    for group in seen.groups:
        assert group.name.isprintable()
        assert 0 <= len(group.ranks) <= 1 << 20
    for operation in seen.operations:
        assert operation.group in names
        assert operation.state in evidence.STATES
        assert operation.age_s >= 0
        if operation.at is not None:
            assert operation.at.line >= 0
            assert (operation.at.file + operation.at.function).isprintable()


def test_random_bytes_are_no_record() -> None:
    chance = random.Random(5)
    for length in (0, 8, 240, 5000, 500_000):
        with pytest.raises(RecordError):
            record.parse(chance.randbytes(length), now_ns=NOW_NS)
        with pytest.raises(RecordError):
            record.parse_calls(chance.randbytes(length))


DUMP = """Thread 0x00007f21beffd6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f3392a3eb80 [MainThread] (most recent call first):
  File "/usr/lib/python3/dist-packages/torch/utils/data/dataloader.py", line 630 in __next__
  File "<string>", line 3 in helper
  File "{script}", line 2 in next_batch
  File "{script}", line 5 in <module>
"""


def test_the_frame_that_is_named_is_the_users_own(tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text("def next_batch():\n    return next(loader)\n\n\nnext_batch()\n")
    frames = stacks.main_thread(DUMP.replace("{script}", str(script)))
    assert [frame.mine for frame in frames] == [False, False, True, True]
    named = stacks.where(frames)
    assert named is not None
    assert (named.line, named.function, named.code) == (2, "next_batch", "return next(loader)")


def test_answers_that_are_no_stacks() -> None:
    for text in ("", "garbage", "Thread 0x12\n  File", '  File "x", line 1 in y\n'):
        assert stacks.main_thread(text) == ()
    assert stacks.where(()) is None


def test_own_stacks() -> None:
    signal_number = answer.register()
    assert signal_number > 0
    assert answer.register() == signal_number
    text = stacks.ask(os.getpid(), signal_number, limit_s=20)
    assert "test_own_stacks" in text
    assert "[MainThread]" in text  # as the thread writes it, not the signal's handler
    # The next answer begins anew.
    again = stacks.ask(os.getpid(), signal_number, limit_s=20)
    assert again.count("Current thread") == 1


@pytest.mark.parametrize(("faults", "answers"), [(0, True), (3, True), (10**6, False)])
def test_a_page_fault_is_no_wait_for_a_device(
    faults: int, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = itertools.chain(
        itertools.repeat((evidence.IN_KERNEL, "handle_mm_fault"), faults),
        itertools.repeat((evidence.RUNNING, "")),
    )
    monkeypatch.setattr(processes, "state", lambda pid: next(states))
    text = stacks.ask(os.getpid(), answer.register(), limit_s=20)
    assert ("test_a_page_fault" in text) is answers


def test_asking_harms_no_process_that_runs_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that walked the frames while they change would crash it after some ten times."""
    # Three threads hand the GIL on more often than a busy machine lets them run.
    monkeypatch.setattr(stacks, "_MOST_NAPS", 1500)
    child, reading = forked(busy)
    try:
        number = int(os.read(reading, 100))
        # It says the number before it starts its threads.
        deadline = time.monotonic() + 60
        while "(recurse)" not in stacks.ask(child, number, limit_s=20):
            assert time.monotonic() < deadline
        for _ in range(100):
            assert "(recurse)" in stacks.ask(child, number, limit_s=20)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("ran", "runnable", "naps"), [([0], True, False), ([0], False, True), (range(999), True, True)]
)
def test_who_has_no_processor_is_not_taken_for_one_that_keeps_the_gil(
    ran: Sequence[int], runnable: bool, naps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.cycle(ran)
    monkeypatch.setattr(processes, "ran", lambda pid: next(clock))
    monkeypatch.setattr(processes, "is_runnable", lambda pid: runnable)
    monkeypatch.setattr(processes, "sleeps", lambda task: True)
    monkeypatch.setattr(stacks, "_MOST_NAPS", 3)
    with tempfile.TemporaryFile() as unanswered:
        deadline = time.monotonic() + (60 if naps else 0.5)
        assert not stacks._await_thread(unanswered.fileno(), 1, 1, deadline)
        assert (time.monotonic() < deadline) == naps


def test_what_the_system_says_of_threads_that_run() -> None:
    before = processes.ran(os.getpid())
    while processes.ran(os.getpid()) == before:
        assert processes.is_runnable(os.getpid())
    assert processes.ran(1 << 22) == 0
    assert not processes.is_runnable(1 << 22)


def busy() -> None:
    sys.setswitchinterval(1e-4)
    for _ in range(2):
        threading.Thread(target=recurse, daemon=True).start()
    recurse()


def recurse() -> None:
    while True:
        deeper(300)


def deeper(count: int) -> int:
    return deeper(count - 1) + 1 if count else 0


def test_a_process_whose_gil_is_held_answers_by_the_signal() -> None:
    child, reading = forked(hold_the_gil)
    try:
        number = int(os.read(reading, 100))
        text, deadline = "", time.monotonic() + 60
        # With the main thread's name it has not begun to hold it.
        while "in hold_the_gil" not in text or "[MainThread]" in text:
            assert time.monotonic() < deadline, text
            text = stacks.ask(child, number, limit_s=20)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def hold_the_gil() -> None:
    while True:  # a signal ends it early
        ctypes.PyDLL(None).usleep(60_000_000)


def forked(function: Callable[[], None]) -> tuple[int, int]:
    """A child in `function` that can be asked, and where it says by which signal."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        number = answer.register()
        time.sleep(1)  # for the thread to get to where it waits
        os.write(writing, str(number).encode())
        try:
            function()
        finally:
            os._exit(0)
    os.close(writing)
    return child, reading


def test_a_forked_child_does_not_answer_for_its_parent() -> None:
    signal_number = answer.register()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        held = record.open_memfd(os.getpid(), record.STACKS_NAME, os.O_RDWR) is not None
        caught = processes.catches(os.getpid(), signal_number)
        os.write(writing, f"{held} {caught}".encode())
        os._exit(0)
    assert os.read(reading, 100) == b"False False"
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
    assert stacks.ask(os.getpid(), signal_number, limit_s=20)


def test_it_stops_answering_and_begins_again() -> None:
    signal_number = answer.register()
    answer.unregister()
    answer.unregister()
    for _ in range(1200):  # the thread ends when it sees that its pipe is closed
        if "deepytorch-stacks" not in unlisted.names().values():
            break
        time.sleep(0.05)
    else:
        pytest.fail("the thread goes on")
    assert not stacks.ask(os.getpid(), signal_number, limit_s=2)
    assert record.open_memfd(os.getpid(), record.STACKS_NAME, os.O_RDONLY) is None
    again = answer.register()
    assert "test_it_stops_answering" in stacks.ask(os.getpid(), again, limit_s=20)


def test_a_process_that_would_die_of_the_signal_is_not_sent_it() -> None:
    unhandled = processes.free_signal(range(60, 36, -1))
    assert unhandled > 0
    assert stacks.ask(os.getpid(), unhandled, limit_s=2) == ""
    assert stacks.ask(1 << 22, unhandled, limit_s=2) == ""


def test_the_state_of_processes() -> None:
    assert processes.state(os.getpid())[0] == evidence.RUNNING
    assert processes.state(1 << 22)[0] == evidence.GONE
    assert processes.start_time(os.getpid()) > 0
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert processes.state(child)[0] == evidence.GONE  # a zombie
    os.waitpid(child, 0)
