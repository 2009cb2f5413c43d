"""One run of the script under torchrun: `python -m deepytorch.cli.compare.arm PLAN ARGUMENTS...`.

A process of its own, since torchrun takes signal handlers and environment variables for itself.
"""

import sys

from deepytorch.cli import launcher


def main(arguments: list[str]) -> int:
    plan, default_processes, *rest = arguments
    options = launcher.parse(
        rest, command="deepytorch run --compare", default_processes=default_processes
    )
    options = launcher.activated(options)
    options.training_script_args = ["--compare", plan, *options.training_script_args]
    return launcher.launch(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
