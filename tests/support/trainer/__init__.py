"""Runs of the trainer: settings, launchers, kills and several hosts."""
