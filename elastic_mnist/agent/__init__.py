"""What runs inside the torchrun agent, one process a node."""
