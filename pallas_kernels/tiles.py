"""How a worker moves one tile: the code of each kind of record (`sharding.records`).

To local memory everything goes through registers: at most `LOADS_IN_FLIGHT` vector loads of 16 bytes per thread before
the first store, and stores of whole 256-byte rows. A transpose passes through shared memory, where each thread puts
a small block that it has transposed in registers, or single elements where widths are odd. To another device, rows go
by bulk stores from shared memory: links are fastest so.

Shared memory holds one tile, rows of `TRANSPOSE_ROW_NBYTES` for transposes. Their 16-byte pieces are swizzled
(exclusive or of piece and row group) where threads read them again, so that no two threads of a quarter warp meet in a
bank; bulk stores take rows as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from shardfly_jax.pallas_kernels import addresses as m
from shardfly_jax.pallas_kernels.conversions import convert, convert_packed, fills
from shardfly_jax.pallas_kernels.emit import Int, const, for_range, when
from shardfly_jax.sharding import records as r
from shardfly_jax.sharding.formats import NOT_FINITE, Conversion, ToScale, itemsize

LOADS_IN_FLIGHT = 16
"""Vector loads that a thread issues before it stores what the first one brought."""
ELEMENTS_IN_FLIGHT, TRANSPOSED_IN_FLIGHT = 16, 32
WARP = 32
SWIZZLED_ROWS = r.TRANSPOSE_ROW_NBYTES // 4
"""Rows of a tile that is transposed by elements until their swizzles repeat: words of one."""
PIECES = r.TRANSPOSE_ROW_NBYTES // r.PIECE_NBYTES
"""Pieces of a row of a transposed tile."""
WORDS_CONVERSION = Conversion("uint32", (), "uint32")
"""What a `ROWS` record does to its pieces of 16 bytes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What one tile reads, in registers.

    Attributes:
      thread: Of the warpgroup, 0 to 127.
      shared: Address of `TILE_NBYTES` of shared memory.
      barrier: Address of an mbarrier, for bulk loads.
      source: Address of its first element.
      rows, columns: Extents of dimensions 3 and 4, in the record's units.
      read: Strides of dimensions 3 and 4, bytes, 64 bits.
      first: Indices of its first element in dimensions 3 and 4.
      outer: Which of the indices of dimensions 0 to 2, counted with dimension 2 fastest.
    """

    thread: Int
    shared: Int
    barrier: Int
    source: Int
    rows: Int
    columns: Int
    read: tuple[Int, Int]
    first: tuple[Int, Int]
    outer: Int

    def read_at(self, row: Int, column: Int) -> Int:
        """Source address of an element."""
        return self.source + row * self.read[0] + column * self.read[1]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tile goes, in registers.

    Attributes:
      target: Address of its first element.
      write: Strides of dimensions 3 and 4, bytes, 64 bits.
      remote: Whether that is in another device's memory.
    """

    target: Int
    write: tuple[Int, Int]
    remote: Int

    def write_at(self, row: Int, column: Int) -> Int:
        """Target address of an element."""
        return self.target + row * self.write[0] + column * self.write[1]


def claim_shared() -> None:
    """Waits until shared memory may be overwritten: bulk stores have read it, and so has every thread."""
    m.wait_stores(read=True)
    m.barrier()


def copy_rows_to_peer(tile: Tile, place: Place, parity: Int) -> None:
    """A `ROWS` tile for another device: bulk loads, then bulk stores.

    Args:
      parity: Of the uses of the barrier so far.
    """
    m.fence_async()  # bulk loads overwrite what ordinary stores wrote
    claim_shared()
    nbytes = tile.columns * r.PIECE_NBYTES
    with when(tile.thread == 0):
        m.expect_bytes(tile.barrier, tile.rows * nbytes)
    m.barrier()

    def load(row: Int) -> None:
        m.bulk_load(tile.shared + row * nbytes, tile.source + row * tile.read[0], nbytes, tile.barrier)

    for_range(tile.thread, tile.rows, m.THREADS, load)
    m.wait_barrier(tile.barrier, parity)
    store_rows(tile, place, nbytes, nbytes)


def straight(tile: Tile, place: Place, conversion: Conversion) -> None:
    """A `ROWS` or `CAST` tile: dimension 4 counts groups of whole pieces on both sides."""
    reads, writes = r.pieces(conversion)
    group_nbytes = const(writes * r.PIECE_NBYTES)

    def move(store: Callable[[Int, Int, Int, list[Int]], None]) -> None:
        total = tile.rows * tile.columns
        each = LOADS_IN_FLIGHT // reads

        def body(first: Int) -> None:
            items = [first + u * m.THREADS for u in range(each)]
            loaded = []
            for item in items:
                row, column = split(item.at_most(total - 1), tile.columns)
                at = tile.read_at(row, column)
                loaded.append([word for k in range(reads) for word in m.load_vector(at + r.PIECE_NBYTES * k)])
            for item, words in zip(items, loaded, strict=True):
                with when(item < total):
                    row, column = split(item, tile.columns)
                    elements = m.unpack(words, itemsize(conversion.source))
                    store(item, row, column, convert_packed(conversion, elements))

        for_range(tile.thread, total, m.THREADS * each, body)

    def to_global(item: Int, row: Int, column: Int, words: list[Int]) -> None:
        at = place.write_at(row, column)
        for k in range(writes):
            m.store_vector(at + r.PIECE_NBYTES * k, words[4 * k : 4 * k + 4])

    def to_shared(item: Int, row: Int, column: Int, words: list[Int]) -> None:
        at = tile.shared + item * group_nbytes
        for k in range(writes):
            m.store_shared_vector(at + r.PIECE_NBYTES * k, words[4 * k : 4 * k + 4])

    with when(place.remote == 0):
        move(to_global)
    with when(place.remote != 0):
        claim_shared()
        move(to_shared)
        m.fence_async()
        m.barrier()
        nbytes = tile.columns * group_nbytes
        store_rows(tile, place, nbytes, nbytes)


def transpose(tile: Tile, where: Callable[[], Place], conversion: Conversion) -> None:
    """A `TRANSPOSE` tile: rows (dimension 3) lie contiguous in the source, columns (dimension 4) in the target.

    A thread's block has as many rows as a piece of the source has elements, and as many columns as a piece of the
    target: each load is a piece of the source, each row of the block one of the target.

    Args:
      where: Computes where it goes: called when the first loads are under way.
    """
    source_width, target_width = itemsize(conversion.source), itemsize(conversion.target)
    block_rows, block_columns = r.PIECE_NBYTES // source_width, r.PIECE_NBYTES // target_width
    lanes = r.TRANSPOSE_ROWS // block_rows  # neighbouring threads read neighbouring pieces
    blocks = lanes * PIECES // m.THREADS
    batch = min(blocks, LOADS_IN_FLIGHT // block_columns)
    row_blocks, column_blocks = tile.rows // block_rows, tile.columns // block_columns
    for start in range(0, blocks, batch):
        loaded = []
        for number in range(start, start + batch):
            item = tile.thread + number * m.THREADS
            lane, piece = item % lanes, item // lanes
            inside = (lane < row_blocks) & (piece < column_blocks)
            lane_in, piece_in = lane.at_most(row_blocks - 1), piece.at_most(column_blocks - 1)
            at = tile.source + lane_in.wide() * r.PIECE_NBYTES + (piece_in * block_columns) * tile.read[1]
            vectors = []
            for _ in range(block_columns):
                vectors.append(m.load_vector(at))
                at = at + tile.read[1]
            loaded.append((inside, lane, piece, vectors))
        if start == 0:
            place = where()
            swizzle = (place.remote != 0).where(const(0), 7)
            claim_shared()
        for inside, lane, piece, vectors in loaded:
            to = tile.shared + lane * (block_rows * r.TRANSPOSE_ROW_NBYTES)
            to = to + (piece ^ (lane & swizzle)) * r.PIECE_NBYTES
            with when(inside):
                for row, words in enumerate(_transposed(conversion, vectors)):
                    m.store_shared_vector(to + row * r.TRANSPOSE_ROW_NBYTES, words)
    row_nbytes = column_blocks * r.PIECE_NBYTES
    with when(place.remote != 0):
        m.fence_async()
        m.barrier()
        store_rows(tile, place, row_nbytes, const(r.TRANSPOSE_ROW_NBYTES))
    with when(place.remote == 0):
        m.barrier()
        piece, first = tile.thread % PIECES, tile.thread // PIECES

        def store(row: Int) -> None:
            physical = piece ^ ((row // block_rows) & 7)
            words = m.load_shared_vector(tile.shared + row * r.TRANSPOSE_ROW_NBYTES + physical * r.PIECE_NBYTES)
            m.store_vector(place.target + row * place.write[0] + piece.wide() * r.PIECE_NBYTES, words)

        with when(piece < column_blocks):
            for_range(first, tile.rows, m.THREADS // PIECES, store)


def _transposed(conversion: Conversion, vectors: Sequence[Sequence[Int]]) -> list[list[Int]]:
    """The rows of a block from its columns, converted: four words each."""
    width = itemsize(conversion.source)
    if conversion.is_bits and width == 2:  # pairs of columns at once
        return [
            [m.permute_bytes(vectors[j][word], vectors[j + 1][word], selector) for j in range(0, 8, 2)]
            for word in range(4)
            for selector in (0x5410, 0x7632)
        ]
    if conversion.is_bits and width == 1:  # four by four bytes at once
        rows: list[list[Int]] = [[] for _ in range(16)]
        for j in range(0, 16, 4):
            for word in range(4):
                a, b, c, d = (vectors[j + k][word] for k in range(4))
                for half, selector in enumerate((0x5140, 0x7362)):
                    ab, cd = m.permute_bytes(a, b, selector), m.permute_bytes(c, d, selector)
                    rows[4 * word + 2 * half].append(m.permute_bytes(ab, cd, 0x5410))
                    rows[4 * word + 2 * half + 1].append(m.permute_bytes(ab, cd, 0x7632))
        return rows
    columns = [m.unpack(words, width) for words in vectors]
    return [convert_packed(conversion, [column[row] for column in columns]) for row in range(len(columns[0]))]


def transpose_elements(tile: Tile, where: Callable[[], Place], conversion: Conversion) -> None:
    """A `TRANSPOSE_ELEMENTS` tile: a warp reads neighbours along dimension 3, and stores neighbours along dimension 4.

    A thread reads one row of the tile, and keeps it in a row of shared memory whose words are swizzled by its number.

    Args:
      where: Computes where it goes: called when the tile is in shared memory.
    """
    read, write = itemsize(conversion.source), itemsize(conversion.target)
    most, last = r.TRANSPOSE_ROW_NBYTES // write, tile.columns - 1
    first = tile.read_at(tile.thread.at_most(tile.rows - 1), const(0))

    def shared_at(row: Int, column: Int) -> Int:
        return tile.shared + row * r.TRANSPOSE_ROW_NBYTES + ((column * write) ^ (row % SWIZZLED_ROWS * 4))

    def bring(start: Int) -> None:
        columns = [(start + k).at_most(last) for k in range(TRANSPOSED_IN_FLIGHT)]
        loaded = [m.load_element(first + column * tile.read[1], read) for column in columns]
        for column, words in zip(columns, loaded, strict=True):
            m.store_shared_element(shared_at(tile.thread, column), convert(conversion, words)[0], write)

    claim_shared()
    for_range(const(0), tile.columns, TRANSPOSED_IN_FLIGHT, bring)
    m.barrier()
    place, lane = where(), tile.thread % WARP

    def leave(row: Int) -> None:
        columns = [lane + k for k in range(0, most, WARP)]
        words = [m.load_shared_element(shared_at(row, column.at_most(last)), write) for column in columns]
        for column, word in zip(columns, words, strict=True):
            with when(column < tile.columns):
                m.store_element(place.write_at(row, column), [word], write)

    for_range(tile.thread // WARP, tile.rows, m.THREADS // WARP, leave)


def elements(tile: Tile, place: Place, conversion: Conversion, refuse: Callable[[Int], None]) -> None:
    """An `ELEMENTS` tile: an element at a time, straight to its target.

    Args:
      refuse: Notes, where its argument holds, that the maximum of a block is not finite.
    """
    makes_scales = any(isinstance(step, ToScale) for step in conversion.steps)

    def move(row: Int, column: Int, words: list[Int]) -> None:
        if makes_scales and not fills(conversion):
            refuse(words[0] > NOT_FINITE - 1)
        m.store_element(place.write_at(row, column), convert(conversion, words), itemsize(conversion.target))

    each_element(tile, conversion, move)


def each_element(tile: Tile, conversion: Conversion, do: Callable[[Int, Int, list[Int]], None]) -> None:
    """Calls `do` for every element of a tile: with its row, its column and its words, none for a fill."""
    width, total = itemsize(conversion.source), tile.rows * tile.columns
    rows_on, columns_on = split(const(m.THREADS), tile.columns)  # from an element of a thread to its next one

    def following(row: Int, column: Int) -> tuple[Int, Int]:
        """Without a division, which takes longer than to move an element."""
        column = column + columns_on
        ends = column > tile.columns - 1
        return row + rows_on + ends.where(const(1), 0), column - ends.where(tile.columns, 0)

    def body(first: Int) -> None:
        places = [split(first, tile.columns)]
        while len(places) < ELEMENTS_IN_FLIGHT:
            places.append(following(*places[-1]))
        loaded = []
        for row, column in places:
            at = tile.read_at(row.at_most(tile.rows - 1), column)
            loaded.append([] if fills(conversion) else m.load_element(at, width))
        for (row, column), words in zip(places, loaded, strict=True):
            with when(row < tile.rows):
                do(row, column, words)

    for_range(tile.thread, total, m.THREADS * ELEMENTS_IN_FLIGHT, body)


def store_rows(tile: Tile, place: Place, nbytes: Int, pitch: Int) -> None:
    """Bulk stores of a tile's rows, `nbytes` each, from shared memory, where `pitch` bytes lie between them."""

    def store(row: Int) -> None:
        m.bulk_store(place.target + row * place.write[0], tile.shared + row * pitch, nbytes)

    for_range(tile.thread, tile.rows, m.THREADS, store)
    m.commit_stores()


def split(k: Int, columns: Int) -> tuple[Int, Int]:
    """Row and column of the k-th item."""
    row = k // columns
    return row, k - row * columns
