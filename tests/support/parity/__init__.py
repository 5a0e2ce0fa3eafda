"""Training beside torch's own and the unsharded model: models, engines, comparisons."""
