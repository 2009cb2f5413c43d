"""Read by every Python process that the tests start: it looks for cycles of garbage more rarely.

Importing torch and what builds on it takes half as long again with the usual thresholds, and many
tests start processes that do little else. The Makefile puts this folder in PYTHONPATH.
"""

import gc

gc.set_threshold(50_000, 20, 20)
