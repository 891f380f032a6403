"""Kernels of sampling on a CPU, compiled by numba for the machine they run on.

What they compute, and on what, is in `models/compiled.py` and `models/panels.py`, which alone call them; what they are
told is in `models/works.py`, in addresses.
"""

from turnstile.models.kernels.attention import attend, write
from turnstile.models.kernels.draws import draw
from turnstile.models.kernels.products import BAND, WIDTH, pack, product

__all__ = ["BAND", "WIDTH", "attend", "draw", "pack", "product", "write"]
