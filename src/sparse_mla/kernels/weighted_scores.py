# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call, type-arg, index, union-attr, assignment"
"""NKI kernels of index scores: out[t, k] = sum over heads of relu(q[t, h] . key[k]) * w[h, t].

One body for keys that arrive as bfloat16 rows and for keys decoded on chip from index pages. A *section* is s
consecutive keys in one partition, a *tile* 128 sections, so one gather of 128 page sections brings 128 s keys. Chunk c
of a tile is key c of each section; its scores come out as [128 sections, tokens], which is what lets a row of the
result be stored in runs of s without a reordering pass.

Per block of at most 8 chunks (1024 keys), four stages follow one another, each one block behind the other, so that no
engine's next work waits for what another has just begun:

    score(b-1)    q^T K^T in [token x head, keys], relu                                 Tensor, Scalar
    load(b)       decode to K [128 sections, chunk, 128 d], K^T by transposes          Vector, Tensor, Scalar
    weigh(b-2)    relu^T W in [section, token], fp32, one matmul per chunk              Tensor
    store(b-3)    into the tile's result; after its last block to HBM                  Scalar

The second product takes the relu'd scores as the stationary side: moving W has as few columns as there are tokens, so
fp32 costs a quarter of what it would the other way round, and the result needs no evacuation of 512 columns per token.
Scale factors of the keys live in PSUM: a Vector instruction with one operand there runs at one element a cycle instead
of two cycles an element.

Sections whose index is -1 are not read; what stands in their places is what the buffer held. A key that is garbage
spoils its own column only, which the caller masks.
"""

from __future__ import annotations

from .decode_records import (
    E2M1_RAISE,
    E4M3_RAISE,
    bit_field,
    decode_e4m3_native,
    e4m3_fields,
    join_fields,
    join_finite,
    scale_factors_ue8m0,
    word_kind,
)
from .nki import nisa, nki, nl

P = 128  # partitions
D = 128  # dimension of index keys
GROUPS = 4  # scale factors per key
BLOCK = 8  # chunks in flight together: 1024 keys, one PSUM bank of K^T
BANK = 512  # float32 columns of one PSUM bank
BANK_CHUNKS = 4  # chunks whose scores fill a bank
ROW_SECTION = 16  # keys per section of bf16 rows: 4 KiB runs
DEPTH = 3  # tiles whose gathers may be in flight


def core_share(items):
    """[first, stop) of this core's part of `items` work items."""
    cores = 1
    core = 0
    if nl.program_ndim() > 0:
        cores = nl.num_programs(axes=0)
        core = nl.program_id(axis=0)
    share = (items + cores - 1) // cores
    first = min(core * share, items)
    return first, min(first + share, items)


def code_factor(kind):
    """What decoded codes must be multiplied by; a power of two, moved into the queries, where it is exact and free."""
    if kind == "fp4":
        return 2.0**E2M1_RAISE
    if kind == "fp8_integer":
        return 2.0**E4M3_RAISE
    return 1.0


def load_tokens(q, w, group, tokens, heads, pack, raise_by):
    """(raise_by q^T [128 d, packs, 128 lanes] bf16, W [128 lanes, packs, pack] fp32 block-diagonal) of a group."""
    packs = (tokens + pack - 1) // pack
    q_t = nl.ndarray(shape=(P, packs, P), dtype=nl.bfloat16, buffer=nl.sbuf)
    for i in range(packs):
        lanes = min(pack, tokens - i * pack) * heads
        first = (group * tokens + i * pack) * heads
        rows = nl.ndarray(shape=(P, D), dtype=nl.bfloat16, buffer=nl.sbuf)
        nisa.dma_copy(dst=rows[0:lanes, :], src=q[first : first + lanes, :])
        psum = nl.ndarray(shape=(P, P), dtype=nl.bfloat16, buffer=nl.psum)
        nisa.nc_transpose(dst=psum[:, 0:lanes], data=rows[0:lanes, :], engine=nisa.engine.tensor)
        nisa.activation(dst=q_t[:, i, 0:lanes], op=nl.copy, data=psum[:, 0:lanes], scale=raise_by)
    weights = nl.ndarray(shape=(P, packs, pack), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=weights, value=0.0, engine=nisa.engine.vector)
    total = w.shape[1]
    for j in range(min(pack, tokens)):
        count = (tokens - j + pack - 1) // pack
        nisa.dma_copy(
            dst=weights[j * heads : (j + 1) * heads, 0:count, j],
            src=w.ap(pattern=[[total, heads], [pack, count]], offset=group * tokens + j),
        )
    return q_t, weights


def gather_sections(dst, pool, column):
    """dst [128, bytes] = the bytes of the pool that begin at unit column[p]; a unit of -1 is skipped."""
    nisa.dma_copy(
        dst=dst,
        src=pool.ap(pattern=[[pool.shape[1], P], [1, dst.shape[1]]], vector_offset=column, indirect_dim=0),
        oob_mode=nisa.oob_mode.skip,
    )


def apply_factors(dst, codes, factors, parity):
    """Every second element of dst [128, chunks, 128] from `parity` on = codes [128, chunks, 64] * their factors."""
    length = D // 2 // GROUPS
    nisa.tensor_tensor(
        dst=dst.reshape_dim(2, (GROUPS, length, 2))[:, :, :, :, parity],
        data1=codes.reshape_dim(2, (GROUPS, length)),
        data2=factors.expand_dim(3).broadcast(3, length),
        op=nl.multiply,
        engine=nisa.engine.vector,
    )


def decode_e2m1(dst, data, factors, lanes):
    """dst [128, chunks, 128] bf16 of packed e2m1 bytes [128, chunks, 64], times 2^-E2M1_RAISE.

    The byte (n & 7) << 2 | (n & 8) << 4 viewed as float8_e4m3 is value / 64 for all 16 codes. Neighbouring instructions
    are independent: blocks are so short that a dependent one would wait for its operand longer than it computes."""
    chunks = dst.shape[1]
    half = D // 2
    codes = nl.ndarray(shape=(P, 2, chunks, half), dtype=nl.uint8, buffer=nl.sbuf)
    kind, repeat = word_kind(lanes=lanes, byte_pairs=False)
    words = data.view(kind)
    shape = (P, chunks, words.shape[2])
    low = bit_field(words=words, kind=kind, shape=shape, shift=2, mask=0x07 * repeat)
    high = bit_field(words=words, kind=kind, shape=shape, shift=-2, mask=0x1C * repeat)
    low_sign = bit_field(words=words, kind=kind, shape=shape, shift=4, mask=0x08 * repeat)
    high_sign = bit_field(words=words, kind=kind, shape=shape, shift=0, mask=0x80 * repeat)
    join_fields(dst=codes[:, 0, :, :].view(kind), magnitude=low, sign=low_sign)
    join_fields(dst=codes[:, 1, :, :].view(kind), magnitude=high, sign=high_sign)
    for parity in range(2):
        apply_factors(dst=dst, codes=codes[:, parity, :, :].view(nl.float8_e4m3), factors=factors, parity=parity)


def decode_e4m3_finite(dst, data, factors):
    """dst [128, chunks, 128] bf16 of e4m3 bytes, times 2^-E4M3_RAISE; every code, NaN gives 0."""
    chunks = dst.shape[1]
    kind, repeat = word_kind(lanes=32, byte_pairs=True)
    words = data.view(kind)
    shape = (P, chunks, words.shape[2])
    for parity in range(2):
        magnitude, sign = e4m3_fields(words=words, kind=kind, shape=shape, repeat=repeat, parity=parity)
        codes = nl.ndarray(shape=shape, dtype=kind, buffer=nl.sbuf)
        join_finite(dst=codes, magnitude=magnitude, sign=sign)
        apply_factors(dst=dst, codes=codes.view(nl.float16), factors=factors, parity=parity)


def tile_factors(scales, keys):
    """[128, keys, 4] fp32 in PSUM: the scale factors 2^(e - 127) of a tile; byte 255 gives 0, and so does byte 0."""
    factors = scale_factors_ue8m0(raw=scales, chunks=keys, groups=GROUPS, raise_by=0)
    psum = nl.ndarray(shape=(P, keys, GROUPS), dtype=nl.float32, buffer=nl.psum)
    nisa.activation(dst=psum, op=nl.copy, data=factors)
    return psum


def transpose_block(keys, first, chunks):
    """K^T [128 d, chunks, 128 keys] bf16 of chunks first .. of keys [128, s, 128]."""
    psum = nl.ndarray(shape=(P, BLOCK, P), dtype=nl.bfloat16, buffer=nl.psum)
    for c in range(chunks):
        nisa.nc_transpose(dst=psum[:, c, :], data=keys[:, first + c, :], engine=nisa.engine.tensor)
    k_t = nl.ndarray(shape=(P, BLOCK, P), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.activation(dst=k_t[:, 0:chunks, :], op=nl.copy, data=psum[:, 0:chunks, :])
    return k_t


def score_pack(k_t, chunks, q_t, lanes):
    """relu(q . k) [lanes, chunks, 128] fp32 of one pack of tokens."""
    psum = nl.ndarray(shape=(P, BLOCK, P), dtype=nl.float32, buffer=nl.psum)
    for c in range(0, chunks, BANK_CHUNKS):
        stop = min(c + BANK_CHUNKS, chunks)
        nisa.nc_matmul(dst=psum[0:lanes, c:stop, :], stationary=q_t, moving=k_t[:, c:stop, :])
    terms = nl.ndarray(shape=(P, BLOCK, P), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=terms[0:lanes, 0:chunks, :], op=nl.relu, data=psum[0:lanes, 0:chunks, :])
    return terms


def weigh_pack(terms, chunks, weights, lanes, count):
    """[128 sections, chunks, count] fp32 in PSUM = terms^T W, a list of tiles of at most a bank each."""
    step = max(1, min(chunks, BANK // count))
    tiles = []
    for start in range(0, chunks, step):
        stop = min(start + step, chunks)
        psum = nl.ndarray(shape=(P, stop - start, count), dtype=nl.float32, buffer=nl.psum)
        for c in range(start, stop):
            nisa.nc_matmul(dst=psum[:, c - start, :], stationary=terms[0:lanes, c, :], moving=weights)
        tiles.append(psum)
    return tiles


def score(q, w, source, kind, groups, n, sizes, lanes):
    """The body of both kernels. `sizes`: keys per section of each tile of a group; `source`: dict of tensors."""
    total = w.shape[1]
    heads = w.shape[0]
    tokens = total // groups
    out = nl.ndarray(shape=(total, n), dtype=nl.float32, buffer=nl.shared_hbm, name="scores")
    tiles = len(sizes)
    first_item, stop_item = core_share(items=groups * tiles)
    if first_item == stop_item:
        return out
    pack = max(1, min(tokens, P // heads))
    packs = (tokens + pack - 1) // pack

    data_columns = None
    scale_columns = None
    buffers = []
    if kind != "rows":
        width = stop_item - first_item
        data_columns = nl.ndarray(shape=(P, width), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=data_columns, src=source["idx"][:, first_item:stop_item])
        scale_columns = nl.ndarray(shape=(P, width), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=scale_columns, src=source["scale_idx"][:, first_item:stop_item])
        key_bytes = D // 2 if kind == "fp4" else D
        for i in range(min(DEPTH, width)):
            raw = nl.ndarray(shape=(P, sizes[0], key_bytes), dtype=nl.uint8, buffer=nl.sbuf)
            scales = nl.ndarray(shape=(P, sizes[0], GROUPS), dtype=nl.uint8, buffer=nl.sbuf)
            # Gathers skip empty sections, so the buffers must hold something.
            nisa.memset(dst=raw.view(nl.uint32), value=0, engine=nisa.engine.vector)
            nisa.memset(dst=scales.view(nl.uint32), value=0, engine=nisa.engine.vector)
            buffers.append({"raw": raw, "scales": scales})

    # A block is at most BLOCK chunks of one tile.
    blocks = []
    loaded: dict = {"issued": first_item}
    starts = []
    key = 0
    for size in sizes:
        starts.append(key)
        key = key + size * P
    for item in range(first_item, stop_item):
        size = sizes[item % tiles]
        for c in range(0, size, BLOCK):
            blocks.append({"item": item, "chunk": c, "chunks": min(BLOCK, size - c), "size": size})

    state = {"group": -1, "next_factors": None}
    for step in range(len(blocks) + 3):
        if 1 <= step <= len(blocks):
            score_block(block=blocks[step - 1], packs=packs, tokens=tokens, heads=heads, pack=pack)
        if step < len(blocks):
            block = blocks[step]
            group = block["item"] // tiles
            ahead = min(stop_item, block["item"] + DEPTH)
            while kind != "rows" and loaded["issued"] < ahead:
                item = loaded["issued"]
                column = item - first_item
                slot = buffers[column % len(buffers)]
                gather_sections(
                    dst=slot["raw"].reshape((P, sizes[0] * (D // 2 if kind == "fp4" else D))),
                    pool=source["pool"],
                    column=data_columns[:, column : column + 1],
                )
                gather_sections(
                    dst=slot["scales"].reshape((P, sizes[0] * GROUPS)),
                    pool=source["pool"],
                    column=scale_columns[:, column : column + 1],
                )
                loaded["issued"] = item + 1
            if group != state["group"]:
                q_t, weights = load_tokens(
                    q=q, w=w, group=group, tokens=tokens, heads=heads, pack=pack, raise_by=code_factor(kind=kind)
                )
                state["group"] = group
                state["q_t"] = q_t
                state["weights"] = weights
            block["q_t"] = state["q_t"]
            block["weights"] = state["weights"]
            size = block["size"]
            if block["chunk"] == 0:
                state["results"] = []
                for i in range(packs):
                    state["results"].append(nl.ndarray(shape=(P, pack, size), dtype=nl.float32, buffer=nl.sbuf))
                if kind != "rows":
                    slot = buffers[(block["item"] - first_item) % len(buffers)]
                    state["raw"] = slot["raw"]
                    state["factors"] = state["next_factors"]
                    if block["item"] == first_item:
                        state["factors"] = tile_factors(scales=slot["scales"], keys=size)
            block["results"] = state["results"]
            load_block(block=block, source=source, kind=kind, n=n, starts=starts, tiles=tiles, state=state, lanes=lanes)
            if kind != "rows" and block["chunk"] == 0 and block["item"] + 1 < stop_item:
                # A tile ahead, so that no decoding waits for its factors.
                slot = buffers[(block["item"] + 1 - first_item) % len(buffers)]
                state["next_factors"] = tile_factors(scales=slot["scales"], keys=sizes[0])
        if 2 <= step <= len(blocks) + 1:
            weigh_block(block=blocks[step - 2], tokens=tokens, heads=heads, pack=pack)
        if step >= 3:
            store_block(block=blocks[step - 3], out=out, n=n, starts=starts, tiles=tiles, tokens=tokens, pack=pack)
    return out


def load_block(block, source, kind, n, starts, tiles, state, lanes):
    """K^T of one block."""
    size = block["size"]
    chunk = block["chunk"]
    chunks = block["chunks"]
    keys = nl.ndarray(shape=(P, BLOCK, D), dtype=nl.bfloat16, buffer=nl.sbuf)
    dst = keys[:, 0:chunks, :]
    if kind == "rows":
        first = (block["item"] // tiles) * n + starts[block["item"] % tiles]
        nisa.dma_copy(
            dst=dst,
            src=source["k"].ap(pattern=[[size * D, P], [D, chunks], [1, D]], offset=(first + chunk) * D),
        )
    elif kind == "fp4":
        decode_e2m1(
            dst=dst,
            data=state["raw"][:, chunk : chunk + chunks, :],
            factors=state["factors"][:, chunk : chunk + chunks, :],
            lanes=lanes,
        )
    elif kind == "fp8_native":
        decode_e4m3_native(
            dst=dst,
            data=state["raw"][:, chunk : chunk + chunks, :],
            factors=state["factors"][:, chunk : chunk + chunks, :],
            groups=GROUPS,
            engine=nisa.engine.vector,
        )
    else:
        decode_e4m3_finite(
            dst=dst,
            data=state["raw"][:, chunk : chunk + chunks, :],
            factors=state["factors"][:, chunk : chunk + chunks, :],
        )
    block["k_t"] = transpose_block(keys=keys, first=0, chunks=chunks)


def score_block(block, packs, tokens, heads, pack):
    """The relu'd scores of every pack of one block."""
    block["terms"] = []
    for i in range(packs):
        lanes = min(pack, tokens - i * pack) * heads
        block["terms"].append(
            score_pack(k_t=block["k_t"], chunks=block["chunks"], q_t=block["q_t"][:, i, 0:lanes], lanes=lanes)
        )
    block["k_t"] = None


def weigh_block(block, tokens, heads, pack):
    """The weighted sums of one block, left in PSUM."""
    block["sums"] = []
    for i in range(len(block["terms"])):
        count = min(pack, tokens - i * pack)
        block["sums"].append(
            weigh_pack(
                terms=block["terms"][i],
                chunks=block["chunks"],
                weights=block["weights"][0 : count * heads, i, 0:count],
                lanes=count * heads,
                count=count,
            )
        )
    block["terms"] = None


def store_block(block, out, n, starts, tiles, tokens, pack):
    """The sums of one block into its tile's result, and the store after a tile's last block."""
    chunk = block["chunk"]
    chunks = block["chunks"]
    size = block["size"]
    group = block["item"] // tiles
    for i in range(len(block["sums"])):
        count = min(pack, tokens - i * pack)
        result = block["results"][i]
        start = chunk
        for psum in block["sums"][i]:
            nisa.activation(
                dst=result[:, 0:count, start : start + psum.shape[1]], op=nl.copy, data=psum.permute((0, 2, 1))
            )
            start = start + psum.shape[1]
        if chunk + chunks == size:
            row = group * tokens + i * pack
            nisa.dma_copy(
                dst=out.ap(pattern=[[size, P], [n, count], [1, size]], offset=row * n + starts[block["item"] % tiles]),
                src=result[:, 0:count, :],
            )
    block["sums"] = None
    block["results"] = None


@nki.jit
def weighted_scores(q, k, w, groups=1):
    """Scores of bf16 keys.

    Dimensions: t tokens in `groups` equal groups, h <= 128 heads, n keys per group, a multiple of 128.
    Args:
        q: [t * h, 128] bf16, row token * h + head.
        k: [groups * n, 128] bf16; group g's tokens score keys g n .. g n + n.
        w: [h, t] fp32.
    Returns: [t, n] fp32.
    """
    n = k.shape[0] // groups
    sizes = []
    left = n // P
    while left > 0:
        sizes.append(min(left, ROW_SECTION))
        left = left - min(left, ROW_SECTION)
    return score(q=q, w=w, source={"k": k}, kind="rows", groups=groups, n=n, sizes=sizes, lanes=16)


@nki.jit
def page_scores(q, pool, idx, scale_idx, w, groups=1, section=16, kind="fp4", lanes=16):
    """Scores straight from index pages, gathered by sections and decoded on chip.

    Args:
        q, w: as above.
        pool: [units, g] uint8, the whole pool.
        idx, scale_idx: [128, groups * tiles] int32: unit where the data, and where the scale bytes, of a section
            begin; -1: no key of it is wanted. Column g * tiles + i, partition p: section i * 128 + p of group g.
        section: keys per section, consecutive inside a page.
        kind: "fp4" (64 bytes and 4 ue8m0 a key), or "fp8_native" or "fp8_integer" (128 bytes and 4).
        lanes: 16 or 32 bits per bit operation of e2m1.
    Returns: [t, tiles * 128 * section] fp32; columns of keys that were not gathered hold anything.
    """
    tiles = idx.shape[1] // groups
    sizes = []
    for i in range(tiles):
        sizes.append(section)
    source = {"pool": pool, "idx": idx, "scale_idx": scale_idx}
    return score(q=q, w=w, source=source, kind=kind, groups=groups, n=tiles * P * section, sizes=sizes, lanes=lanes)
