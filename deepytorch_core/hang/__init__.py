"""Which rank a job waits for, and why: from the flight records of all ranks, in one sentence."""
