# SPDX-License-Identifier: Apache-2.0
"""Run a Trainium kernel on this machine, see what it is estimated to cost, and save a trace for Perfetto."""

import tempfile
from pathlib import Path

import numpy as np

from sparse_mla import simulator

simulator.install()  # `import nki` works from here on, unless the real package is there
import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402


@nki.jit
def row_softmax(x):
    """Softmax of each of 128 rows."""
    out = nl.ndarray(shape=x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    tile = nl.ndarray(shape=x.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    low = nl.ndarray(shape=(x.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    total = nl.ndarray(shape=(x.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=low, op=nl.maximum, data=tile, axis=1, negate=True)
    nisa.activation_reduce(dst=tile, op=nl.exp, data=tile, bias=low, reduce_op=nl.add, reduce_res=total)
    nisa.reciprocal(dst=total, data=total)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=total)
    nisa.dma_copy(dst=out, src=tile)
    return out


x = np.random.default_rng(0).standard_normal((128, 512)).astype(np.float32)
run = simulator.run(row_softmax, x)
expected = np.exp(x - x.max(1, keepdims=True))
assert np.allclose(run.value, expected / expected.sum(1, keepdims=True), atol=1e-6)

estimate = run.estimate
print(f"estimated, {estimate.target}: {estimate.total_us:.1f} us, bound by {estimate.bound_by}")
for step in estimate.critical_path:
    print(f"  {step.start_us:6.2f} .. {step.end_us:6.2f} us  {step.opcode}")
path = Path(tempfile.mkdtemp()) / "row_softmax.json"
run.trace.save(str(path))
print(f"open {path.name} in Perfetto: {path.stat().st_size} bytes")
