# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""NKI kernel of deterministic selection: the k largest of each row, of equal values the lower column.

A row's columns lie on all partitions: block b (of 128 W columns), partition p, place f hold column b 128 W + p W + f.
bfloat16 values become integers of the same order (+-0 one number, NaN below -inf), so nothing depends on how an engine
treats subnormal numbers or signed zeros. Then, for all rows of a batch together:

    count       legal columns; k' = min(k, legal)
    bisect      16 times: how many columns are >= threshold + 2^b? at least k': raise the threshold     N + 64 a row
    ties        columns above the threshold are in; of those equal to it the first k' - above, which a prefix
                count finds: within a partition by a scan, across partitions and blocks by a matmul
    compact     the mask moves to partitions 0, 16, .., 112 (a segment of 16 W columns each), where
                nonzero_with_count lists the chosen columns in ascending order

The engine's own top-k is not used: which of several equal values it takes is not documented. Counting across
partitions is a matmul with ones, which also broadcasts the sum back to every partition. Columns below 2^24 are exact in
float32. The lists of a row's segments are joined by the caller.
"""

from __future__ import annotations

from .nki import nisa, nki, nl

P = 128  # partitions
SEGMENTS = 8  # partitions that nonzero_with_count serves
SPAN = 16  # partitions whose columns one segment holds
CODE_BITS = 16
LOWEST_CODE = -32768.0  # below every code
POSITIVE_INFINITY = 32640.0  # bits of +inf as a number; larger patterns are NaN or negative
MAGNITUDE = 0x7FFF
BATCH_BYTES = 49152  # of codes per partition: rows that are bisected together


def core_share(items):
    """[first, stop) of this core's part of `items` rows."""
    cores = 1
    core = 0
    if nl.program_ndim() > 0:
        cores = nl.num_programs(axes=0)
        core = nl.program_id(axis=0)
    share = (items + cores - 1) // cores
    first = min(core * share, items)
    return first, min(first + share, items)


def load_values(logits, row, columns, block):
    """[128, columns] bf16 of one row; with `block`, the maxima of that many neighbours."""
    width = columns * max(block, 1)
    values = nl.ndarray(shape=(P, width), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.dma_copy(dst=values, src=logits[row])
    if block == 0:
        return values
    best = nl.ndarray(shape=(P, columns), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_reduce(
        dst=best.expand_dim(2), op=nl.maximum, data=values.reshape_dim(1, (columns, block)), axis=2, keepdims=True
    )
    return best


def ordered_codes(dst, values):
    """dst int16 = integers in the order of bf16 `values`: the magnitude's bits with the sign; NaN is negative."""
    shape = values.shape
    bits = values.view(nl.uint16)
    magnitude = nl.ndarray(shape=shape, dtype=nl.uint16, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=magnitude, data=bits, op0=nl.bitwise_and, operand0=MAGNITUDE, engine=nisa.engine.vector)
    minus_two = nl.ndarray(shape=shape, dtype=nl.int16, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=minus_two,
        data=bits,
        op0=nl.greater,
        operand0=POSITIVE_INFINITY,
        op1=nl.multiply,
        operand1=-2.0,
        engine=nisa.engine.vector,
    )
    nisa.scalar_tensor_tensor(dst=dst, data=minus_two, op0=nl.add, operand0=1.0, op1=nl.multiply, operand1=magnitude)


def triangle(strict):
    """[128, 128] fp32 whose product with [128, n] sums the partitions before each one; all partitions if not
    `strict`."""
    ones = nl.ndarray(shape=(P, P), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0, engine=nisa.engine.vector)
    if not strict:
        return ones
    before = nl.ndarray(shape=(P, P), dtype=nl.float32, buffer=nl.sbuf)
    # stationary[p, m] counts for output m: partition p < m, that is m - p > 0
    nisa.affine_select(
        dst=before,
        pattern=[[1, P]],
        offset=0,
        channel_multiplier=-1,
        on_true_tile=ones,
        on_false_value=0.0,
        cmp_op=nl.greater,
    )
    return before


def across_partitions(weights, parts, count):
    """[128, count] fp32 in PSUM = weights^T parts."""
    psum = nl.ndarray(shape=(P, count), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=psum, stationary=weights, moving=parts)
    return psum


def count_at_least(codes, rows, thresholds, ones, scratch):
    """[128, rows] fp32 in PSUM: columns of each row whose code is >= its threshold, the same in every partition."""
    parts = nl.ndarray(shape=(P, rows), dtype=nl.float32, buffer=nl.sbuf)
    for r in range(rows):
        nisa.tensor_scalar_reduce(
            dst=scratch,
            data=codes[:, r, :],
            op0=nl.greater_equal,
            operand0=thresholds[:, r : r + 1],
            reduce_op=nl.add,
            reduce_res=parts[:, r : r + 1],
        )
    return across_partitions(weights=ones, parts=parts, count=rows)


def row_tile(rows):
    """[128, rows] fp32."""
    return nl.ndarray(shape=(P, rows), dtype=nl.float32, buffer=nl.sbuf)


def find_thresholds(codes, rows, k, lowest, ones, columns):
    """(threshold, wanted, ties wanted) [128, rows] each, the same in every partition."""
    scratch = nl.ndarray(shape=(P, columns), dtype=nl.bfloat16, buffer=nl.sbuf)
    bound = row_tile(rows=rows)
    nisa.memset(dst=bound, value=lowest, engine=nisa.engine.vector)
    legal = count_at_least(codes=codes, rows=rows, thresholds=bound, ones=ones, scratch=scratch)
    wanted = row_tile(rows=rows)
    nisa.tensor_scalar(dst=wanted, data=legal, op0=nl.minimum, operand0=float(k), engine=nisa.engine.vector)
    threshold = row_tile(rows=rows)
    nisa.memset(dst=threshold, value=LOWEST_CODE, engine=nisa.engine.vector)
    for i in range(CODE_BITS):
        step = float(1 << (CODE_BITS - 1 - i))
        tried = row_tile(rows=rows)
        nisa.tensor_scalar(dst=tried, data=threshold, op0=nl.add, operand0=step, engine=nisa.engine.vector)
        total = count_at_least(codes=codes, rows=rows, thresholds=tried, ones=ones, scratch=scratch)
        enough = row_tile(rows=rows)
        nisa.tensor_tensor(dst=enough, data1=total, data2=wanted, op=nl.greater_equal, engine=nisa.engine.vector)
        raised = row_tile(rows=rows)
        nisa.scalar_tensor_tensor(
            dst=raised, data=enough, op0=nl.multiply, operand0=step, op1=nl.add, operand1=threshold
        )
        threshold = raised
    next_code = row_tile(rows=rows)
    nisa.tensor_scalar(dst=next_code, data=threshold, op0=nl.add, operand0=1.0, engine=nisa.engine.vector)
    above = count_at_least(codes=codes, rows=rows, thresholds=next_code, ones=ones, scratch=scratch)
    ties = row_tile(rows=rows)
    nisa.tensor_tensor(dst=ties, data1=wanted, data2=above, op=nl.subtract, engine=nisa.engine.vector)
    return threshold, ties


def tie_offsets(equal_parts, blocks, before, ones):
    """[128, blocks] fp32: equal columns of the row before each partition of each block."""
    inside = across_partitions(weights=before, parts=equal_parts, count=blocks)
    offsets = row_tile(rows=blocks)
    nisa.tensor_copy(dst=offsets, src=inside, engine=nisa.engine.vector)
    if blocks == 1:
        return offsets
    whole = across_partitions(weights=ones, parts=equal_parts, count=blocks)
    running = row_tile(rows=blocks)
    nisa.memset(dst=running[:, 0:1], value=0.0, engine=nisa.engine.vector)
    for b in range(1, blocks):
        nisa.tensor_tensor(
            dst=running[:, b : b + 1],
            data1=running[:, b - 1 : b],
            data2=whole[:, b - 1 : b],
            op=nl.add,
            engine=nisa.engine.vector,
        )
    total = row_tile(rows=blocks)
    nisa.tensor_tensor(dst=total, data1=offsets, data2=running, op=nl.add, engine=nisa.engine.vector)
    return total


def choose_columns(codes, threshold, ties, offset, width, ones_row):
    """[128, width] fp32: 1 for the chosen columns of one block of one row."""
    equal = nl.ndarray(shape=(P, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=equal, data=codes, op0=nl.equal, operand0=threshold, engine=nisa.engine.vector)
    place = nl.ndarray(shape=(P, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor_scan(dst=place, data0=ones_row, data1=equal, initial=offset, op0=nl.multiply, op1=nl.add)
    first = nl.ndarray(shape=(P, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(dst=first, data=place, op0=nl.less_equal, operand0=ties, op1=nl.multiply, operand1=equal)
    chosen = nl.ndarray(shape=(P, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(dst=chosen, data=codes, op0=nl.greater, operand0=threshold, op1=nl.add, operand1=first)
    return chosen


def list_columns(lists, counts, place, chosen, width, kept):
    """The chosen columns of one block, ascending inside each of its eight segments, and how many they are."""
    length = SPAN * width
    lines = nl.ndarray(shape=(P, length), dtype=nl.float32, buffer=nl.sbuf)
    # Segment s is partitions 16 s .. 16 s + 15, one after another in the line of partition 16 s.
    nisa.dma_copy(
        dst=lines.ap(pattern=[[length * SPAN, SEGMENTS], [width, SPAN], [1, width]]),
        src=chosen,
    )
    found = nl.ndarray(shape=(P, length + 1), dtype=nl.int32, buffer=nl.sbuf)
    last = (SEGMENTS - 1) * SPAN + 1
    nisa.nonzero_with_count(dst=found[0:last, :], src=lines[0:last, :], index_offset=0, padding_val=-1)
    row = (length + 1) * SPAN
    nisa.dma_copy(dst=lists[place : place + SEGMENTS, :], src=found.ap(pattern=[[row, SEGMENTS], [1, kept]]))
    nisa.dma_copy(
        dst=counts[place : place + SEGMENTS, :], src=found.ap(pattern=[[row, SEGMENTS], [1, 1]], offset=length)
    )


@nki.jit
def select_columns(logits, k, width, lowest, block=0):
    """The columns of the k largest values of each row, the lower column first among equals.

    Dimensions: rows; blocks of 128 * width columns (times `block`); width <= 256.
    Args:
        logits: [rows, blocks, 128, width * max(block, 1)] bf16; a NaN is never chosen.
        k: columns chosen per row, fewer where fewer are legal.
        lowest: code of the lowest legal value: -32640 is -inf, -32639 the lowest finite one.
        block: 0, or select blocks of that many neighbours by their largest value.
    Returns: (lists [rows * blocks * 8, min(k, 16 * width)] int32: per segment of 16 * width columns the chosen ones,
        ascending, counted from the segment's first; counts [rows * blocks * 8, 1] int32).
    """
    rows = logits.shape[0]
    blocks = logits.shape[1]
    kept = min(k, SPAN * width)
    lines = rows * blocks * SEGMENTS
    lists = nl.ndarray(shape=(lines, kept), dtype=nl.int32, buffer=nl.shared_hbm, name="lists")
    counts = nl.ndarray(shape=(lines, 1), dtype=nl.int32, buffer=nl.shared_hbm, name="counts")
    first_row, stop_row = core_share(items=rows)
    if first_row == stop_row:
        return lists, counts
    columns = blocks * width
    ones = triangle(strict=False)
    before = triangle(strict=True)
    ones_row = nl.ndarray(shape=(P, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones_row, value=1.0, engine=nisa.engine.vector)
    batch = max(1, min(64, BATCH_BYTES // (2 * columns)))
    for start in range(first_row, stop_row, batch):
        count = min(batch, stop_row - start)
        codes = nl.ndarray(shape=(P, count, columns), dtype=nl.int16, buffer=nl.sbuf)
        for r in range(count):
            for b in range(blocks):
                values = load_values(logits=logits, row=(start + r, b), columns=width, block=block)
                ordered_codes(dst=codes[:, r, b * width : (b + 1) * width], values=values)
        threshold, ties = find_thresholds(codes=codes, rows=count, k=k, lowest=lowest, ones=ones, columns=columns)
        scratch = nl.ndarray(shape=(P, width), dtype=nl.bfloat16, buffer=nl.sbuf)
        for r in range(count):
            parts = row_tile(rows=blocks)
            for b in range(blocks):
                nisa.tensor_scalar_reduce(
                    dst=scratch,
                    data=codes[:, r, b * width : (b + 1) * width],
                    op0=nl.equal,
                    operand0=threshold[:, r : r + 1],
                    reduce_op=nl.add,
                    reduce_res=parts[:, b : b + 1],
                )
            offsets = tie_offsets(equal_parts=parts, blocks=blocks, before=before, ones=ones)
            for b in range(blocks):
                chosen = choose_columns(
                    codes=codes[:, r, b * width : (b + 1) * width],
                    threshold=threshold[:, r : r + 1],
                    ties=ties[:, r : r + 1],
                    offset=offsets[:, b : b + 1],
                    width=width,
                    ones_row=ones_row,
                )
                list_columns(
                    lists=lists,
                    counts=counts,
                    place=((start + r) * blocks + b) * SEGMENTS,
                    chosen=chosen,
                    width=width,
                    kept=kept,
                )
    return lists, counts
