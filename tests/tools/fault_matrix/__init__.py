"""The fault matrix: what breaks, on which path, in which phase, and what must come of it.

`python -m fault_matrix` runs the cases of `cases.py` one after the other, each in fresh ranks. It
compares what the survivors tell with what the table promises. `--json FILE` keeps the results as
JSON lines, `--write docs/faults.md` makes the page of them.
"""
