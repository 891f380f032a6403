"""How a server is asked for token ids and given new weights: one file for each kind of server."""
