"""Random collectives for as long as one likes, every result compared with an exact reference.

`python -m soak --minutes 30` runs rounds of random operations on four ranks, on one node and on two
emulated ones in turns. Then it makes and destroys groups a thousand times. It says how many results
were wrong and what was left behind. A failure names the round's seed; `--seed` runs that round
again.
"""
