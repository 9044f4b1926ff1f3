"""What runs in a worker, one process of a generation."""
