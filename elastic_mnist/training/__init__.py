"""The numerics: knows neither torchrun nor files."""
