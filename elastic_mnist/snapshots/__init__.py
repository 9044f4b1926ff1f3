"""Snapshots: the state of a job, where it is kept, and where a job goes on from.

Data flows one way: `state` knows what a snapshot holds, `storage` how bytes are put and got, `durable`
which of them to believe, `contract` which settings a job's results hang on, and `resume` decides.
"""
