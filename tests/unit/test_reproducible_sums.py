"""Products of matrices have the same bits wherever their operands lie in memory."""

from __future__ import annotations

import os
import subprocess
import sys

_EVERYWHERE = """
from tandem.config.threads import sum_reproducibly

sum_reproducibly()
import torch

torch.set_num_threads(1)
torch.manual_seed(0)


def placed(values, offset):
    memory = torch.empty(values.numel() + 64)
    first = (offset - memory.data_ptr() // 4) % 16
    return memory[first : first + values.numel()].view(values.shape).copy_(values)


for rows, columns in ((1, 8), (3, 1), (37, 2), (93, 1), (256, 8)):
    left, right = torch.randn(rows, 32), torch.randn(columns, 32)
    products = [placed(left, at) @ placed(right, to).T for at in range(16) for to in range(16)]
    assert all(torch.equal(product, products[0]) for product in products), (rows, columns)
"""


def test_a_product_does_not_depend_on_where_memory_lies() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    subprocess.run([sys.executable, "-c", _EVERYWHERE], env=environment, check=True)
