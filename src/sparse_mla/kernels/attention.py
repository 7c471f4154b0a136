# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call, var-annotated"
"""NKI kernels of sparse attention: one body for keys that arrive as bfloat16 rows or as quantized records.

Keys lie on partitions, 128 to a chunk: V [128 keys, chunk, 512]. The tensor engine needs the head dimension on
partitions for the scores, so every chunk is transposed once (K^T [128 d, chunk, 4, 128 keys]); the same V,
untransposed, serves P @ V. Heads lie on the output partitions. With 32 heads or fewer, four rows share one pass: row
i of the group owns partitions 32 i .. 32 i + 31 (column tiles of the array); with 33 to 64 heads, two rows do. No
instruction mixes two rows' numbers, so a row's bits do not depend on its neighbours.

A step is one group of rows and one segment of at most SEGMENT chunks. The program runs four stages of different steps
in turn, so that every engine finds work that is ready while another one is busy:

    multiply(i-2)  P^T, P @ V                                                   Tensor, Scalar
    prepare(i)     gather (issued PREFETCH rows ahead), decode, K^T, scores     GpSimd, DMA, Vector, Tensor, Scalar
    soften(i-1)    max, exp, row sums                                           Vector, Scalar
    store(i-2)     division, stores                                             Vector, Scalar, DMA

Vector decodes and is the busiest engine: all evacuations of PSUM are Scalar's, and what Vector waits for in a stage was
computed in the turn before.

Empty slots. Their index is EMPTY_UNIT, outside every pool: the gather skips them and leaves what the buffer held, which
is zeros at first and another row's record later, finite in any case. Their bias of EMPTY makes P exactly 0. So no
byte of a slot that a row does not select is read, let alone used.
The bias of a row reaches its scores through the tensor engine: a matmul with a one-hot stationary adds 0 or EMPTY
before the scores arrive, which costs a row 0.27 us and needs no broadcast. It adds before the softmax scale is
applied, so it is for scales above zero and biases of 0 or EMPTY; `exact_bias` adds any bias after scaling, through a
broadcast tile.

Small transfers are made on purpose, and the simulator notes them: the index columns (4 bytes per partition and chunk,
once per launch), the scale and the sink per lane, lse per head, and the scale bytes of planar records. All other
transfers move rows of 288 bytes or more.
"""

from __future__ import annotations

from .decode_records import (
    E4M3_RAISE,
    decode_e2m1,
    decode_e4m3_integer,
    decode_e4m3_native,
    scale_factors_e4m3,
    scale_factors_ue8m0,
)
from .nki import nisa, nki, nl

P = 128  # partitions, and keys per chunk
D = 512  # head dimension
D_BLOCKS = 4  # blocks of 128 dims
BANK = 512  # float32 columns of one PSUM bank
SEGMENT = 8  # chunks whose scores are held at once: two PSUM banks
BIAS_PAD = 16  # columns before the per-slot bias; column 0 is the row's softmax scale
SINK_CAP = 80.0  # exp(80) and its reciprocal are normal float32; an output below 1e-34 is as good as 0
PREFETCH = 3  # rows whose gathers are issued ahead of their decoding
GROUPS_AT_ONCE = 16  # groups whose running results stay in SBUF while shared keys pass: 3 KiB each per partition
MASK_KEYS = 4096  # keys whose mask is kept for all rows of a block at once
FP8_DATA, FP8_SCALES = 512, 16  # bytes of a 528-byte record
FP4_DATA, FP4_SCALES = 256, 32  # bytes of a 288-byte record
FP8_PITCH, FP4_PITCH = 544, 288  # bytes between two chunks of a partition, a multiple of 32


def lane_width(heads):
    """Output partitions one row owns: 32, 64 or 128."""
    if heads <= 32:
        return 32
    if heads <= 64:
        return 64
    return P


def raw_pitch(kind):
    """Bytes one gathered record takes in a buffer; 0: the record is the bfloat16 row itself."""
    if kind == "bf16":
        return 0
    if kind == "fp4":
        return FP4_PITCH
    return FP8_PITCH


def core_rows(rows):
    """(first row, number of rows) of this core: halves on two cores; a single row is the first core's."""
    cores = 1
    core = 0
    if nl.program_ndim() > 0:
        cores = nl.num_programs(axes=0)
        core = nl.program_id(axis=0)
    if rows < cores:
        if core == 0:
            return 0, rows
        return 0, 0
    share = rows // cores
    first = core * share
    if core == cores - 1:
        share = rows - first
    return first, share


def load_queries(q, first, count, heads, width):
    """q^T [128 d, 4, 128 lanes] bf16 of `count` rows from row `first`; row i of the group in lanes i * width .."""
    lanes = count * width
    rows = nl.ndarray(shape=(P, D), dtype=nl.bfloat16, buffer=nl.sbuf)
    if heads == width:
        nisa.dma_copy(dst=rows[0:lanes, :], src=q[first * heads : first * heads + lanes, :])
    else:
        nisa.memset(dst=rows[0:lanes, :], value=0.0, engine=nisa.engine.vector)
        for i in range(count):
            nisa.dma_copy(
                dst=rows[i * width : i * width + heads, :], src=q[(first + i) * heads : (first + i + 1) * heads, :]
            )
    psum = nl.ndarray(shape=(P, D_BLOCKS, P), dtype=nl.bfloat16, buffer=nl.psum)
    for d in range(D_BLOCKS):
        nisa.nc_transpose(dst=psum[:, d, 0:lanes], data=rows[0:lanes, d * P : (d + 1) * P], engine=nisa.engine.tensor)
    q_t = nl.ndarray(shape=(P, D_BLOCKS, P), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.activation(dst=q_t[:, :, 0:lanes], op=nl.copy, data=psum[:, :, 0:lanes])
    return q_t


def transpose_chunks(k_t, v, first, stop):
    """K^T of chunks first .. stop - 1 of V, two chunks to a PSUM bank and one evacuation by the Scalar engine."""
    for start in range(first, stop, 2):
        count = min(2, stop - start)
        psum = nl.ndarray(shape=(P, 2, D_BLOCKS, P), dtype=nl.bfloat16, buffer=nl.psum)
        for j in range(count):
            for d in range(D_BLOCKS):
                nisa.nc_transpose(
                    dst=psum[:, j, d, :], data=v[:, start + j, d * P : (d + 1) * P], engine=nisa.engine.tensor
                )
        nisa.activation(dst=k_t[:, start : start + count, :, :], op=nl.copy, data=psum[:, 0:count, :, :])


def multiply_lanes(dst, stationary, moving, lane, width, accumulate):
    """dst = stationary^T moving in the column tile of one row's lanes."""
    if width == P:
        nisa.nc_matmul(dst=dst, stationary=stationary, moving=moving, accumulate=accumulate)
    else:
        nisa.nc_matmul(
            dst=dst,
            stationary=stationary,
            moving=moving,
            accumulate=accumulate,
            tile_position=(0, lane),
            tile_size=(P, width),
        )


def score_keys(scores, q_t, k_t, lane, width, chunks, masked):
    """scores[lane .. lane + width, keys] (+)= q . k of one row, one chain of matmuls per PSUM bank."""
    per_bank = BANK // P
    for start in range(0, chunks, per_bank):
        stop = min(start + per_bank, chunks)
        for d in range(D_BLOCKS):
            multiply_lanes(
                dst=scores[lane : lane + width, start * P : stop * P],
                stationary=q_t[:, d, lane : lane + width],
                moving=k_t[:, start:stop, d, :],
                lane=lane,
                width=width,
                accumulate=masked or d > 0,
            )


def one_hot_rows(rows, width):
    """[rows, rows * width] bf16: 1 where column // width is the partition; its slices pick a group's rows."""
    ones = nl.ndarray(shape=(P, rows), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0, engine=nisa.engine.vector)
    identity = nl.ndarray(shape=(P, rows), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.affine_select(
        dst=identity,
        pattern=[[-1, rows]],
        offset=0,
        channel_multiplier=1,
        on_true_tile=ones,
        on_false_value=0.0,
        cmp_op=nl.equal,
    )
    select = nl.ndarray(shape=(P, rows * width), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_copy(
        dst=select.reshape_dim(1, (rows, width)),
        src=identity.expand_dim(2).broadcast(2, width),
        engine=nisa.engine.vector,
    )
    return select


def load_mask(bias, first, count, key, keys, has_low):
    """bf16 tiles [count rows, keys] whose sum is the per-slot bias of these rows, one row per partition: one tile
    holds 0 and EMPTY; with `has_low` a second one adds the next eight bits of finer values."""
    wide = nl.ndarray(shape=(P, keys), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=wide[0:count, :], src=bias[first : first + count, BIAS_PAD + key : BIAS_PAD + key + keys])
    high = nl.ndarray(shape=(P, keys), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.activation(dst=high[0:count, :], op=nl.copy, data=wide[0:count, :])
    tiles = [high[0:count, :]]
    if has_low:
        low = nl.ndarray(shape=(P, keys), dtype=nl.bfloat16, buffer=nl.sbuf)
        nisa.tensor_tensor(
            dst=low[0:count, :],
            data1=wide[0:count, :],
            data2=high[0:count, :],
            op=nl.subtract,
            engine=nisa.engine.vector,
        )
        tiles.append(low[0:count, :])
    return tiles


def mask_bank(bank, masks, select, first):
    """bank [lanes, keys] = the masks' columns from `first` on, each row's on its own lanes. Opens the bank's chain of
    matmuls."""
    for j in range(len(masks)):
        nisa.nc_matmul(
            dst=bank,
            stationary=select,
            moving=masks[j][:, first : first + bank.shape[1]],
            accumulate=j > 0,
        )


def load_lanes(dst, src, offset, step, count, width, run):
    """dst[i * width + j, :] = src's elements offset + i * step .. + run, the same for every lane j of row i."""
    for i in range(count):
        nisa.dma_copy(
            dst=dst[i * width : (i + 1) * width, :],
            src=src.ap(pattern=[[0, width], [1, run]], offset=offset + i * step),
        )


def load_sink(sink, heads, width, count):
    """[128, 1] fp32: the sink of each head in the lanes of each row of a group."""
    lanes = column_tile()
    if heads < width:
        nisa.memset(dst=lanes, value=0.0, engine=nisa.engine.vector)
    for i in range(count):
        nisa.dma_copy(dst=lanes[i * width : i * width + heads, :], src=sink)
    return lanes


def load_index_columns(idx, first, count, chunks, is_columns):
    """[128, count * chunks] int32 on chip: column r * chunks + c holds the indices of chunk c of row first + r.

    `is_columns`: idx is laid out so already, [128, rows * chunks]; else it is [rows, chunks * 128], read element by
    element.
    """
    columns = nl.ndarray(shape=(P, count * chunks), dtype=nl.int32, buffer=nl.sbuf)
    if is_columns:
        nisa.dma_copy(dst=columns, src=idx[:, first * chunks : (first + count) * chunks])
    else:
        nisa.dma_copy(dst=columns, src=idx.ap(pattern=[[1, P], [P, count * chunks]], offset=first * chunks * P))
    return columns


def gather_chunk(dst, pool, length, column):
    """dst [128, length] = the `length` elements of the pool that begin at unit `column[p]`; empty units are skipped."""
    nisa.dma_copy(
        dst=dst,
        src=pool.ap(pattern=[[pool.shape[1], P], [1, length]], vector_offset=column, indirect_dim=0),
        oob_mode=nisa.oob_mode.skip,
    )


def gather_scope(raw, v, base, kind, pool, columns, scale_columns, column, first, stop):
    """Issue the gathers of chunks first .. stop - 1 of one row of one scope, into `raw`, or into V for bf16 rows."""
    for c in range(first, stop):
        at = columns[:, column + c : column + c + 1]
        if kind == "bf16":
            target = v[:, base + c - first, :]
            if pool.dtype == nl.uint8:
                gather_chunk(dst=target.view(nl.uint8), pool=pool, length=2 * D, column=at)
            else:
                gather_chunk(dst=target, pool=pool, length=D, column=at)
        else:
            data = FP4_DATA if kind == "fp4" else FP8_DATA
            scales = FP4_SCALES if kind == "fp4" else FP8_SCALES
            if scale_columns == None:
                gather_chunk(dst=raw[:, c - first, 0 : data + scales], pool=pool, length=data + scales, column=at)
            else:
                gather_chunk(dst=raw[:, c - first, 0:data], pool=pool, length=data, column=at)
                gather_chunk(
                    dst=raw[:, c - first, data : data + scales],
                    pool=pool,
                    length=scales,
                    column=scale_columns[:, column + c : column + c + 1],
                )


def decode_scope(v, base, raw, kind, count, landing, alone, gpsimd_free, lanes):
    """V[:, base .. base + count] of gathered records, in parts that GpSimd and Vector scale side by side.

    Vector extracts the codes of every part and is the busiest engine. While gathers keep GpSimd busy it scales a
    small share; when none is left (`gpsimd_free`) most of it. `landing`: the chunks arrive one by one, so the first
    is decoded by itself, or every one when the row is `alone`.
    """
    if landing and alone:
        for c in range(count):
            helper = nisa.engine.vector
            if kind != "fp8_native" and c < count - 1:
                helper = nisa.engine.gpsimd
            decode_part(v=v, base=base, raw=raw, kind=kind, start=c, stop=c + 1, lanes=lanes, engine=helper)
        return
    share = 0
    if kind == "fp8_integer":
        share = count * 3 // 5 if gpsimd_free else count * 2 // 5
    if kind == "fp4":
        share = count * 3 // 4 if gpsimd_free else count // 4
    helper = nisa.engine.gpsimd
    if landing:
        share = 1
        helper = nisa.engine.vector
    if 0 < share and share < count:
        decode_part(v=v, base=base, raw=raw, kind=kind, start=0, stop=share, lanes=lanes, engine=helper)
        decode_part(v=v, base=base, raw=raw, kind=kind, start=share, stop=count, lanes=lanes, engine=nisa.engine.vector)
    else:
        decode_part(v=v, base=base, raw=raw, kind=kind, start=0, stop=count, lanes=lanes, engine=nisa.engine.vector)


def decode_part(v, base, raw, kind, start, stop, lanes, engine):
    """V[:, base + start .. base + stop] of gathered records, all chunks in one instruction each."""
    chunks = stop - start
    dst = v[:, base + start : base + stop, :]
    if kind == "fp4":
        factors = scale_factors_e4m3(
            raw=raw[:, start:stop, FP4_DATA : FP4_DATA + FP4_SCALES], chunks=chunks, groups=FP4_SCALES
        )
        decode_e2m1(
            dst=dst, data=raw[:, start:stop, 0:FP4_DATA], factors=factors, groups=FP4_SCALES, lanes=lanes, engine=engine
        )
        return
    is_integer = kind == "fp8_integer"
    factors = scale_factors_ue8m0(
        raw=raw[:, start:stop, FP8_DATA : FP8_DATA + FP8_SCALES],
        chunks=chunks,
        groups=FP8_SCALES,
        raise_by=E4M3_RAISE if is_integer else 0,
    )
    data = raw[:, start:stop, 0:FP8_DATA]
    if is_integer:
        decode_e4m3_integer(dst=dst, data=data, factors=factors, groups=FP8_SCALES, lanes=32, engine=engine)
    else:
        decode_e4m3_native(dst=dst, data=data, factors=factors, groups=FP8_SCALES, engine=engine)


def fill_rows(dst, first, stop):
    """Zeros in rows that are padding, so that every element of an output is written."""
    zeros = nl.ndarray(shape=(P, dst.shape[1]), dtype=dst.dtype, buffer=nl.sbuf)
    nisa.memset(dst=zeros, value=0.0, engine=nisa.engine.gpsimd)
    for start in range(first, stop, P):
        count = min(P, stop - start)
        nisa.dma_copy(dst=dst[start : start + count, :], src=zeros[0:count, :])


def scope_of(kind, chunks, pool, idx, scale_idx, is_columns):
    """Keys of one kind that `attend` reads: `chunks` chunks a row of `pool`, at `idx`. Kind "rows" is gathered already:
    pool holds the keys of all rows one after another."""
    return {
        "kind": kind,
        "chunks": chunks,
        "pool": pool,
        "idx": idx,
        "scale_idx": scale_idx,
        "is_columns": is_columns,
    }


def column_tile():
    """(128, 1) float32."""
    return nl.ndarray(shape=(P, 1), dtype=nl.float32, buffer=nl.sbuf)


def attend(q, bias, sink, scopes, active, with_lse, with_max, exact_bias, out_fp32, lanes):
    """The body of every kernel here but `shared_attn`. `scopes`: a list of what `scope_of` makes."""
    rows = bias.shape[0]
    keys = bias.shape[1] - BIAS_PAD
    chunks = keys // P
    heads = q.shape[0] // rows
    width = lane_width(heads)
    per_group = P // width
    out_dtype = nl.float32 if out_fp32 else nl.bfloat16
    out = nl.ndarray(shape=(rows * heads, D), dtype=out_dtype, buffer=nl.shared_hbm, name="out")
    results = [out]
    lse = None
    if with_lse:
        lse = nl.ndarray(shape=(rows * heads, 1), dtype=nl.float32, buffer=nl.shared_hbm, name="lse")
        results.append(lse)
    top = None
    if with_max:
        top = nl.ndarray(shape=(rows * heads, 1), dtype=nl.float32, buffer=nl.shared_hbm, name="max_logits")
        results.append(top)

    if active == 0:
        active = rows
    first_row, num_rows = core_rows(rows=active)
    if active < rows and first_row == 0:
        for result in results:
            fill_rows(dst=result, first=active * heads, stop=rows * heads)
    if num_rows == 0:
        return results
    num_segments = (chunks + SEGMENT - 1) // SEGMENT
    segment_chunks = min(chunks, SEGMENT)
    num_groups = (num_rows + per_group - 1) // per_group

    # Index columns first: the first gathers wait for them.
    begin = 0
    for scope in scopes:
        scope["begin"] = begin
        begin = begin + scope["chunks"]
        scope["columns"] = None
        scope["scale_columns"] = None
        if scope["kind"] != "rows":
            scope["columns"] = load_index_columns(
                idx=scope["idx"],
                first=first_row,
                count=num_rows,
                chunks=scope["chunks"],
                is_columns=scope["is_columns"],
            )
            if scope["scale_idx"] != None:
                scope["scale_columns"] = load_index_columns(
                    idx=scope["scale_idx"],
                    first=first_row,
                    count=num_rows,
                    chunks=scope["chunks"],
                    is_columns=scope["is_columns"],
                )

    # Before any gather: GpSimd, which makes the one-hot rows, is busy with gathers from then on.
    mask_rows = 0
    select = None
    if not exact_bias:
        mask_rows = min(P if keys <= MASK_KEYS else per_group, num_rows)
        select = one_hot_rows(rows=mask_rows, width=width)

    # Buffers that gathers write, zeroed once because gathers skip empty slots.
    depth = min(PREFETCH + 1, num_rows * num_segments)
    has_bf16 = False
    for scope in scopes:
        scope["raw"] = []
        if scope["kind"] == "bf16":
            has_bf16 = True
        elif scope["kind"] != "rows":
            pitch = raw_pitch(kind=scope["kind"])
            for i in range(depth):
                raw = nl.ndarray(shape=(P, min(scope["chunks"], segment_chunks), pitch), dtype=nl.uint8, buffer=nl.sbuf)
                nisa.memset(dst=raw.view(nl.uint32), value=0, engine=nisa.engine.vector)
                scope["raw"].append(raw)
    v_ring = []
    v_depth = min(3 * per_group + PREFETCH, num_rows * num_segments)
    if has_bf16:
        for i in range(v_depth):
            v = nl.ndarray(shape=(P, segment_chunks, D), dtype=nl.bfloat16, buffer=nl.sbuf)
            nisa.memset(dst=v, value=0.0, engine=nisa.engine.vector)
            v_ring.append(v)

    sink_lanes = load_sink(sink=sink, heads=heads, width=width, count=min(per_group, num_rows))

    # A step is (group, segment); an item is one row of a step.
    steps = []
    items = []
    for g in range(num_groups):
        count = min(per_group, num_rows - g * per_group)
        for s in range(num_segments):
            step = {
                "group": g,
                "segment": s,
                "row": first_row + g * per_group,
                "count": count,
                "first": s * SEGMENT,
                "stop": min((s + 1) * SEGMENT, chunks),
                "v": [],
                "before": None,
            }
            if s > 0:
                step["before"] = steps[len(steps) - 1]
            for i in range(count):
                items.append({"step": len(steps), "slot": i, "v": None})
            steps.append(step)

    state = {
        "heads": heads,
        "width": width,
        "lanes": lanes,
        "exact_bias": exact_bias,
        "with_lse": with_lse,
        "shared": False,
        "first_row": first_row,
        "num_rows": num_rows,
        "num_segments": num_segments,
        "mask": None,
        "mask_row": 0,
        "select": select,
        "mask_rows": mask_rows,
        "issued": 0,
        "next": 0,
    }

    for i in range(len(steps) + 2):
        if i >= 2:
            multiply_step(steps=steps, i=i - 2, state=state)
        if i < len(steps):
            prepare_step(
                q=q, bias=bias, keys=keys, scopes=scopes, steps=steps, items=items, i=i, state=state, v_ring=v_ring
            )
        if i >= 1 and i - 1 < len(steps):
            soften_step(steps=steps, i=i - 1, bias=bias, sink=sink_lanes, state=state)
        if i >= 2:
            store_step(steps=steps, i=i - 2, out=out, lse=lse, top=top, state=state)
    return results


def part_of_step(scope, step):
    """(first, stop) chunk of a scope inside a step, none when first >= stop, and where they begin in the step's V."""
    first = max(step["first"] - scope["begin"], 0)
    stop = min(step["stop"] - scope["begin"], scope["chunks"])
    return first, stop, scope["begin"] + first - step["first"]


def issue_item(scopes, steps, items, n, state, v_ring):
    """Issue the gathers of item n."""
    item = items[n]
    step = steps[item["step"]]
    count = step["stop"] - step["first"]
    row = step["row"] + item["slot"] - state["first_row"]
    if len(v_ring) > 0:
        v = v_ring[n % len(v_ring)]
    else:
        v = nl.ndarray(shape=(P, count, D), dtype=nl.bfloat16, buffer=nl.sbuf)
    item["v"] = v
    for scope in scopes:
        first, stop, base = part_of_step(scope=scope, step=step)
        if first < stop:
            if scope["kind"] == "rows":
                load_rows(
                    v=v,
                    base=base,
                    kv=scope["pool"],
                    row=step["row"] + item["slot"],
                    chunks=scope["chunks"],
                    first=first,
                    stop=stop,
                )
            else:
                raw = None
                if scope["kind"] != "bf16":
                    raw = scope["raw"][n % len(scope["raw"])]
                gather_scope(
                    raw=raw,
                    v=v,
                    base=base,
                    kind=scope["kind"],
                    pool=scope["pool"],
                    columns=scope["columns"],
                    scale_columns=scope["scale_columns"],
                    column=row * scope["chunks"],
                    first=first,
                    stop=stop,
                )


def load_rows(v, base, kv, row, chunks, first, stop):
    """V of keys that lie one after another in HBM: key c * 128 + p to partition p of chunk c."""
    start = row * chunks * P
    nisa.dma_copy(
        dst=v[:, base : base + stop - first, :],
        src=kv.ap(pattern=[[D, P], [P * D, stop - first], [1, D]], offset=(start + first * P) * D),
    )


def mask_block(bias, keys, step, state):
    """The mask tile that holds the step's rows, loaded when the steps enter a new block of rows."""
    rows = state["mask_rows"]
    row = step["row"] - state["first_row"]
    if keys > MASK_KEYS:
        state["mask_row"] = row
        first = step["first"] * P
        return load_mask(
            bias=bias,
            first=step["row"],
            count=step["count"],
            key=first,
            keys=step["stop"] * P - first,
            has_low=False,
        )
    if state["mask"] == None or row >= state["mask_row"] + rows:
        state["mask_row"] = row
        state["mask"] = load_mask(
            bias=bias,
            first=step["row"],
            count=min(rows, state["num_rows"] - row),
            key=0,
            keys=keys,
            has_low=False,
        )
    return state["mask"]


def prepare_step(q, bias, keys, scopes, steps, items, i, state, v_ring):
    """Gather, decode, transpose and score the rows of step i."""
    step = steps[i]
    width = state["width"]
    count = step["stop"] - step["first"]
    live = step["count"] * width
    if state["issued"] == 0:
        issue_item(scopes=scopes, steps=steps, items=items, n=0, state=state, v_ring=v_ring)
        state["issued"] = 1
    if step["segment"] == 0:
        state["q_t"] = load_queries(q=q, first=step["row"], count=step["count"], heads=state["heads"], width=width)
        scale = column_tile()
        load_lanes(
            dst=scale,
            src=bias,
            offset=step["row"] * bias.shape[1],
            step=bias.shape[1],
            count=step["count"],
            width=width,
            run=1,
        )
        negative = column_tile()
        nisa.tensor_scalar(
            dst=negative[0:live, :], data=scale[0:live, :], op0=nl.multiply, operand0=-1.0, engine=nisa.engine.vector
        )
        state["scale"] = scale
        state["negative"] = negative
    step["scale"] = state["scale"]
    step["negative"] = state["negative"]
    scores = nl.ndarray(shape=(P, count * P), dtype=nl.float32, buffer=nl.psum)
    step["scores"] = scores
    if not state["exact_bias"]:
        masks = mask_block(bias=bias, keys=keys, step=step, state=state)
        row = step["row"] - state["first_row"] - state["mask_row"]
        base = 0 if keys > MASK_KEYS else step["first"] * P
        for start in range(0, count * P, BANK):
            mask_bank(
                bank=scores[0:live, start : min(start + BANK, count * P)],
                masks=masks,
                select=state["select"][0 : masks[0].shape[0], row * width : row * width + live],
                first=base + start,
            )
    for slot in range(step["count"]):
        n = state["next"]
        state["next"] = n + 1
        while state["issued"] < len(items) and state["issued"] <= n + PREFETCH:
            issue_item(scopes=scopes, steps=steps, items=items, n=state["issued"], state=state, v_ring=v_ring)
            state["issued"] = state["issued"] + 1
        v = items[n]["v"]
        step["v"].append(v)
        for scope in scopes:
            first, stop, base = part_of_step(scope=scope, step=step)
            if first < stop and len(scope["raw"]) > 0:
                decode_scope(
                    v=v,
                    base=base,
                    raw=scope["raw"][n % len(scope["raw"])],
                    kind=scope["kind"],
                    count=stop - first,
                    landing=n == 0,
                    alone=len(items) == 1,
                    gpsimd_free=state["issued"] == len(items),
                    lanes=state["lanes"],
                )
        k_t = nl.ndarray(shape=(P, count, D_BLOCKS, P), dtype=nl.bfloat16, buffer=nl.sbuf)
        transpose_chunks(k_t=k_t, v=v, first=0, stop=count)
        score_keys(
            scores=scores,
            q_t=state["q_t"],
            k_t=k_t,
            lane=slot * width,
            width=width,
            chunks=count,
            masked=not state["exact_bias"],
        )


def soften_step(steps, i, bias, sink, state):
    """P and its row sums of step i, with the running maximum when there are several segments."""
    step = steps[i]
    live = step["count"] * state["width"]
    keys = (step["stop"] - step["first"]) * P
    data = step["scores"][0:live, :]
    scale = step["scale"][0:live, :]
    negative = step["negative"][0:live, :]
    if state["exact_bias"]:
        tile = nl.ndarray(shape=(P, keys), dtype=nl.float32, buffer=nl.sbuf)
        load_lanes(
            dst=tile,
            src=bias,
            offset=step["row"] * bias.shape[1] + BIAS_PAD + step["first"] * P,
            step=bias.shape[1],
            count=step["count"],
            width=state["width"],
            run=keys,
        )
        logits = nl.ndarray(shape=(P, keys), dtype=nl.float32, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(
            dst=logits[0:live, :], data=data, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=tile[0:live, :]
        )
        data = logits[0:live, :]
    peak = column_tile()
    nisa.tensor_reduce(dst=peak[0:live, :], op=nl.maximum, data=data, axis=1)
    minus = column_tile()  # -m, what exp adds
    if state["exact_bias"]:
        nisa.tensor_scalar(
            dst=minus[0:live, :], data=peak[0:live, :], op0=nl.multiply, operand0=-1.0, engine=nisa.engine.vector
        )
    else:
        nisa.tensor_tensor(
            dst=minus[0:live, :], data1=peak[0:live, :], data2=negative, op=nl.multiply, engine=nisa.engine.vector
        )
    step["rescale"] = None
    if step["segment"] > 0:
        before = step["before"]
        lower = column_tile()
        nisa.tensor_tensor(
            dst=lower[0:live, :],
            data1=minus[0:live, :],
            data2=before["minus"][0:live, :],
            op=nl.minimum,
            engine=nisa.engine.vector,
        )
        shift = column_tile()  # m before - m now
        nisa.tensor_tensor(
            dst=shift[0:live, :],
            data1=lower[0:live, :],
            data2=before["minus"][0:live, :],
            op=nl.subtract,
            engine=nisa.engine.vector,
        )
        rescale = column_tile()
        nisa.activation(dst=rescale[0:live, :], op=nl.exp, data=shift[0:live, :])
        step["rescale"] = rescale
        minus = lower
    step["minus"] = minus
    p = nl.ndarray(shape=(P, keys), dtype=nl.bfloat16, buffer=nl.sbuf)
    total = column_tile()
    if state["exact_bias"]:
        nisa.activation_reduce(
            dst=p[0:live, :],
            op=nl.exp,
            data=data,
            reduce_op=nl.add,
            reduce_res=total[0:live, :],
            bias=minus[0:live, :],
        )
    else:
        nisa.activation_reduce(
            dst=p[0:live, :],
            op=nl.exp,
            data=data,
            reduce_op=nl.add,
            reduce_res=total[0:live, :],
            bias=minus[0:live, :],
            scale=scale,
        )
    if step["segment"] > 0:
        joined = column_tile()
        nisa.scalar_tensor_tensor(
            dst=joined[0:live, :],
            data=step["before"]["total"][0:live, :],
            op0=nl.multiply,
            operand0=step["rescale"][0:live, :],
            op1=nl.add,
            operand1=total[0:live, :],
        )
        total = joined
    step["p"] = p
    step["total"] = total
    step["scores"] = None
    if step["segment"] < state["num_segments"] - 1:
        return
    # exp(min(sink - m, cap)), the sink's share of the denominator, and ln(sum); what is left for Vector comes a stage
    # later.
    above = column_tile()
    nisa.tensor_tensor(
        dst=above[0:live, :], data1=sink[0:live, :], data2=minus[0:live, :], op=nl.add, engine=nisa.engine.vector
    )
    capped = column_tile()
    nisa.tensor_scalar(
        dst=capped[0:live, :], data=above[0:live, :], op0=nl.minimum, operand0=SINK_CAP, engine=nisa.engine.vector
    )
    weight = column_tile()
    nisa.activation(dst=weight[0:live, :], op=nl.exp, data=capped[0:live, :])
    step["weight"] = weight
    if state["with_lse"]:
        log = column_tile()
        nisa.activation(dst=log[0:live, :], op=nl.log, data=total[0:live, :])
        step["log"] = log


def multiply_step(steps, i, state):
    """P^T and P @ V of step i."""
    step = steps[i]
    width = state["width"]
    live = step["count"] * width
    chunks = step["stop"] - step["first"]
    psum = nl.ndarray(shape=(P, chunks, P), dtype=nl.bfloat16, buffer=nl.psum)
    for c in range(chunks):
        nisa.nc_transpose(
            dst=psum[:, c, 0:live], data=step["p"][0:live, c * P : (c + 1) * P], engine=nisa.engine.tensor
        )
    p_t = nl.ndarray(shape=(P, chunks, P), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.activation(dst=p_t[:, :, 0:live], op=nl.copy, data=psum[:, :, 0:live])
    product = nl.ndarray(shape=(P, D), dtype=nl.float32, buffer=nl.psum)
    if state["shared"]:
        for c in range(chunks):
            nisa.nc_matmul(
                dst=product[0:live, :],
                stationary=p_t[:, c, 0:live],
                moving=step["v"][0][:, c, :],
                accumulate=c > 0,
            )
    for slot in range(0 if state["shared"] else step["count"]):
        lane = slot * width
        for c in range(chunks):
            multiply_lanes(
                dst=product[lane : lane + width, :],
                stationary=p_t[:, c, lane : lane + width],
                moving=step["v"][slot][:, c, :],
                lane=lane,
                width=width,
                accumulate=c > 0,
            )
    step["product"] = product
    step["v"] = []


def store_step(steps, i, out, lse, top, state):
    """Join the product of step i with the segments before it; after the last, divide and store the group."""
    step = steps[i]
    live = step["count"] * state["width"]
    product = step["product"]
    result = product
    if state["num_segments"] > 1:
        result = nl.ndarray(shape=(P, D), dtype=nl.float32, buffer=nl.sbuf)
        if step["segment"] == 0:
            nisa.activation(dst=result[0:live, :], op=nl.copy, data=product[0:live, :])
        else:
            nisa.scalar_tensor_tensor(
                dst=result[0:live, :],
                data=step["before"]["result"][0:live, :],
                op0=nl.multiply,
                operand0=step["rescale"][0:live, :],
                op1=nl.add,
                operand1=product[0:live, :],
            )
    step["result"] = result
    step["product"] = None
    if step["segment"] == state["num_segments"] - 1:
        finish_group(step=step, heads=state["heads"], width=state["width"], out=out, lse=lse, top=top)


def finish_group(step, heads, width, out, lse, top):
    """out = O / (sum + exp(min(sink - m, cap))), lse = m + ln(sum); stores."""
    live = step["count"] * width
    minus = step["minus"][0:live, :]
    if lse != None:
        stat = column_tile()
        nisa.tensor_tensor(
            dst=stat[0:live, :], data1=step["log"][0:live, :], data2=minus, op=nl.subtract, engine=nisa.engine.vector
        )
        store_lanes(dst=lse, src=stat, step=step, heads=heads, width=width)
    if top != None:
        peak = column_tile()
        nisa.tensor_scalar(dst=peak[0:live, :], data=minus, op0=nl.multiply, operand0=-1.0, engine=nisa.engine.vector)
        store_lanes(dst=top, src=peak, step=step, heads=heads, width=width)
    denominator = column_tile()
    nisa.tensor_tensor(
        dst=denominator[0:live, :],
        data1=step["total"][0:live, :],
        data2=step["weight"][0:live, :],
        op=nl.add,
        engine=nisa.engine.vector,
    )
    inverse = column_tile()
    nisa.reciprocal(dst=inverse[0:live, :], data=denominator[0:live, :])
    final = nl.ndarray(shape=(P, D), dtype=out.dtype, buffer=nl.sbuf)
    nisa.activation(dst=final[0:live, :], op=nl.copy, data=step["result"][0:live, :], scale=inverse[0:live, :])
    store_lanes(dst=out, src=final, step=step, heads=heads, width=width)
    step["result"] = None


def store_lanes(dst, src, step, heads, width):
    """Rows of dst [rows * heads, n] = the lanes of the step's rows. Several stores go through two queues in turn."""
    row = step["row"] * heads
    if heads == width:
        nisa.dma_copy(dst=dst[row : row + step["count"] * heads, :], src=src[0 : step["count"] * width, :])
        return
    for i in range(step["count"]):
        target = dst[row + i * heads : row + (i + 1) * heads, :]
        if i % 2 == 0:
            nisa.dma_copy(dst=target, src=src[i * width : i * width + heads, :])
        else:
            nisa.dma_copy(
                dst=target,
                src=src[i * width : i * width + heads, :],
                dge_mode=nisa.dge_mode.hwdge,
                engine=nisa.engine.scalar,
            )


def as_results(results):
    """One tensor, or a tuple of them."""
    if len(results) == 1:
        return results[0]
    if len(results) == 2:
        return results[0], results[1]
    return results[0], results[1], results[2]


@nki.jit
def gathered_attn(q, kv, bias, sink, with_lse=False, with_max=False, exact_bias=True, out_fp32=False, active=0):
    """Attention of each row over its own gathered bf16 keys.

    Dimensions: rows; h = q.shape[0] / rows <= 128 heads; k a multiple of 128 keys per row.
    Args:
        q: [rows * h, 512] bf16.
        kv: [rows * k, 512] bf16, finite; key = value.
        bias: [rows, 16 + k] fp32; column 0 the row's scale, columns 16.. added to the scaled logit, -1e30 for an
        empty slot.
        sink: [h, 1] fp32, clamped to +-1e30 by the caller.
        with_lse, with_max: also return them, [rows * h, 1] fp32.
        exact_bias: False promises that biases are 0 or -1e30 and scales positive.
        out_fp32: the output is fp32.
        active: rows to compute, the rest are padding and give zeros; 0: all.
    Returns: out [rows * h, 512] bf16 or fp32, then what was asked for. A row without a valid slot gives an average of
    its keys.
    """
    chunks = (bias.shape[1] - BIAS_PAD) // P
    scopes = [scope_of(kind="rows", chunks=chunks, pool=kv, idx=None, scale_idx=None, is_columns=True)]
    return as_results(
        attend(
            q=q,
            bias=bias,
            sink=sink,
            scopes=scopes,
            active=active,
            with_lse=with_lse,
            with_max=with_max,
            exact_bias=exact_bias,
            out_fp32=out_fp32,
            lanes=16,
        )
    )


@nki.jit
def gathered_attn_idx(
    q,
    kv_table,
    idx,
    bias,
    sink,
    with_lse=False,
    with_max=False,
    exact_bias=True,
    out_fp32=False,
    is_columns=False,
    active=0,
):
    """The same over rows of one bf16 table, gathered on the device.

    Args:
        kv_table: [slots >= 2, 512] bf16; every row that an index names is finite.
        idx: [rows, k] int32; an index outside the table is not read (its bias must be -1e30). `is_columns`: it is
            [128, rows * k / 128], column r * k / 128 + c holding the indices of keys 128 c .. of row r.
    """
    chunks = (bias.shape[1] - BIAS_PAD) // P
    scopes = [scope_of(kind="bf16", chunks=chunks, pool=kv_table, idx=idx, scale_idx=None, is_columns=is_columns)]
    return as_results(
        attend(
            q=q,
            bias=bias,
            sink=sink,
            scopes=scopes,
            active=active,
            with_lse=with_lse,
            with_max=with_max,
            exact_bias=exact_bias,
            out_fp32=out_fp32,
            lanes=16,
        )
    )


@nki.jit
def fused_attn(
    q,
    pool0,
    idx0,
    bias,
    sink,
    scale_idx0=None,
    pool1=None,
    idx1=None,
    scale_idx1=None,
    kind0="fp8_native",
    kind1="",
    with_lse=False,
    exact_bias=False,
    out_fp32=False,
    lanes=16,
    active=0,
):
    """Attention directly over records of one or two pools, gathered and decoded on chip.

    Args:
        pool0, pool1: [units, g] uint8, the whole pool (bf16 rows: [slots, 512] bf16 too); a record is consecutive
        units.
        idx0, idx1: [128, rows * chunks] int32: unit of each record, -1 for an empty slot; column r * chunks + c of
        row r, chunk c.
        scale_idx0, scale_idx1: the units of the scale bytes when they lie apart (planar pages), else None.
        kind0, kind1: "fp8_native", "fp8_integer", "fp4" or "bf16".
        bias, sink, with_lse, exact_bias, out_fp32, active: as above; scope 0's slots come first.
        lanes: 16 or 32 bits per bit operation of e2m1.
    """
    rows = bias.shape[0]
    chunks = idx0.shape[1] // rows
    scopes = [scope_of(kind=kind0, chunks=chunks, pool=pool0, idx=idx0, scale_idx=scale_idx0, is_columns=True)]
    if kind1 != "":
        chunks = idx1.shape[1] // rows
        scopes.append(scope_of(kind=kind1, chunks=chunks, pool=pool1, idx=idx1, scale_idx=scale_idx1, is_columns=True))
    return as_results(
        attend(
            q=q,
            bias=bias,
            sink=sink,
            scopes=scopes,
            active=active,
            with_lse=with_lse,
            with_max=False,
            exact_bias=exact_bias,
            out_fp32=out_fp32,
            lanes=lanes,
        )
    )


# --- keys that all rows share ----------------------------------------------------------------------------------------


def load_segment(kv, first, stop):
    """V of chunks first .. stop - 1 of the shared keys."""
    v = nl.ndarray(shape=(P, stop - first, D), dtype=nl.bfloat16, buffer=nl.sbuf)
    load_rows(v=v, base=0, kv=kv, row=0, chunks=0, first=first, stop=stop)
    return v


def score_shared(step, v, k_t, masks, select, row, width):
    """Scores of all rows of a group against one segment: the whole array at once, no column tiles."""
    live = step["count"] * width
    count = step["stop"] - step["first"]
    scores = nl.ndarray(shape=(P, count * P), dtype=nl.float32, buffer=nl.psum)
    per_bank = BANK // P
    for start in range(0, count, per_bank):
        stop = min(start + per_bank, count)
        bank = scores[0:live, start * P : stop * P]
        mask_bank(
            bank=bank,
            masks=masks,
            select=select[0 : masks[0].shape[0], row * width : row * width + live],
            first=start * P,
        )
        for d in range(D_BLOCKS):
            nisa.nc_matmul(
                dst=bank, stationary=step["q_t"][:, d, 0:live], moving=k_t[:, start:stop, d, :], accumulate=True
            )
    step["scores"] = scores
    step["v"] = [v]


@nki.jit
def shared_attn(q, kv, bias, sink, scale=1.0, has_weights=False, active=0):
    """Attention of rows that share their keys: a dense pass with a mask, no gather.

    128 (row, head) pairs meet each key once, so K^T and V of a segment are made once per block of GROUPS_AT_ONCE
    groups.

    Dimensions: rows; h = q.shape[0] / rows <= 128 heads; n keys, a multiple of 128.
    Args:
        q: [rows * h, 512] bf16.
        kv: [n, 512] bf16, finite; key = value.
        bias: [rows, 16 + n] fp32, columns 16.. added to the unscaled logit: 0, -1e30 for a key the row does not see,
            and with `has_weights` any value (ln(count) / scale for a key listed `count` times).
        sink: [h, 1] fp32.
        scale: softmax scale, positive.
        active: rows to compute, the rest are padding and give zeros; 0: all.
    Returns: out [rows * h, 512] fp32, lse [rows * h, 1] fp32.
    """
    rows = bias.shape[0]
    chunks = kv.shape[0] // P
    heads = q.shape[0] // rows
    width = lane_width(heads=heads)
    per_group = P // width
    out = nl.ndarray(shape=(rows * heads, D), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    lse = nl.ndarray(shape=(rows * heads, 1), dtype=nl.float32, buffer=nl.shared_hbm, name="lse")
    if active == 0:
        active = rows
    first_row, num_rows = core_rows(rows=active)
    if active < rows and first_row == 0:
        fill_rows(dst=out, first=active * heads, stop=rows * heads)
        fill_rows(dst=lse, first=active * heads, stop=rows * heads)
    if num_rows == 0:
        return out, lse
    block_rows = min(GROUPS_AT_ONCE * per_group, num_rows)
    select = one_hot_rows(rows=block_rows, width=width)
    sink_lanes = load_sink(sink=sink, heads=heads, width=width, count=min(per_group, num_rows))
    factor = column_tile()
    nisa.memset(dst=factor, value=scale, engine=nisa.engine.vector)
    negative = column_tile()
    nisa.memset(dst=negative, value=-scale, engine=nisa.engine.vector)
    num_segments = (chunks + SEGMENT - 1) // SEGMENT
    state = {
        "heads": heads,
        "width": width,
        "exact_bias": False,
        "with_lse": True,
        "shared": True,
        "num_segments": num_segments,
    }
    steps = []
    for block in range(0, num_rows, block_rows):
        count = min(block_rows, num_rows - block)
        last = []
        for g in range((count + per_group - 1) // per_group):
            last.append(None)
        for s in range(num_segments):
            for g in range(len(last)):
                step = {
                    "block": block,
                    "block_rows": count,
                    "segment": s,
                    "row": first_row + block + g * per_group,
                    "count": min(per_group, count - g * per_group),
                    "first": s * SEGMENT,
                    "stop": min((s + 1) * SEGMENT, chunks),
                    "v": [],
                    "before": last[g],
                    "scale": factor,
                    "negative": negative,
                }
                last[g] = step
                steps.append(step)
    v_next = load_segment(kv=kv, first=0, stop=steps[0]["stop"])
    for i in range(len(steps) + 2):
        if i >= 2:
            multiply_step(steps=steps, i=i - 2, state=state)
        if i < len(steps):
            step = steps[i]
            if i == 0 or step["segment"] != steps[i - 1]["segment"] or step["block"] != steps[i - 1]["block"]:
                count = step["stop"] - step["first"]
                v = v_next
                k_t = nl.ndarray(shape=(P, count, D_BLOCKS, P), dtype=nl.bfloat16, buffer=nl.sbuf)
                transpose_chunks(k_t=k_t, v=v, first=0, stop=count)
                masks = load_mask(
                    bias=bias,
                    first=first_row + step["block"],
                    count=step["block_rows"],
                    key=step["first"] * P,
                    keys=count * P,
                    has_low=has_weights,
                )
                v_next = None
                for later in steps[i:]:
                    if v_next == None and (later["segment"] != step["segment"] or later["block"] != step["block"]):
                        v_next = load_segment(kv=kv, first=later["first"], stop=later["stop"])
            if step["segment"] == 0:
                step["q_t"] = load_queries(q=q, first=step["row"], count=step["count"], heads=heads, width=width)
            else:
                step["q_t"] = step["before"]["q_t"]
            score_shared(
                step=step,
                v=v,
                k_t=k_t,
                masks=masks,
                select=select,
                row=step["row"] - first_row - step["block"],
                width=width,
            )
        if i >= 1 and i - 1 < len(steps):
            soften_step(steps=steps, i=i - 1, bias=bias, sink=sink_lanes, state=state)
        if i >= 2:
            store_step(steps=steps, i=i - 2, out=out, lse=lse, top=None, state=state)
    return out, lse
