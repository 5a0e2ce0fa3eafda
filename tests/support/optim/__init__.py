"""Scenery for tests of optimizers: parameters of many shapes, ways to shard, equal gradients."""
