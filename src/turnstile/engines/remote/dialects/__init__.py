"""Dialects: how each kind of server is asked for tokens and given new weights, one file for each kind."""
