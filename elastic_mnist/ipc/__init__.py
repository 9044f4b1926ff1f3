"""What an agent and its workers share: the environment, the heartbeat table, processes. Imports no torch."""
