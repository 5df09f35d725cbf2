"""Kernels of this folder run in Triton's interpreter, which they choose when they are defined."""

import os

os.environ["TRITON_INTERPRET"] = "1"
