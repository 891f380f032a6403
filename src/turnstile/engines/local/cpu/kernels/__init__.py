"""Kernels of sampling on a CPU, compiled by numba for the machine they run on.

What they compute, and on what, is in `engines/local/cpu/compiled.py` and `engines/local/cpu/packed_matrix.py`, which
alone call them; what they are told is in `engines/local/cpu/kernel_args.py`, in addresses.
"""

from turnstile.engines.local.cpu.kernels.attention import attend, write
from turnstile.engines.local.cpu.kernels.draws import draw
from turnstile.engines.local.cpu.kernels.products import BAND, WIDTH, pack, product

__all__ = ["BAND", "WIDTH", "attend", "draw", "pack", "product", "write"]
