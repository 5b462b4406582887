#!/usr/bin/env python3
"""Makes tests/data/dequantize.json: random blocks of the quantised types and what they mean.

    python3 -m venv V && V/bin/pip install gguf==0.19.0 && V/bin/python tools/make_dequantize_vectors.py > tests/data/dequantize.json

The values are those of the package `gguf`, an implementation that is not ours. Only the tests read the file.
"""

import json
import random
import struct

import numpy
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

# The type, and where halves lie in its blocks: random bits would be NaNs.
TYPES = {
    "Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "IQ4_NL": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}


def main():
    rng = random.Random(4)
    cases = []
    for name, halves in TYPES.items():
        kind = GGMLQuantizationType[name]
        elements, size = GGML_QUANT_SIZES[kind]
        blocks = bytearray()
        for _ in range(4 if elements == 32 else 2):
            block = bytearray(rng.randbytes(size))
            for at in halves:
                block[at:at + 2] = struct.pack("<e", rng.uniform(-0.5, 0.5))
            blocks += block
        values = quants.dequantize(numpy.frombuffer(bytes(blocks), dtype=numpy.uint8), kind).ravel()
        cases.append({"type": name, "blocks": blocks.hex(),
                      "values": [float(f"{v:.9g}") for v in values]})
    print("[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]")


main()
