"""Everything that is not training: the console command `elastic-mnist`.

A tool reads logs, files and snapshots, and never takes part in a job.
"""
