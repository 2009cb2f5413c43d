"""What can be wrong with a machine or a job, each with the evidence and the command that mends it.

A check is one file of `checks/`: `gather` collects facts from a `machine.Machine`, `judge` is a
pure function of them. `registry.CHECKS` lists all, `registry.examine` runs them.
"""
