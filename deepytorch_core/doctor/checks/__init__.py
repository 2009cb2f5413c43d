"""One check per file: a frozen dataclass of facts, `gather` and `judge`."""
