"""Experiments: the demo over several seeds, the task factory, and the lab."""
