"""A training script against itself: stock and accelerated, in processes that take turns.

`plan` says what one run of the script does, and `workspace` gives it a copy-on-write view of its
folder. `probe` watches it from inside and stops it, and `saves` keeps its checkpoints out of the
way. `result` compares the runs and `receipt` shows them.
"""
