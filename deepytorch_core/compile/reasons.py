"""Words that say why a model's passes are compiled, or are not."""

from __future__ import annotations

from deepytorch_core.compile import turns

NOTHING = "nothing is left to compile between the hooks of its modules"
FAILED = "nothing of it could be compiled"
UNDECIDED, FASTER, SLOWER = turns.UNDECIDED, "faster than eager", "eager is faster"
ASKED_FOR, FROM_PROFILE = "asked for", "from the profile"
HELD_UP = "compiling it would hold up a step: a policy's name compiles it all the same"
WHEN_REPLAYED = "faster than eager when replayed"
ONLY_REPLAYED = "faster only where both are replayed"

OF_VERDICTS = {turns.FASTER: FASTER, turns.SLOWER: SLOWER, turns.UNDECIDED: UNDECIDED}
"""Maps verdicts of turns to words."""
