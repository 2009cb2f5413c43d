"""The command line without starting processes: help, errors, what is passed on."""

import contextlib
import dataclasses
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import deepytorch
from deepytorch import cli
from deepytorch.cli import launcher, train
from deepytorch.recipes import DESCRIPTIONS, RECIPES
from deepytorch.recipes.base.config import load_config
from deepytorch.recipes.data.settings import OPTIONS
from deepytorch_core.base import config
from deepytorch_core.bench import launch

COMMANDS = [
    "doctor",
    "test",
    "build",
    "run",
    "config",
    "train",
    "tune",
    "topology",
    "explain",
    "report",
    "bench",
]


def invoke(*arguments):
    return CliRunner().invoke(cli.app, list(arguments))


def main(monkeypatch, *arguments):
    """The real entry point; returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["deepytorch", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return exit_.value.code


def test_help_lists_the_commands():
    result = invoke("--help")
    assert result.exit_code == 0
    for command in COMMANDS:
        assert command in result.output


@pytest.mark.parametrize("command", [*COMMANDS, "bench collectives", "bench groups"])
def test_every_command_has_help(command):
    result = invoke(*command.split(), "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_help_imports_nothing_heavy():
    # In this process torch is loaded long since, so look at what the command's files bring in.
    import ast
    from pathlib import Path

    for path in Path(cli.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        names = {
            name.split(".")[0]
            for node in tree.body
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert names <= {"deepytorch", "rich", "typer"} | sys.stdlib_module_names, path.name


def test_an_error_is_one_message_without_traceback(monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("the second rank fell ill")

    monkeypatch.setattr(launch, "run", fail)
    assert main(monkeypatch, "bench", "collectives") == 1
    shown = capsys.readouterr()
    assert "error: the second rank fell ill" in shown.err
    assert "Traceback" not in shown.err
    assert "DEEPYTORCH_DEBUG=1" in shown.err


def test_a_wrong_value_is_wrong_use(monkeypatch, capsys):
    assert main(monkeypatch, "bench", "collectives", "--ops", "all_reduse") == 2
    shown = capsys.readouterr()
    assert "unknown operation 'all_reduse'; known: all_reduce" in shown.err
    assert "DEEPYTORCH_DEBUG" not in shown.err


def test_a_missing_file_is_named(monkeypatch, capsys, tmp_path):
    assert main(monkeypatch, "report", str(tmp_path / "none.json")) == 1
    assert f"{tmp_path}/none.json: No such file" in capsys.readouterr().err.replace("\n", "")


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["deepytorch", "bench", "collectives", "--sizes", "x"])
    config.set_current(config.Options.from_mapping({"debug": True}))
    try:
        with pytest.raises(ValueError, match="no size"):
            cli.main()
    finally:
        config.set_current(None)


def test_an_unknown_command_is_a_usage_error(monkeypatch, capsys):
    assert main(monkeypatch, "banch") == 2
    assert "banch" in capsys.readouterr().err


# run


def parse(*arguments, default_processes="1"):
    return launcher.parse(arguments, command="test", default_processes=default_processes)


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Record what `run` and `train` would start, instead of starting it."""
    seen = []
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "launch", lambda options: seen.append(options) or 7)
    monkeypatch.setattr(launcher, "num_gpus", lambda: 0)
    return seen


@pytest.mark.parametrize(("given", "expected"), [(None, "600"), ("90", "90")])
def test_train_gives_processes_time_to_save(launched, monkeypatch, given, expected):
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    monkeypatch.setenv(name, given or "")
    if given is None:
        monkeypatch.delenv(name)
    invoke("train", "llama_sft")
    assert os.environ[name] == expected  # noqa: TID251


def test_run_puts_activation_before_the_script(launched):
    result = invoke("run", "--nproc-per-node", "3", "train.py", "--nnodes", "x", "-m", "y")
    assert result.exit_code == 7
    (options,) = launched
    assert options.nproc_per_node == "3"
    assert options.nnodes == "1:1"
    assert options.training_script.endswith("runner.py")
    assert options.training_script_args == ["train.py", "--nnodes", "x", "-m", "y"]
    assert not options.module


def test_run_of_a_module(launched):
    invoke("run", "-m", "package.train", "--lr", "1")
    assert launched[0].training_script_args == ["-m", "package.train", "--lr", "1"]


@pytest.mark.parametrize("own_first", [True, False])
def test_run_passes_torchrun_options_on(launched, own_first):
    own = ["--nproc-per-node", "2"]
    theirs = ["--rdzv-backend", "c10d", "--max_restarts", "3", "-r", "1", "--standalone"]
    invoke("run", *(own + theirs if own_first else theirs + own), "train.py")
    (options,) = launched
    assert options.rdzv_backend == "c10d"
    assert options.max_restarts == 3
    assert options.redirects == "1"
    assert options.nproc_per_node == "2"
    assert options.training_script_args == ["train.py"]


def test_run_takes_every_gpu_by_default(launched, monkeypatch):
    invoke("run", "train.py")
    monkeypatch.setattr(launcher, "num_gpus", lambda: 4)
    invoke("run", "train.py")
    assert [options.nproc_per_node for options in launched] == ["1", "4"]
    assert [options.is_alone for options in launched] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "is_alone"),
    [
        (["s.py", "--nproc-per-node", "2"], True),
        (["-m", "package.train"], True),
        (["--nproc-per-node=1", "s.py"], False),
        (["--standalone", "s.py"], False),
        (["--max-restarts", "3", "s.py"], False),
        (["--nnodes", "2", "--rdzv-endpoint", "host:1", "s.py"], False),
    ],
)
def test_who_asks_for_a_job_gets_one(arguments, is_alone):
    assert parse(*arguments).is_alone is is_alone


def test_an_option_in_the_environment_asks_for_a_job(monkeypatch):
    monkeypatch.setenv("PET_NPROC_PER_NODE", "1")
    assert not parse("s.py").is_alone
    assert parse("s.py", default_processes="2").nproc_per_node == "1"
    monkeypatch.setenv("PET_NNODES", "2")
    assert not parse("s.py").is_alone


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("--nproc-per-ndoe", "did you mean --nproc-per-node?"),
        ("--comapre", "did you mean --compare?"),
        ("--nproc_per_nodes", "did you mean --nproc-per-node?"),
        ("--wholly-else", "torchrun --help lists its options"),
    ],
)
def test_a_mistyped_option_is_suggested(launched, name, hint):
    result = invoke("run", name, "2", "train.py")
    assert isinstance(result.exception, ValueError)
    assert str(result.exception).startswith(f"there is no option {name}: ")
    assert hint in str(result.exception)


def test_run_without_a_script_says_so(launched):
    result = invoke("run", "--nproc-per-node", "2")
    assert result.exit_code == 2
    assert "which script" in result.output
    assert not launched


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py", "--lr", "1"], "there is no script missing.py"),
        (["."], ". is a folder without __main__.py: name a script"),
        (["--nproc-per-node", "0", "train.py"], "--nproc-per-node 0: expected 1 or more"),
        (["--compare", "--html", ".", "train.py"], "is a folder: name a file"),
        (["--compare", "--json", "/proc/none/found.json", "train.py"], "can't be written"),
    ],
)
def test_run_starts_nothing_that_must_fail(launched, monkeypatch, capsys, arguments, message):
    assert main(monkeypatch, "run", *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not launched


def test_tune_starts_nothing_without_a_script(launched, monkeypatch, capsys):
    assert main(monkeypatch, "tune", "--nproc-per-node", "2", "missing.py") == 2
    assert "there is no script missing.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["report"], marks=pytest.mark.extended),
        pytest.param(["run", __file__], marks=pytest.mark.extended),
        ["tune", "--nproc-per-node", "2", __file__],
        pytest.param(["bench", "ddp"], marks=pytest.mark.extended),
    ],
)
def test_a_wrong_variable_is_one_line(command):
    name = [sys.executable, "-m", "deepytorch.cli"]
    environment = {**os.environ, "DEEPYTORCH_TUNE": "perhaps"}  # noqa: TID251
    result = subprocess.run([*name, *command], env=environment, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("error: DEEPYTORCH_TUNE='perhaps': expected one of auto, off")
    assert len(result.stderr.splitlines()) == 1


def test_an_interrupt_that_was_lost_counts(monkeypatch, capsys):
    from torch.distributed import run as torchrun

    from deepytorch.cli import console

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(console, "_interrupted", False)
    monkeypatch.setattr(torchrun, "run", lambda options: pytest.fail("it was started"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        console.prepare()
        with contextlib.suppress(KeyboardInterrupt):  # as the import of torch may do
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(KeyboardInterrupt):
        launcher.launch(parse("--nproc-per-node", "1", "train.py"))
    # Any other exception may come of it, too.
    monkeypatch.setattr(launch, "run", lambda job: [][0])
    assert main(monkeypatch, "bench", "collectives") == 130
    assert not capsys.readouterr().err


def test_a_full_disk_is_named(monkeypatch, capsys):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(launch, "run", fail)
    assert main(monkeypatch, "bench", "collectives") == 1
    said = "error: the output can't be written: No space left on device; make room, or write"
    assert said in " ".join(capsys.readouterr().err.split())


def test_what_a_program_has_said_itself_is_not_told_again(monkeypatch, capsys):
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    for status in (1, 2):
        failure = ProcessFailure(local_rank=0, pid=7, exitcode=status, error_file="none")

        def fail(options, failure=failure):
            raise ChildFailedError("train.py", {0: failure})

        monkeypatch.setattr(torchrun, "run", fail)
        assert launcher.launch(parse("--nproc-per-node", "1", "train.py")) == status
        assert ("train.py FAILED" in capsys.readouterr().err) == (status == 1)


def test_a_closed_or_poor_output_is_no_error(monkeypatch):
    from deepytorch.cli import console

    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr(sys, "stderr", None)
    console.prepare()
    console.out().print("a · b")
    console.err().print("to nobody")
    sys.stdout.flush()
    assert raw.getvalue() == b"a ? b\n"


def test_run_refuses_what_it_cannot_activate(launched):
    result = invoke("run", "--no-python", "binary")
    assert isinstance(result.exception, ValueError)
    assert "--no-python" in str(result.exception)


def test_one_machine_never_takes_a_fixed_port():
    assert parse("s.py").standalone
    assert not parse("--nnodes", "2", "s.py").standalone
    assert not parse("--rdzv-backend", "c10d", "s.py").standalone
    assert not parse("--master-port", "29511", "s.py").standalone


def test_the_environment_may_set_the_processes(monkeypatch):
    monkeypatch.setenv("PET_NPROC_PER_NODE", "5")
    assert parse("s.py", default_processes="2").nproc_per_node == "5"


# train


@pytest.fixture
def recipes(monkeypatch):
    monkeypatch.setattr(train, "recipes", lambda: ["bert_mlm", "llama_sft"])


def test_train_starts_the_recipe(launched, recipes, tmp_path):
    config_file = tmp_path / "own.yaml"
    config_file.write_text("steps: 1\n")
    result = invoke(
        "train", "llama_sft", "--compare", "steps=3", "--config", str(config_file), "seed=4"
    )
    assert result.exit_code == 7
    (options,) = launched
    assert options.module
    assert options.training_script == "deepytorch.recipes.llama_sft"
    expected = ["--config", str(config_file), "--compare", "steps=3", "seed=4"]
    assert options.training_script_args == expected
    assert options.nproc_per_node == "2"


def test_train_with_processes(launched, recipes):
    invoke("train", "llama_sft", "--nproc-per-node", "4")
    assert launched[0].nproc_per_node == "4"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lama_sft"], "did you mean llama_sft?.*bert_mlm, llama_sft"),
        (["zzz"], "no recipe 'zzz'; there are: bert_mlm, llama_sft"),
        (["llama_sft", "steps"], "'steps' is no setting"),
        (["llama_sft", "=3"], "'=3' is no setting"),
        (["llama_sft", "--config", "/no/such.yaml"], "/no/such.yaml"),
        (["llama_sft", "lr=1"], "unknown key 'lr'.*Did you mean learning_rate?"),
        (["llama_sft", "data=/no/such.jsonl"], "data=/no/such.jsonl: no such file"),
        (["llama_sft", "model=/no/such"], "model=/no/such: no such file"),
        (["llama_sft", "resume=/no/such"], "resume=auto takes the newest run called llama_sft"),
        (["llama_sft", "--compare", "engine=fsdp2"], "--compare trains both arms"),
        (["llama_sft", "device=cuda"], "shows no GPU: set device=cpu"),
    ],
)
def test_train_says_what_is_wrong(launched, recipes, arguments, message):
    result = invoke("train", *arguments)
    assert result.exit_code == 1
    with pytest.raises(ValueError, match=message):
        raise result.exception
    assert not launched


def test_installed_recipes_are_found_without_importing_them(tmp_path, monkeypatch):
    package = tmp_path / "some_recipes"
    package.mkdir()
    for name in ("__init__", "good", "_data"):
        (package / f"{name}.py").write_text("" if name == "__init__" else "raise RuntimeError\n")
    (package / "below").mkdir()
    (package / "below/__init__.py").write_text("raise RuntimeError\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(train, "_PACKAGE", "some_recipes")
    assert train.recipes() == ["good"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_help_of_a_recipe_has_each_key_with_its_default(recipe):
    shown = " ".join(invoke("train", recipe, "--help").output.split())
    for field in dataclasses.fields(OPTIONS[recipe]):
        default = "null" if field.default is None else str(field.default)
        default = default.lower() if isinstance(field.default, bool) else default
        assert re.search(rf" {field.name} .*?\[{re.escape(default)}\]", shown), field.name


def test_help_of_train_lists_the_recipes():
    shown = " ".join(invoke("train", "--help").output.split())
    for recipe, description in DESCRIPTIONS.items():
        assert f"{recipe} {description}" in shown


# config


def test_config_asks_and_train_takes_the_answers(launched, monkeypatch, tmp_path):
    file = tmp_path / "own.yaml"
    typed = "cpu\n0\n3\nfsdp\nfsdp2\nbf16\n"
    asked = CliRunner().invoke(cli.app, ["config", str(file)], input=typed)
    assert asked.exit_code == 0, asked.output
    assert "'fsdp' is none of ddp, fsdp2" in asked.output
    options = load_config(OPTIONS["llama_sft"], file)
    assert (options.device, options.processes) == ("cpu", 3)
    assert (options.engine, options.precision) == ("fsdp2", "bf16")
    invoke("train", "llama_sft", "--config", str(file))
    assert launched[0].nproc_per_node == "3"


def test_config_takes_what_the_machine_suggests(tmp_path):
    file = tmp_path / "own.yaml"
    assert invoke("config", "--default", str(file)).exit_code == 0
    assert load_config(OPTIONS["bert_mlm"], file).engine == "ddp"


# bench, of which test_cli_bench.py has more


def test_graphs_need_gpus(monkeypatch, capsys):
    assert main(monkeypatch, "bench", "collectives", "--cuda-graph") == 2
    error = capsys.readouterr().err
    assert "--cuda-graph captures work of GPUs: give --device cuda too" in " ".join(error.split())


# report


def test_report_shows_a_saved_report(tmp_path):
    path = tmp_path / "report.json"
    saved = json.loads(json.dumps(deepytorch.report().to_dict()))
    row = {"group": "0", "op": "all_reduce", "algorithm": "one_shot", "reason": "small"}
    saved["rows"] = [{**row, "calls": 3, "bytes": 6_000_000, "time_us": 4500.0}]
    saved["decisions"] = [{"what": "bucket", "chosen": "4 MiB", "reason": "why", "times_ms": {}}]
    saved["memory"] = {"host_peak_bytes": 3 << 20}
    saved["options"]["tune"] = "off"
    saved["from a later version"] = 1
    path.write_text(json.dumps({**saved, "rank": 5, "host": "node1"}))
    result = invoke("report", str(path))
    assert result.exit_code == 0, result.output
    for words in (
        "rank 5 on node1",
        "all_reduce  one_shot   3      6.000  1.500    small",
        "decision: bucket: 4 MiB, why",
    ):
        assert words in result.output
    assert re.search(r"host +3 MiB", result.output)
    assert re.search(r"tune +off", result.output)
    assert "timeout_s" not in result.output


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"other": 1}', '{"native_calls": 1}', '{"native_calls": 1, "rows": [{}]}', "\xff"],
)
def test_report_refuses_another_file(tmp_path, text):
    path = tmp_path / "report.json"
    path.write_text(text, encoding="latin-1")
    result = invoke("report", str(path))
    assert f"{path} holds no report" in str(result.exception)


@pytest.mark.parametrize("text", ["\xff", '{"other": 1}', '{"native_calls": {}}'])
def test_report_makes_no_page_of_another_file(tmp_path, text):
    path = tmp_path / "report.json"
    path.write_text(text, encoding="latin-1")
    result = invoke("report", str(path), "--html", str(tmp_path / "page.html"))
    assert isinstance(result.exception, ValueError)
    assert str(result.exception).startswith(f"{path}")
    assert "holds" in str(result.exception)


def test_report_shows_environment_adapter_and_options():
    result = invoke("report")
    assert result.exit_code == 0, result.output
    for word in ("torch", "native core", "torch adapter", "error_handling", "timeout_s"):
        assert word in result.output


# topology


def test_topology_lists_rdma_adapters_and_what_nccl_is_told(tmp_path):
    machine = json.loads((Path(__file__).parent / "data" / "machine_8_gpus.json").read_text())
    machine["rdma"][1]["ports"][0] |= {"state": "ACTIVE", "rate_mbps": 25000}
    machine["gpudirect"] = ""
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine))
    result = invoke("topology", "--plain", "--from", str(path))
    assert result.exit_code == 0, result.output
    assert "mlx5_1:1  mlx5_core  active  InfiniBand  25 Gbit/s" in result.stdout
    assert "for NCCL   NCCL_IB_HCA==mlx5_0:1 (without mlx5_1)" in result.stdout
    assert "remark: no kernel module gives RDMA adapters access to GPU memory" in result.stderr


def test_topology_printed_and_drawn_again_is_the_same(tmp_path):
    path = tmp_path / "machine.json"
    first = invoke("topology", "--json")
    assert first.exit_code == 0, first.output
    path.write_text(first.stdout)
    again = invoke("topology", "--from", str(path), "--json")
    assert again.exit_code == 0, again.output
    assert again.stdout == first.stdout


@pytest.mark.parametrize("missing", [["deepspeed"], ["hjson", "cpuinfo"], ["ninja", "einops"]])
def test_build_needs_nothing_of_a_framework(monkeypatch, missing):
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    done = invoke("build")
    assert done.exit_code == 0, done.output
    assert "adapter ready: " in done.output


def test_train_says_what_it_waits_for_first(launched, recipes):
    result = invoke("train", "llama_sft", "--nproc-per-node", "2")
    assert len(launched) == 1
    assert "llama_sft starts in 2 processes: loading the libraries takes about" in result.output
