"""Conformance of any advantage, return or loss function to the seven invariants of `credit/invariants.py`.

Built-in functions go through the checkers of `credit/check.py` and `losses/check.py`. Functions on padded arrays are
adapted to estimators by `padded.py`, or their gradients are checked in `padded_losses.py`.
"""
