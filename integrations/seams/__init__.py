"""Scripts that know nothing of deepytorch are met here."""
