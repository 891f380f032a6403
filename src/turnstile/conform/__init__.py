"""Conformance: any advantage, return or loss function against the seven invariants of `credit/invariants.py`.

Built-in functions go through the checkers of `credit/check.py` and `losses/check.py`; functions on padded arrays are
adapted to them by `padded.py`, or their gradients are checked in `padded_losses.py`.
"""
