"""What a step costs: memory, communication, time. Plain arithmetic over graphs, strategies and clusters; no torch."""
