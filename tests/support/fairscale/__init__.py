"""FairScale itself, beside ours, where it runs on a CPU."""
