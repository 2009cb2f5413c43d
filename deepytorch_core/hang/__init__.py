"""Says in one sentence which rank a job waits for, and why, from all ranks' flight records."""
