"""Recipes train these models."""
