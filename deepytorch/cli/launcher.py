"""torchrun in this process, with its own options, and with the exit status of what failed."""

import contextlib
import difflib
import os
import socket
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer

from deepytorch.cli import console, help

_WRONG_USE = 2
_RUNNER = Path(__file__).with_name("runner.py")
_NO_ADDRESS = "127.0.0.1"  # --master-addr where neither an option nor the environment gives one


class LauncherCommand(help.Command):
    """A command whose options are mixed with torchrun's, in any order before the script.

    To click a value that follows an option of torchrun would be the script.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = [parameter for parameter in self.params if parameter.param_type_name == "option"]
        flags = {
            name for option in options if getattr(option, "is_flag", False) for name in option.opts
        }
        own = {name for option in options for name in option.opts}
        return super().parse_args(ctx, joined(args, flags | {"--help"}, own - flags))


def joined(arguments: Sequence[str], flags: set[str], with_value: set[str]) -> list[str]:
    """The same, with each option of torchrun's and its value as one word.

    `flags` and `with_value` are the names that are not torchrun's.
    """
    words = list(arguments)
    done: list[str] = []
    while words and words[0].startswith("-") and words[0] != "--":
        word = words.pop(0)
        if "=" in word or word in flags:
            done.append(word)
        elif word in with_value:
            done += [word, *words[:1]]
            del words[:1]
        else:
            name = _with_value().get(word)
            done.append(f"{name}={words.pop(0)}" if name and words else word)
    return done + words


def _with_value() -> dict[str, str]:
    """The long names of torchrun's options that take a value, by each of their names."""
    from torch.distributed import run as torchrun

    found = {}
    for action in torchrun.get_args_parser()._actions:
        if action.nargs is None and action.option_strings:
            long = next(name for name in action.option_strings if name.startswith("--"))
            found.update(dict.fromkeys(action.option_strings, long))
    return found


def parse(
    arguments: Sequence[str], *, command: str, default_processes: str, own: Sequence[str] = ()
) -> Namespace:
    """torchrun's options, then the script and its arguments, as torchrun's own parser reads them.

    The result has an attribute `is_alone`, too: whether this is one process that nobody asked to be
    a job, which `launch` starts as Python would.

    Args:
        arguments: what is to be read.
        command: its name, for messages.
        default_processes: stands in for an absent --nproc-per-node.
        own: the options that `command` has besides, for messages.

    Exits with status 2 and torchrun's message when the options are wrong, or raises ValueError;
    also for a wrong variable of ours, as every process would.
    """
    from torch.distributed import run as torchrun

    from deepytorch_core.base import config

    config.Options.from_env()

    parser: ArgumentParser = torchrun.get_args_parser()
    parser.prog = command
    _check_names(arguments, parser, own)
    is_open = not config.is_set("PET_NPROC_PER_NODE")  # a TrainJob's pod of one rank is a job, too
    if is_open:
        parser.set_defaults(nproc_per_node=default_processes)
    default_port = parser.get_default("master_port")
    if parser.get_default("node_rank") == 0:  # else set by the environment
        parser.set_defaults(node_rank=None)
    options = parser.parse_args(list(arguments))
    if options.nproc_per_node.isdecimal() and int(options.nproc_per_node) < 1:
        raise ValueError(f"--nproc-per-node {options.nproc_per_node}: expected 1 or more")
    alone = options.nnodes.split(":")[-1] == "1" and options.rdzv_backend == "static"
    if alone and not options.rdzv_endpoint and options.master_port == default_port:
        options.standalone = True  # a free port, so that runs on one machine never meet
    given = arguments[: len(arguments) - len(options.training_script_args) - 1]
    is_asked = not set(given) <= {"-m", "--module"} or not is_open or not alone
    options.is_alone = default_processes == "1" and not is_asked and not options.rdzv_endpoint
    return options


def _check_names(arguments: Sequence[str], parser: ArgumentParser, own: Sequence[str]) -> None:
    """Raises ValueError for an option that nobody has: its value would be taken for the script."""
    takes_value = {
        name: action.nargs is None for action in parser._actions for name in action.option_strings
    }
    words = list(arguments)
    while words and words[0].startswith("-") and words[0] != "--":
        name, is_joined, _ = words.pop(0).partition("=")
        found = [option for option in takes_value if option == name or option.startswith(name)]
        if name.startswith("--") and not found:
            close = difflib.get_close_matches(name.replace("_", "-"), [*takes_value, *own], n=1)
            hint = f"did you mean {close[0]}?" if close else "torchrun --help lists its options"
            raise ValueError(f"there is no option {name}: {hint}")
        if found and takes_value[found[0]] and not is_joined:
            del words[:1]


def settle_meeting(options: Namespace) -> None:
    """How the nodes find each other, where torchrun's defaults would let them wait without end.

    It takes every node without a number for the first, and goes by the first one's own name, which
    may be 127.0.1.1. Raises ValueError where they could not meet.
    """
    from deepytorch_core.base import config
    from deepytorch_core.network import addresses

    numbered = options.node_rank is not None
    options.node_rank = options.node_rank or 0
    if options.nnodes.split(":")[-1] == "1":
        if options.standalone:
            _check_localhost()
        return
    host, _, port = options.rdzv_endpoint.rpartition(":")
    if options.rdzv_backend == "static" and not numbered:
        if not options.rdzv_endpoint and options.master_addr == _NO_ADDRESS:
            raise ValueError(
                f"--nnodes {options.nnodes}: where do the nodes meet? Give all of them "
                "--rdzv-endpoint HOST:PORT of one, or --master-addr HOST and each its --node-rank"
            )
        if options.rdzv_endpoint:
            options.rdzv_backend = "c10d"
    least, _, most = options.nnodes.partition(":")
    if most and most != least:
        # torch tells where a job's store is in the first round only: a node that joins later would
        # wait for that until the job fails. With a store for each round it is told every time.
        config.set_where_unset({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    name = socket.getfqdn(socket.gethostname())
    if options.local_addr is not None or not host or addresses.is_known_by(name):
        return
    with contextlib.suppress(OSError, ValueError):  # then it is torchrun's own way
        host = host.strip("[]")
        options.local_addr = addresses.address_towards(host, int(port))
        # By its name this machine would not find out that it is to serve the others.
        if addresses.has_address(host, options.local_addr) and "is_host" not in options.rdzv_conf:
            options.rdzv_conf = ",".join(filter(None, [options.rdzv_conf, "is_host=1"]))


def _check_localhost() -> None:
    """Torch would try for minutes."""
    from deepytorch_core.network import addresses

    try:
        addresses.check_localhost()
    except OSError as error:
        raise ValueError(
            f"processes of this machine can't meet at localhost: {error}. Bring the loopback "
            "interface up (ip link set lo up), and see that /etc/hosts has 127.0.0.1 localhost"
        ) from None


def check_script(context: typer.Context, options: Namespace) -> None:
    """Ends the command, as wrong use, where Python could not begin with the script."""
    if options.module or options.no_python:
        return
    script = Path(options.training_script)
    if not script.exists():
        context.fail(f"there is no script {script}")
    if script.is_dir() and not (script / "__main__.py").exists():
        context.fail(f"{script} is a folder without __main__.py: name a script")
    if not os.access(script, os.R_OK):
        context.fail(f"{script} can't be read: no permission")


def activated(options: Namespace) -> Namespace:
    """The same launch with deepytorch activated in each process before the user's code starts."""
    if options.no_python:
        raise ValueError("--no-python leaves no Python to activate deepytorch in; give a script")
    script = ["-m"] if options.module else []
    options.shown_as = options.training_script
    options.training_script_args = [
        *script,
        options.training_script,
        *options.training_script_args,
    ]
    options.training_script = str(_RUNNER)
    options.module = False
    return options


def launch(options: Namespace) -> int:
    """Runs torchrun; returns 0, or the exit status of the process that failed first.

    It does not return where that is one process without a job: it becomes that process.
    A process ended by a signal counts as 128 + its number, as in a shell. Raises ValueError where
    several nodes could not meet.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if getattr(options, "is_alone", False):
        _become(options)
    start: Callable[[Namespace], None] = torchrun.run
    settle_meeting(options)
    if console.was_interrupted():
        raise KeyboardInterrupt
    try:
        start(options)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode != _WRONG_USE:  # of which the program has said all in a line
            error.name = getattr(options, "shown_as", error.name)
            table: Callable[[], str] = error.format_msg
            typer.echo(table(), err=True)
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _become(options: Namespace) -> NoReturn:
    """Be the script's process from now on: its signals and its exit status are this one's."""
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, options.training_script, *options.training_script_args]
    os.execv(sys.executable, command)


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
