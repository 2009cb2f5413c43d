"""Models of transformers train on rows without padding."""
