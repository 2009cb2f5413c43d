"""Read by every Python process of a suite's run: switches deepytorch on in its arm.

Each group that deepytorch takes over becomes a line in $SUITE_GROUPS: the test that made it. So a
run tells in how many tests deepytorch was really there.
"""

import json
import os

if os.environ.get("SUITE_ARM") == "deepytorch":
    import deepytorch  # noqa: F401 (this is what switches it on)
    from deepytorch_core import backend

    note_group = backend.note_group

    def tell_group(name: str, size: int) -> None:
        note_group(name, size)
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        with open(os.environ["SUITE_GROUPS"], "a") as file:
            file.write(json.dumps({"test": test, "pid": os.getpid(), "size": size}) + "\n")

    backend.note_group = tell_group
