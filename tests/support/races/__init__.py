"""Programs whose races are watched."""
