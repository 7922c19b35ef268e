"""The persistent transfer kernel: one launch executes a device's op table.

Protocol
  claim: blocks take batches of `CLAIM` tiles from one counter, in order, and do them in order. A tile waits only for
    tiles of smaller numbers, and the block that holds the smallest unfinished one can always go on: no deadlock,
    whatever the number of blocks.
  counters: every tile of a record with `SIGNAL` raises a counter after its stores are visible on the device; a record
    with `WAIT` starts when its counter has reached `WAIT_COUNT` for this update. Counters are never reset: update e
    waits for e * WAIT_COUNT (modulo 2^32).
  buffers: a block has two tiles of shared memory. A tile is overwritten by the load after next, once its stores have
    been read (`wait_stores(1, read=True)`).
  deadline: a wait that lasts longer sets `state[ERROR]`; then no wait lasts, and what was written is void.

Operands: the table, this launch's numbers and buffer addresses, and the state, which is changed in place. Nothing about
a model or plan is compiled in but the set of conversions. All of it is one warpgroup's code, emitted by `addresses`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir.dialects import arith
from jax.experimental.pallas import mosaic_gpu as plgpu

from shardfly_jax.pallas_kernels import addresses as m
from shardfly_jax.sharding import optable as t
from shardfly_jax.sharding.formats import Cast, Conversion, Divide, Fill, MulAdd, itemsize, np_dtype, number

CLAIMED, ERROR, COUNTERS = range(3)
"""Words of the state."""
N_TILES, CLAIM_BASE, EPOCH, DEADLINE_MS, BASES = range(5)
"""Words of a launch: numbers, then two words of address per buffer."""
BUFFERS = 2
BLOCKS_PER_SM = 6
CLAIM = 4
"""Tiles per claim: claims of one counter are served one after the other."""
LOADS_IN_FLIGHT = 8
"""Vector loads that a thread issues before it stores the first one."""


@functools.lru_cache(maxsize=64)
def make_kernel(conversions: tuple[Conversion, ...], blocks: int) -> Callable[..., jax.Array]:
    """The kernel for plans with these conversions.

    Args:
      conversions: What the `CONVERT` words name.
      blocks: At most as many as run at once.

    Returns:
      `kernel(table, launch, state)`: int32 [records * WORDS], [BASES + 2 * buffers], [COUNTERS + counters]; it changes
      `state` in place and returns int32 [1], 0 if all went well.
    """

    def body(table, launch, state, out, tile, barriers, shared):  # type: ignore[no-untyped-def]
        refs = (table, launch, state, out, tile, barriers, shared)

        @plgpu.inline_mgpu(arg_types=tuple(plgpu.RefType() for _ in refs))
        def run(_, *memrefs):  # type: ignore[no-untyped-def]
            _Block(conversions, *memrefs).run()

        run(*refs)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((1,), jnp.int32),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((BUFFERS * t.ROWS_TILE_NBYTES // 4,), jnp.int32),
            plgpu.SMEM((2 * BUFFERS,), jnp.int32),
            plgpu.SMEM((4,), jnp.int32),
        ],
    )


class _Block:
    """Emits the code of one block."""

    def __init__(self, conversions, table, launch, state, out, tile, barriers, shared):  # type: ignore[no-untyped-def]
        self.conversions = conversions
        self.table, self.launch, self.state, self.out = (m.address(ref) for ref in (table, launch, state, out))
        self.tile, self.barriers, self.shared = (m.shared_address(r) for r in (tile, barriers, shared))
        self.thread = m.thread()
        self.n_tiles, self.claim_base, self.epoch, self.deadline = (m.load_word(self.launch, k) for k in range(BASES))
        self.bases = arith.addi(self.launch, m.const64(4 * BASES))
        self.error_at = arith.addi(self.state, m.const64(4 * ERROR))

    def run(self) -> None:
        m.init_barriers(self.barriers, BUFFERS)
        zero = m.const32(0)

        def has_batch(record, uses):  # type: ignore[no-untyped-def]
            first = arith.muli(arith.subi(self.claim(), self.claim_base), m.const32(CLAIM))
            return m.less(first, self.n_tiles), [record, uses, first]

        def do_batch(record, uses, first):  # type: ignore[no-untyped-def]
            stop = arith.minui(arith.addi(first, m.const32(CLAIM)), self.n_tiles)

            def has_tile(record, uses, number):  # type: ignore[no-untyped-def]
                return m.less(number, stop), [record, uses, number]

            def do_tile(record, uses, number):  # type: ignore[no-untyped-def]
                record = self.seek(record, number)
                at = arith.addi(self.table, m.times(record, m.const64(4 * t.WORDS)))
                return [record, self.do_tile(at, number, uses), arith.addi(number, m.const32(1))]

            return m.while_loop([record, uses, first], has_tile, do_tile)[:2]

        m.while_loop([zero, zero], has_batch, do_batch, [m.i32()])
        with m.when(m.less(self.thread, m.const32(32))):
            m.wait_stores(0, read=False)
        with m.when(m.equal(self.thread, zero)):
            m.store_element(self.out, [m.load32(self.error_at)], 4)

    def claim(self):  # type: ignore[no-untyped-def]
        """The number of the next batch, counted from the first launch."""
        with m.when(m.equal(self.thread, m.const32(0))):
            number = m.atomic_add(arith.addi(self.state, m.const64(4 * CLAIMED)), m.const32(1))
            m.ptx("st.shared.u32 [$0], $1;", "r,r", self.shared, number)
        m.barrier()
        number = m.ptx32("ld.shared.u32 $0, [$1];", "=r,r", self.shared)
        m.barrier()
        return number

    def seek(self, record, number):  # type: ignore[no-untyped-def]
        def condition(record):  # type: ignore[no-untyped-def]
            at = arith.addi(self.table, m.times(record, m.const64(4 * t.WORDS)))
            return arith.cmpi(arith.CmpIPredicate.ule, m.load_word(at, t.END_TILE), number), [record]

        return m.while_loop([record], condition, lambda record: [arith.addi(record, m.const32(1))])[0]

    def do_tile(self, at, number, uses):  # type: ignore[no-untyped-def]
        word = functools.partial(m.load_word, at)
        n = [word(t.EXTENT + d) for d in range(t.DIMS)]
        rest = arith.subi(number, word(t.FIRST_TILE))
        index = [None] * t.DIMS
        for d, extent in ((4, word(t.TILES_4)), (3, word(t.TILES_3)), (2, n[2]), (1, n[1])):
            index[d], rest = arith.remui(rest, extent), arith.divui(rest, extent)
        index[0] = rest
        tile = {3: word(t.TILE_3), 4: word(t.TILE_4)}
        count = {}
        for d in (3, 4):
            index[d] = arith.muli(index[d], tile[d])
            count[d] = arith.minui(tile[d], arith.subi(n[d], index[d]))
        read = [m.load_pair(at, t.SOURCE_STRIDE + 2 * d) for d in range(t.DIMS)]
        write = [m.load_pair(at, t.TARGET_STRIDE + 2 * d) for d in range(t.DIMS)]
        steps = [m.times(i, stride) for i, stride in zip(index, read, strict=True)]
        source = m.add(self.base(word(t.SOURCE)), m.load_pair(at, t.SOURCE_OFFSET), *steps)
        steps = [m.times(i, stride) for i, stride in zip(index, write, strict=True)]
        target = m.add(self.base(word(t.TARGET)), m.load_pair(at, t.TARGET_OFFSET), *steps)
        wait, signal = word(t.WAIT), word(t.SIGNAL)
        none = m.const32(-1)
        with m.when(arith.cmpi(arith.CmpIPredicate.ne, wait, none)):
            self.wait(wait, word(t.WAIT_COUNT))
        is_rows = m.equal(word(t.KIND), m.const32(t.ROWS))
        signals = arith.cmpi(arith.CmpIPredicate.ne, signal, none)
        signal_at = arith.addi(self.state, m.const64(4 * COUNTERS))
        signal_at = arith.addi(signal_at, m.times(signal, m.const64(4)))
        with m.when(arith.andi(is_rows, m.less(self.thread, m.const32(32)))):
            self.rows(source, target, count, read[3], write[3], uses, signals, signal_at)
        not_rows = arith.cmpi(arith.CmpIPredicate.ne, word(t.KIND), m.const32(t.ROWS))
        with m.when(not_rows):
            self.elements(word(t.CONVERT), source, target, count, read, write)
            with m.when(signals):
                m.ptx("fence.acq_rel.gpu;", "")
                m.barrier()
                with m.when(m.equal(self.thread, m.const32(0))):
                    m.raise_counter(signal_at)
        return arith.select(is_rows, arith.addi(uses, m.const32(1)), uses)

    def base(self, index):  # type: ignore[no-untyped-def]
        index = arith.maxsi(index, m.const32(0))  # a fill reads nothing
        return m.load_pair(arith.addi(self.bases, m.times(index, m.const64(8))), 0)

    def wait(self, counter, count):  # type: ignore[no-untyped-def]
        at = arith.addi(self.state, m.const64(4 * COUNTERS))
        at = arith.addi(at, m.times(counter, m.const64(4)))
        wanted = arith.muli(count, self.epoch)
        start = m.clock_ns()
        limit = m.times(self.deadline, m.const64(1_000_000))

        def condition(zero):  # type: ignore[no-untyped-def]
            missing = arith.subi(wanted, m.read_counter(at))
            late = arith.cmpi(arith.CmpIPredicate.ugt, arith.subi(m.clock_ns(), start), limit)
            with m.when(late):
                m.store_element(self.error_at, [m.const32(1)], 4)
            not_yet = arith.cmpi(arith.CmpIPredicate.sgt, missing, m.const32(0))
            return m.all_of(not_yet, m.equal(m.load32(self.error_at), m.const32(0))), [zero]

        m.while_loop([m.const32(0)], condition, lambda zero: [zero])
        m.fence_async()

    def rows(self, source, target, count, read, write, uses, signals, signal_at):  # type: ignore[no-untyped-def]
        """One warp moves `count[3]` rows of `count[4]` bytes through one buffer."""
        slot = arith.remui(uses, m.const32(BUFFERS))
        parity = arith.remui(arith.divui(uses, m.const32(BUFFERS)), m.const32(2))
        buffer = arith.addi(self.tile, arith.muli(slot, m.const32(t.ROWS_TILE_NBYTES)))
        barrier = arith.addi(self.barriers, arith.muli(slot, m.const32(8)))
        m.wait_stores(BUFFERS - 1, read=True)
        m.sync_warp()
        with m.when(m.equal(self.thread, m.const32(0))):
            m.expect_bytes(barrier, arith.muli(count[3], count[4]))
        m.sync_warp()

        def load(row):  # type: ignore[no-untyped-def]
            shared = arith.addi(buffer, arith.muli(row, count[4]))
            m.bulk_load(shared, arith.addi(source, m.times(row, read)), count[4], barrier)

        def store(row):  # type: ignore[no-untyped-def]
            shared = arith.addi(buffer, arith.muli(row, count[4]))
            m.bulk_store(arith.addi(target, m.times(row, write)), shared, count[4])

        m.for_range(self.thread, count[3], m.const32(32), load)
        m.wait_barrier(barrier, parity)
        m.for_range(self.thread, count[3], m.const32(32), store)
        m.commit_stores()
        with m.when(signals):
            m.wait_stores(0, read=False)
            m.fence_async()
            m.sync_warp()
            with m.when(m.equal(self.thread, m.const32(0))):
                m.raise_counter(signal_at)

    def elements(self, convert, source, target, count, read, write):  # type: ignore[no-untyped-def]
        for index, conversion in enumerate(self.conversions):
            with m.when(m.equal(convert, m.const32(index))):
                self.convert(conversion, source, target, count, read, write)

    def convert(self, conversion, source, target, count, read, write):  # type: ignore[no-untyped-def]
        """All threads move the elements of a tile, 16 bytes of source at a time where a unit stride allows it."""
        width, out_width = itemsize(conversion.source), itemsize(conversion.target)
        fills = bool(conversion.steps) and isinstance(conversion.steps[0], Fill)
        per_load = 16 // width if width < 8 and not fills else 1
        zero = m.const32(0)

        def at(base, i3, i4, strides):  # type: ignore[no-untyped-def]
            return m.add(base, m.times(i3, strides[3]), m.times(i4, strides[4]))

        def single(first3, first4, rows, columns):  # type: ignore[no-untyped-def]
            """One element at a time, for `rows` x `columns` of them."""

            def body(k):  # type: ignore[no-untyped-def]
                i3 = arith.divui(k, columns)
                i3, i4 = arith.addi(first3, i3), arith.addi(first4, arith.subi(k, arith.muli(i3, columns)))
                value = [] if fills else m.load_element(at(source, i3, i4, read), width)
                m.store_element(at(target, i3, i4, write), _emit(conversion, value), out_width)

            m.for_range(self.thread, arith.muli(rows, columns), m.const32(m.THREADS), body)

        if per_load == 1:
            single(zero, zero, count[3], count[4])
            return
        per = m.const32(per_load)
        along3 = m.all_of(m.equal(read[3], m.const64(width)), m.is_multiple(16, source, read[4]))
        out_bytes = min(per_load * out_width, 16)
        along4 = m.all_of(
            m.equal(read[4], m.const64(width)),
            m.equal(write[4], m.const64(out_width)),
            m.is_multiple(16, source, read[3]),
            m.is_multiple(out_bytes, target, write[3]),
        )
        groups3 = arith.select(along3, arith.divui(count[3], per), zero)
        groups4 = arith.select(along4, arith.divui(count[4], per), zero)
        groups3 = arith.select(along4, zero, groups3)

        def load3(k, columns):  # type: ignore[no-untyped-def]
            group, i4 = _split(k, columns)
            i3 = arith.muli(group, per)
            return m.load_words(at(source, i3, i4, read)), at(target, i3, i4, write)

        def store3(words, to):  # type: ignore[no-untyped-def]
            for element in m.unpack(words, width):
                m.store_element(to, _emit(conversion, [element]), out_width)
                to = arith.addi(to, write[3])

        def load4(k, columns):  # type: ignore[no-untyped-def]
            i3, group = _split(k, columns)
            i4 = arith.muli(group, per)
            return m.load_words(at(source, i3, i4, read)), at(target, i3, i4, write)

        def store4(words, to):  # type: ignore[no-untyped-def]
            out = [_emit(conversion, [element])[0] for element in m.unpack(words, width)]
            m.store_words(to, m.pack(out, out_width))

        def vectors(total, columns, load, store):  # type: ignore[no-untyped-def]
            """Loads of several items are under way before the first is stored."""
            last = arith.subi(total, m.const32(1))

            def body(k):  # type: ignore[no-untyped-def]
                items = [arith.addi(k, m.const32(u * m.THREADS)) for u in range(LOADS_IN_FLIGHT)]
                loaded = [load(arith.minui(item, last), columns) for item in items]
                for item, (words, to) in zip(items, loaded, strict=True):
                    with m.when(m.less(item, total)):
                        store(words, to)

            m.for_range(self.thread, total, m.const32(m.THREADS * LOADS_IN_FLIGHT), body)

        vectors(arith.muli(groups3, count[4]), count[4], load3, store3)
        vectors(arith.muli(groups4, count[3]), groups4, load4, store4)
        done3, done4 = arith.muli(groups3, per), arith.muli(groups4, per)
        left3 = arith.subi(count[3], done3)
        single(done3, done4, left3, arith.subi(count[4], done4))


def _split(k, columns):  # type: ignore[no-untyped-def]
    """Row and column of the k-th item."""
    row = arith.divui(k, columns)
    return row, arith.subi(k, arith.muli(row, columns))


def _emit(conversion, value):  # type: ignore[no-untyped-def]
    """The converted words of one element; the meaning is `Conversion.apply`'s."""
    dtype = conversion.source
    for step in conversion.steps:
        match step:
            case Fill(constant, dtype):
                bits = np.asarray(number(constant)).astype(np_dtype(dtype)).reshape(1).view(np.uint8)
                padded = np.concatenate([bits, np.zeros(-len(bits) % 4, np.uint8)]).view(np.uint32)
                value = [m.const32(int(word)) for word in padded]
            case Cast(target):
                value, dtype = [_narrow(_wide(value[0], dtype), target)], target
            case MulAdd(factor, addend):
                x = _flush(_arithmetic("mul", _flush(_wide(value[0], dtype)), factor))
                if addend:
                    x = _flush(_arithmetic("add", x, addend))
                value = [_narrow(x, dtype)]
            case Divide(divisor):
                x = _arithmetic("div", _flush(_wide(value[0], dtype)), divisor)
                value = [_narrow(_flush(x), dtype)]
    return value


def _arithmetic(op: str, bits, constant: float):  # type: ignore[no-untyped-def]
    """One correctly rounded float32 operation with a constant, on bits."""
    text = f"0f{int(np.float32(constant).view(np.uint32)):08X}"
    return m.ptx32(f"{{ .reg .f32 x; mov.b32 x, $1; {op}.rn.f32 x, x, {text}; mov.b32 $0, x; }}", "=r,r", bits)


def _flush(bits):  # type: ignore[no-untyped-def]
    """Float32 bits with subnormals replaced by zero of their sign."""
    exponent = arith.andi(bits, m.const32(0x7F800000))
    return arith.select(m.equal(exponent, m.const32(0)), arith.andi(bits, m.const32(0x80000000)), bits)


def _wide(bits, dtype: str):  # type: ignore[no-untyped-def]
    """Bits of a float as bits of the same float32."""
    if dtype == "bfloat16":
        return arith.shli(bits, m.const32(16))
    if dtype == "float16":
        text = "{ .reg .b16 h; .reg .f32 x; cvt.u16.u32 h, $1; cvt.f32.f16 x, h; mov.b32 $0, x; }"
        return m.ptx32(text, "=r,r", bits)
    return bits


def _narrow(bits, dtype: str):  # type: ignore[no-untyped-def]
    """Float32 bits rounded to a dtype, to nearest even."""
    if dtype == "bfloat16":
        odd = arith.andi(arith.shrui(bits, m.const32(16)), m.const32(1))
        rounded = arith.shrui(m.add(bits, m.const32(0x7FFF), odd), m.const32(16))
        sign = arith.andi(arith.shrui(bits, m.const32(16)), m.const32(0x8000))
        is_nan = m.less(m.const32(0x7F800000), arith.andi(bits, m.const32(0x7FFFFFFF)))
        return arith.select(is_nan, arith.ori(sign, m.const32(0x7FC0)), rounded)
    if dtype == "float16":
        text = "{ .reg .b16 h; .reg .f32 x; mov.b32 x, $1; cvt.rn.f16.f32 h, x; cvt.u32.u16 $0, h; }"
        return m.ptx32(text, "=r,r", bits)
    return bits
