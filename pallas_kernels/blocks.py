"""How a worker quantizes one tile: the code of each kind of record in `sharding.quantized_records`.

A tile of blocks is read once, 16 vector loads of every thread in flight, and kept in registers; only elements of four
bytes, of which a tile has twice as many bytes, are read a second time. A thread holds eight *strips*: 16 neighbours
along dimension 4 that share a block, and become 16 bytes of codes. Shared memory holds the codes, rows of 128 bytes
that leave as a transpose's do, and a word for each block: its maximum, then what its values are multiplied with.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

from shardfly_jax.pallas_kernels import addresses as m, scales
from shardfly_jax.pallas_kernels.emit import Int, const, for_range, if_else, when
from shardfly_jax.pallas_kernels.quantizing import (
    code,
    codes,
    format_of,
    largest,
    largest_of,
    shows_subnormals,
    values_of,
)
from shardfly_jax.pallas_kernels.tiles import (
    LOADS_IN_FLIGHT,
    Place,
    Tile,
    claim_shared,
    each_element,
    split,
    store_rows,
)
from shardfly_jax.sharding import quantized_records as q, records as r
from shardfly_jax.sharding.formats import NOT_FINITE, Conversion, itemsize
from shardfly_jax.sharding.quantization import Format

ROW_NBYTES = q.TILE
"""Of a tile of codes, a byte each."""
PIECES = ROW_NBYTES // r.PIECE_NBYTES
STRIPS = q.TILE * PIECES // m.THREADS
"""Of each thread."""
Strip = list[Int]
"""The words of `STRIP` elements."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The slots or scales of a tile's blocks, in registers.

    Attributes:
      at: Address of the first one.
      steps: Bytes from block to block along dimensions 3 and 4, 64 bits.
      sizes: Elements of a block along both.
      starts: Where in its first block the tile begins.
      role: Bits of `quantized_records`.
      refuse: Notes, where its argument holds, that a block is not finite.
    """

    at: Int
    steps: tuple[Int, Int]
    sizes: tuple[Int, Int]
    starts: tuple[Int, Int]
    role: Int
    refuse: Callable[[Int], None]

    def has(self, role: int) -> Int:
        """Whether some bit of the role is set."""
        return (self.role & role) != 0

    def word_at(self, row: Int, column: Int) -> Int:
        """Address of a block's word, counted from the tile's first one."""
        return self.at + row * self.steps[0] + column * self.steps[1]


def quantize_blocks(
    tile: Tile, where: Callable[[], Place], side: Callable[[], Side], conversion: Conversion, turned: bool
) -> None:
    """A `BLOCK_ROWS` or `BLOCK_TRANSPOSE` tile.

    Args:
      tile: What is read.
      where, side: Compute where it goes: called after the loads, as registers are short until then.
      conversion: Of its record.
      turned: Whether dimension 3 is contiguous in the source, instead of dimension 4.
    """
    load = Loads(tile, conversion, turned)
    first = load.strips(0)
    claim_shared()
    BlockTile(load, where(), side(), conversion).run(first)


class Loads:
    """Emits the loads of a tile of blocks.

    Args:
      tile, conversion, turned: As for `quantize_blocks`.
    """

    def __init__(self, tile: Tile, conversion: Conversion, turned: bool):
        self.tile, self.turned, self.width = tile, turned, itemsize(conversion.source)
        self.per_piece = r.PIECE_NBYTES // self.width
        self.batches = self.width // 2
        self.n_strips = STRIPS // self.batches

    def places(self, batch: int) -> tuple[list[Int], Int]:
        """The rows of a batch's strips, and their piece, both perhaps outside the tile."""
        if self.turned:
            lanes = q.TILE // self.per_piece  # neighbouring threads read neighbouring pieces
            item = self.tile.thread + batch * m.THREADS
            first = item % lanes * self.per_piece
            return [first + k for k in range(self.n_strips)], item // lanes
        first = self.tile.thread // PIECES + batch * self.n_strips * (m.THREADS // PIECES)
        return [first + k * (m.THREADS // PIECES) for k in range(self.n_strips)], self.tile.thread % PIECES

    def inside(self, row: Int, piece: Int) -> Int:
        """Whether a strip lies in the tile."""
        return (row < self.tile.rows) & (piece * q.STRIP < self.tile.columns)

    def strips(self, batch: int) -> list[Strip]:
        """The strips of a batch; those outside the tile hold anything."""
        rows, piece = self.places(batch)
        column = (piece * q.STRIP).at_most(self.tile.columns - q.STRIP)
        vectors = []
        if self.turned:
            at = self.tile.read_at(rows[0].at_most(self.tile.rows - self.per_piece), column)
            for _ in range(LOADS_IN_FLIGHT):
                vectors.append(m.load_vector(at))
                at = at + self.tile.read[1]
            return self.transposed(vectors)
        for row in rows:
            at = self.tile.read_at(row.at_most(self.tile.rows - 1), column)
            vectors += [m.load_vector(at + k * r.PIECE_NBYTES) for k in range(self.width)]
        words = [word for vector in vectors for word in vector]
        return [words[k : k + 4 * self.width] for k in range(0, len(words), 4 * self.width)]

    def transposed(self, vectors: list[list[Int]]) -> list[Strip]:
        """Strips from the pieces of 16 columns."""
        if self.width == 4:
            return [[vector[row] for vector in vectors] for row in range(4)]
        return [
            [m.permute_bytes(vectors[k][word], vectors[k + 1][word], selector) for k in range(0, len(vectors), 2)]
            for word in range(4)
            for selector in (0x5410, 0x7632)
        ]


class BlockTile:
    """Emits what is done with the strips of a tile of blocks.

    Args:
      load: Its loads.
      place, side: Where codes, and maxima or scales, go.
      conversion: Of its record.
    """

    def __init__(self, load: Loads, place: Place, side: Side, conversion: Conversion):
        self.load, self.tile, self.place, self.side = load, load.tile, place, side
        self.values, self.format, self.encodes = values_of(conversion), format_of(conversion), conversion.encodes
        self.words = self.tile.shared + q.TILE * ROW_NBYTES
        self.across = (side.starts[1] + self.tile.columns - 1) // side.sizes[1] + 1
        self.count = ((side.starts[0] + self.tile.rows - 1) // side.sizes[0] + 1) * self.across
        self.is_one = self.count == 1

    def run(self, first: list[Strip]) -> None:
        """The whole tile.

        Args:
          first: Strips of the first batch.
        """
        if self.format is None:
            self.run_blocks(first)
            return
        alone = self.is_one & (self.side.has(q.READS_AMAX | q.RAISES_AMAX) == 0)
        with when(alone):
            self.run_one(self.format, first)
        with when(alone == 0):
            self.run_blocks(first)

    def run_one(self, format: Format, first: list[Strip]) -> None:
        """A tile that is one whole block: every thread computes the factor from the maxima of the four warps."""
        tops = []
        for rows, piece, strips in self.batches(first):
            tops += [
                self.load.inside(row, piece).where(largest(self.values, strip), 0)
                for row, strip in zip(rows, strips, strict=True)
            ]
        top = m.max_of_warp(functools.reduce(Int.at_least, tops))
        with when(self.tile.thread % 32 == 0):
            m.store_shared(self.words + self.tile.thread // 32 * 4, top)
        m.barrier()
        amax = functools.reduce(Int.at_least, m.load_shared_vector(self.words))
        with when(self.tile.thread == 0):
            self.side.refuse(amax > NOT_FINITE - 1)
            with when(self.side.has(q.STORES_SCALES)):
                m.store_element(self.side.at, [scales.scale(format, amax)], itemsize(format.scale_dtype))
        if self.encodes is not None:
            with when(self.side.has(q.WRITES_CODES)):
                factor = scales.factor(self.encodes, amax)
                shows = shows_subnormals(self.encodes, factor)
                for flushes in (False, True):
                    with when(shows == int(flushes)):
                        for rows, piece, strips in self.batches(first):
                            for row, strip in zip(rows, strips, strict=True):
                                with when(self.load.inside(row, piece)):
                                    self.put(row, piece, codes(self.values, self.encodes, strip, factor, flushes))
                self.leave()

    def run_blocks(self, first: list[Strip]) -> None:
        """A tile of several blocks, or one whose maxima are in slots."""
        with when(self.side.has(q.READS_AMAX) == 0):
            self.find_maxima(first)
        with when(self.side.has(q.READS_AMAX)):
            self.each_block(lambda word, at: m.store_shared(word, m.load32(at)))
        self.each_block(self.settle)
        if self.encodes is not None:
            with when(self.side.has(q.WRITES_CODES)):
                m.barrier()
                self.encode(self.encodes, first)
                self.leave()

    def batches(self, first: list[Strip]) -> Iterator[tuple[list[Int], Int, list[Strip]]]:
        """Rows, piece and strips of each batch; the loads of all but the first one are emitted here."""
        for batch in range(self.load.batches):
            yield *self.load.places(batch), first if batch == 0 else self.load.strips(batch)

    def words_of(self, rows: list[Int], piece: Int) -> list[Int]:
        """Shared-memory addresses of the words of some strips' blocks."""
        start, size = self.side.starts, self.side.sizes
        column = if_else(self.is_one, lambda: const(0), lambda: (start[1] + piece * q.STRIP) // size[1])

        def below(row: Int) -> Int:
            def divided() -> Int:
                return if_else(self.is_one, lambda: const(0), lambda: (start[0] + row) // size[0])

            return if_else(size[0] == 1, lambda: row, divided)

        return [self.words + (below(row) * self.across + column) * 4 for row in rows]

    def find_maxima(self, first: list[Strip]) -> None:
        """Puts the maxima of the tile's blocks into shared memory."""
        for_range(self.tile.thread, self.count, m.THREADS, lambda k: m.store_shared(self.words + k * 4, const(0)))
        m.barrier()
        for rows, piece, strips in self.batches(first):
            inside = [self.load.inside(row, piece) for row in rows]
            found = [yes.where(largest(self.values, strip), 0) for yes, strip in zip(inside, strips, strict=True)]
            with when(self.is_one):
                top = m.max_of_warp(functools.reduce(Int.at_least, found))
                with when(self.tile.thread % 32 == 0):
                    m.max_shared(self.words, top)
            with when(self.is_one == 0):
                for at, yes, one in zip(self.words_of(rows, piece), inside, found, strict=True):
                    with when(yes):
                        m.max_shared(at, one)
        m.barrier()

    def each_block(self, do: Callable[[Int, Int], None]) -> None:
        """Deals the tile's blocks out to threads, always alike.

        Args:
          do: Gets the address of a block's word in shared memory, and of its word at the side.
        """

        def body(number: Int) -> None:
            do(self.words + number * 4, self.side.word_at(*split(number, self.across)))

        for_range(self.tile.thread, self.count, m.THREADS, body)

    def settle(self, word: Int, at: Int) -> None:
        """Does what is to be done with the maximum of one block."""
        side, amax = self.side, m.load_shared(word)
        with when(side.has(q.RAISES_AMAX)):
            m.raise_word(at, amax)
        if self.format is None:
            return
        with when(side.has(q.RAISES_AMAX) == 0):
            side.refuse(amax > NOT_FINITE - 1)
            with when(side.has(q.STORES_SCALES)):
                m.store_element(at, [scales.scale(self.format, amax)], itemsize(self.format.scale_dtype))
            if self.encodes is not None:
                m.store_shared(word, scales.factor(self.format, amax))

    def encode(self, format: Format, first: list[Strip]) -> None:
        """Encodes all strips, with the factors of their blocks."""
        for rows, piece, strips in self.batches(first):
            for row, word, strip in zip(rows, self.words_of(rows, piece), strips, strict=True):
                with when(self.load.inside(row, piece)):
                    factor = m.load_shared(word)
                    shows = shows_subnormals(format, factor)
                    for flushes in (False, True):
                        with when(shows == int(flushes)):
                            self.put(row, piece, codes(self.values, format, strip, factor, flushes))

    def put(self, row: Int, piece: Int, words: list[Int]) -> None:
        """Puts the codes of a strip of the tile into shared memory."""
        swizzle = (self.place.remote != 0).where(const(0), PIECES - 1)
        column = piece ^ (row // self.load.per_piece & swizzle)
        m.store_shared_vector(self.tile.shared + row * ROW_NBYTES + column * r.PIECE_NBYTES, words)

    def leave(self) -> None:
        """Stores the rows of codes."""
        tile, place = self.tile, self.place
        with when(place.remote != 0):
            m.fence_async()
            m.barrier()
            store_rows(tile, place, tile.columns, const(ROW_NBYTES))
        with when(place.remote == 0):
            m.barrier()
            piece, start = tile.thread % PIECES, tile.thread // PIECES

            def store(row: Int) -> None:
                physical = piece ^ (row // self.load.per_piece & (PIECES - 1))
                words = m.load_shared_vector(tile.shared + row * ROW_NBYTES + physical * r.PIECE_NBYTES)
                m.store_vector(place.target + row * place.write[0] + piece.wide() * r.PIECE_NBYTES, words)

            with when(piece * q.STRIP < tile.columns):
                for_range(start, tile.rows, m.THREADS // PIECES, store)


def reduce_elements(tile: Tile, side: Side, conversion: Conversion) -> None:
    """A `REDUCE_ELEMENTS` tile: an element at a time."""
    values = values_of(conversion)

    def reduce(row: Int, column: Int, element: list[Int]) -> None:
        m.raise_word(side.word_at(row, column), largest_of(values, element))

    each_element(tile, conversion, reduce)


def encode_elements(tile: Tile, place: Place, side: Side, conversion: Conversion) -> None:
    """An `ENCODE_ELEMENTS` tile: an element at a time, with the maximum of its block from a slot."""
    values, format = values_of(conversion), conversion.encodes
    assert format is not None

    def encode(row: Int, column: Int, element: list[Int]) -> None:
        amax = m.load32(side.word_at(row, column))
        side.refuse(amax > NOT_FINITE - 1)
        m.store_element(place.write_at(row, column), [code(values, format, element, scales.factor(format, amax))], 1)

    each_element(tile, conversion, encode)
