"""People and programs are told here: the report, its page, metrics, explanations."""
