"""Finds what is wrong with a machine or a job, with the evidence and the command that mends it.

A check is one file of `checks/`: `gather` collects facts from a `machine.Machine`, `judge` is a
pure function of them. `registry.CHECKS` lists all, `registry.examine` runs them.
"""
