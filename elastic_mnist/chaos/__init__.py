"""`elastic-mnist chaos`: the promise, put to the test on the machine at hand.

The training job is run undisturbed, and then once more under faults that a seed has chosen; after the last one it must
finish by itself. What both runs left behind is judged.

    plan        which fault at which (rank, step): pure; the same seed gives the same plan on every machine
    planted     the faults inside a worker, at their exact coordinates
    injector    starts the agents, as a supervisor would, and does what a worker cannot do to itself
    history     what is read afterwards from logs and files, and nothing else
    checkers    verdicts, from the history alone: valid, invalid or unknown, with the evidence
    report      the table
    run         the command

Invariant: who disturbs does not judge, and who judges asks nobody. The package's own modules know nothing of faults.
"""
