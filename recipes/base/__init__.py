"""Data, models and the runner stand on this: options, settings, processes."""
