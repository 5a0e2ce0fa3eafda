"""Faults at random places of a training job, and what has to become of the job."""
