#!/usr/bin/env python3
"""Writes from_python.safetensors with the safetensors library. test_safetensors.cpp reads the file.

    pip install ml_dtypes numpy safetensors && python3 test/recorded/safetensors/make_safetensors.py
"""
from pathlib import Path

import numpy
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

save_file({
    "float": numpy.arange(6, dtype=numpy.float32).reshape(2, 3) / 4 - 1,
    "half": numpy.array([0.5, -2, 65504], dtype=numpy.float16),
    "brain": numpy.array([1, -2, numpy.inf], dtype=bfloat16),
    "wide": numpy.array([-1, 2**62], dtype=numpy.int64),
    "bytes": numpy.array([[1], [255]], dtype=numpy.uint8),
    "flag": numpy.array(True),
    "nothing": numpy.zeros((0, 4), dtype=numpy.float32),
    "größe": numpy.array([[[1 / 3]]]),
}, Path(__file__).parent / "from_python.safetensors", {"format": "pt"})
