"""The lab: estimators and losses measured against exact gradients, on small decision processes.

A process (`processes.py`) is enumerated (`world.py`) and sampled as the groups that estimators see in training
(`play.py`); the gradient of an estimator is then compared with the exact one (`measure.py`).
"""
