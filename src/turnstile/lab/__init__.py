"""The lab: estimators and losses held against processes so small that the exact gradient is known.

A process (`processes.py`) is listed whole (`world.py`), played into the groups that estimators see in training
(`play.py`), and what an estimator makes of them is compared with the truth (`measure.py`).
"""
