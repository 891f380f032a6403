"""Dialects, one for each kind of server, which define how to request tokens and load new weights."""
