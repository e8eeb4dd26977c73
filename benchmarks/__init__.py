"""What retrysafe costs, beside the floor and the field: `python -m benchmarks`."""
