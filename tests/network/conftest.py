"""Emulated nodes; what needs them is skipped only where the process has no right to make any."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepytorch_core.testing.emulation import missing_privilege

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing_privilege()
    for item in items:
        if reason is not None and _HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
