"""Turnstile: reinforcement learning for LLM agents on tasks of many turns."""

__version__ = "0.1.0.dev0"
