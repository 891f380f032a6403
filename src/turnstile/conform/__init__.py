"""Conformance: any advantage, return or loss function, ours or another's, held against the seven invariants of
`credit/invariants.py`. Our own go through the checkers of `credit/check.py` and `losses/check.py`; functions on padded
arrays are brought to them by `padded.py`, or have their gradients looked at in `padded_losses.py`."""
