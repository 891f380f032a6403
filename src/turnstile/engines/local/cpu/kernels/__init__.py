"""Sampling kernels for CPUs, compiled by numba for the machine that they run on.

Their callers `engines/local/cpu/compiled.py` and `engines/local/cpu/packed_matrix.py` describe what they compute;
`engines/local/cpu/kernel_args.py` defines their arguments.
"""

from turnstile.engines.local.cpu.kernels.attention import attend, write
from turnstile.engines.local.cpu.kernels.draws import draw
from turnstile.engines.local.cpu.kernels.products import BAND, WIDTH, pack, product

__all__ = ["BAND", "WIDTH", "attend", "draw", "pack", "product", "write"]
