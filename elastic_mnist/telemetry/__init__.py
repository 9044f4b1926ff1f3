"""What a job records: the event log and the sample log."""
