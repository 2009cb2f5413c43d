"""Measuring: our collectives against a baseline in the same run, records, tables and plots."""
