"""What a record says, as emitted code: what one of its tiles reads, where it goes, and the code of its kind.

The meaning of the words is `sharding.records`' and `sharding.quantized_records`'. They are read where they are needed:
registers are short.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from shardfly_jax.pallas_kernels import addresses as m, tiles
from shardfly_jax.pallas_kernels.blocks import Side, encode_elements, quantize_blocks, reduce_elements
from shardfly_jax.pallas_kernels.conversions import fills
from shardfly_jax.pallas_kernels.emit import Int, const, if_else, when
from shardfly_jax.pallas_kernels.packing import encode_pairs, maxima, pack_blocks, packs, packs_blocks
from shardfly_jax.sharding import records as r
from shardfly_jax.sharding.formats import Conversion
from shardfly_jax.sharding.quantized_ops import quantizes, quantizes_elements


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record, in global memory.

    Attributes:
      at: Its address.
      base: Gives the address of a buffer by its index.
      refuse: Notes, where its argument holds, that the record met values that are not finite.
    """

    at: Int
    base: Callable[[Int], Int]
    refuse: Callable[[Int], None]

    def word(self, number: int) -> Int:
        """One of its words."""
        return m.load_word(self.at, number)

    def pair(self, number: int) -> Int:
        """Two of its words, as 64 bits."""
        return m.load_pair(self.at, number)

    def tile(self, number: Int, *, thread: Int, shared: Int, barrier: Int) -> tiles.Tile:
        """What the tile of a number reads; the rest as for `tiles.Tile`."""
        word, pair = self.word, self.pair
        rest = number - word(r.FIRST_TILE)
        first, count = [], []
        for tiles_of, size, extent in ((r.TILES_4, r.TILE_4, 4), (r.TILES_3, r.TILE_3, 3)):
            n = word(tiles_of)
            start = rest % n * word(size)
            first.append(start)
            count.append(word(size).at_most(word(r.EXTENT + extent) - start))
            rest = rest // n
        (column, row), (columns, rows) = first, count
        read = pair(r.SOURCE_STRIDE + 2 * 3), pair(r.SOURCE_STRIDE + 2 * 4)
        source = self.base(word(r.SOURCE).at_least(0)) + pair(r.SOURCE_OFFSET)  # a fill reads nothing
        return tiles.Tile(
            thread=thread,
            shared=shared,
            barrier=barrier,
            source=source + self.outer(rest, r.SOURCE_STRIDE) + row * read[0] + column * read[1],
            rows=rows,
            columns=columns,
            read=read,
            first=(row, column),
            outer=rest,
        )

    def outer(self, outer: Int, strides: int) -> Int:
        """Bytes from the first of its outer indices (`tiles.Tile`) to one of them; mostly there is only one."""

        def bytes_to() -> Int:
            two, one = self.word(r.EXTENT + 2), self.word(r.EXTENT + 1)
            rest = outer // two
            steps = [self.pair(strides + 2 * d) for d in range(3)]
            return outer % two * steps[2] + rest % one * steps[1] + rest // one * steps[0]

        return if_else(outer != 0, bytes_to, lambda: const(0, 64), bits=64)

    def place(self, tile: tiles.Tile, remote: Int) -> tiles.Place:
        """Where a tile goes."""
        write = self.pair(r.TARGET_STRIDE + 2 * 3), self.pair(r.TARGET_STRIDE + 2 * 4)
        # what is only reduced writes nothing
        target = self.base(self.word(r.TARGET).at_least(0)) + self.pair(r.TARGET_OFFSET)
        target = target + self.outer(tile.outer, r.TARGET_STRIDE)
        target = target + tile.first[0] * write[0] + tile.first[1] * write[1]
        return tiles.Place(target=target, write=write, remote=remote)

    def side(self, tile: tiles.Tile) -> Side:
        """The side of a tile."""
        word, pair = self.word, self.pair
        sizes = word(r.BLOCK_3), word(r.BLOCK_4)
        steps = pair(r.SIDE_STRIDE + 2 * 3), pair(r.SIDE_STRIDE + 2 * 4)
        at_side = self.base(word(r.SIDE).at_least(0)) + pair(r.SIDE_OFFSET)  # codes alone have no side
        at_side = at_side + self.outer(tile.outer, r.SIDE_STRIDE)
        for first, size, step in zip(tile.first, sizes, steps, strict=True):
            at_side = at_side + first // size * step
        return Side(
            at=at_side,
            steps=steps,
            sizes=sizes,
            starts=(tile.first[0] % sizes[0], tile.first[1] % sizes[1]),
            role=word(r.ROLE),
            refuse=self.refuse,
        )

    def move(
        self, tile: tiles.Tile, conversions: Sequence[Conversion], kind: Int, convert: Int, remote: Int, parity: Int
    ) -> None:
        """Moves a tile, by the code of its kind and conversion.

        Args:
          tile: The tile.
          conversions: What `CONVERT` words name.
          kind, convert, remote: The words, read before.
          parity: As for `tiles.copy_rows_to_peer`.
        """
        where = functools.partial(self.place, tile, remote)
        with when((kind == r.ROWS) & (remote == 0)):
            tiles.straight(tile, where(), tiles.WORDS_CONVERSION)
        with when((kind == r.ROWS) & (remote != 0)):
            tiles.copy_rows_to_peer(tile, where(), parity)
        for index, conversion in enumerate(conversions):
            with when((kind != r.ROWS) & (convert == index)):
                if quantizes_elements(conversion):
                    self.quantize(tile, kind, where, conversion)
                    continue
                if not (conversion.is_bits or fills(conversion) or quantizes(conversion)):
                    with when(kind == r.CAST):
                        tiles.straight(tile, where(), conversion)
                if not (fills(conversion) or quantizes(conversion)):
                    with when(kind == r.TRANSPOSE):
                        tiles.transpose(tile, where, conversion)
                    if r.transposes_elements(conversion):
                        with when(kind == r.TRANSPOSE_ELEMENTS):
                            tiles.transpose_elements(tile, where, conversion)
                with when(kind == r.ELEMENTS):
                    tiles.elements(tile, where(), conversion, self.refuse)

    def quantize(self, tile: tiles.Tile, kind: Int, where: Callable[[], tiles.Place], conversion: Conversion) -> None:
        """Moves a tile whose elements are reduced or encoded."""
        side = functools.partial(self.side, tile)
        if not fills(conversion):
            for of, turned in ((r.BLOCK_ROWS, False), (r.BLOCK_TRANSPOSE, True)):
                with when(kind == of):
                    quantize_blocks(tile, where, side, maxima(conversion), turned)
        with when(kind == r.REDUCE_ELEMENTS):
            reduce_elements(tile, side(), conversion)
        if conversion.encodes is not None:
            with when(kind == r.ENCODE_ELEMENTS):
                if packs(conversion):
                    encode_pairs(tile, where(), side(), self.within()[0], conversion)
                else:
                    encode_elements(tile, where(), side(), conversion)
        if packs_blocks(conversion):
            with when(kind == r.PACKED_BLOCKS):
                pack_blocks(tile, where(), side(), self.within(), conversion)

    def within(self) -> tuple[Int, Int]:
        """Source strides of dimensions 0 and 1, which lie within blocks where codes share bytes."""
        return self.pair(r.SOURCE_STRIDE), self.pair(r.SOURCE_STRIDE + 2)
