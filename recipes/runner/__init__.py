"""A loop trains a recipe's task: engines, checkpoints, comparison."""
