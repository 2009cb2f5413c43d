"""Random collectives for as long as one likes, every result compared with an exact reference.

`python -m soak --minutes 30` runs rounds of random operations on four
ranks, on one node and on two emulated ones in turns, then a thousand cycles of making and
destroying groups, and says how many results were wrong and what was left behind. A failure names
the round's seed; `--seed` runs that round again.
"""
