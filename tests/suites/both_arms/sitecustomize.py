"""Read by every Python process of a suite's run: switches deepytorch on in its arm.

Each group that deepytorch takes over becomes a
line in $SUITE_GROUPS and each decision one in $SUITE_DECISIONS, with the test that made it. So a
run tells in how many tests deepytorch was really there.
"""

import json
import os

if os.environ.get("SUITE_ARM", "stock") != "stock":
    import deepytorch  # noqa: F401 (this is what switches it on)
    from deepytorch_core.base import decisions
    from deepytorch_core.c10d import backend

    note_group, record = backend.note_group, decisions.record

    def tell(variable: str, told: dict[str, object]) -> None:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        with open(os.environ[variable], "a") as file:
            file.write(json.dumps({"test": test, "pid": os.getpid(), **told}) + "\n")

    def tell_group(name: str, size: int) -> None:
        note_group(name, size)
        tell("SUITE_GROUPS", {"size": size})

    def tell_decision(what: str, chosen: str, reason: str, **more: object) -> None:
        record(what, chosen, reason, **more)
        tell("SUITE_DECISIONS", {"what": what, "chosen": chosen, "reason": reason})

    backend.note_group, decisions.record = tell_group, tell_decision
