"""Settings of all layers of a job, searched together on its own step time: `deepytorch tune`.

`knobs` says what can be set, `in_force` sets it in a process, and `seams` reaches what the
frameworks take as arguments. `search` chooses what to try. `confirm` repeats the winner against the
defaults and, if it is of several layers, against the best of one. `stored` keeps it in the profile,
and `start` takes it from there when a job begins.
"""
