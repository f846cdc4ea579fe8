"""A worker's ring, from its layout alone (proto/ring.h, step_wire.h): steps in, completions out. One thread, and an
x86 or other machine that keeps stores in order; enough for tests."""
import ctypes
import os
import select
import struct
from dataclasses import dataclass

from support.attach_wire import Error

PAGE_BYTES, RECORD_BYTES, PAYLOAD_ALIGNMENT = 4096, 64, 64
STEP, FENCE = 1, 3
ACCEPTED, REFUSED, DONE, FAILED = 1, 2, 3, 4
STORE, LOAD, COPY_BLOCKS, ZERO_BLOCKS = 1, 2, 9, 10
WAITS, SIGNALS = 128, 256
STEP_MAGIC, STEP_VERSION, NO_ARRAY = 0x7073766B, 3, 0xFFFFFFFF


def _round_up(value, multiple):
    return (value + multiple - 1) // multiple * multiple


@dataclass
class Completion:
    kind: int
    tag: int
    payload: bytes

    @property
    def error(self):
        return Error.from_buffer_copy(self.payload)


class Lane:
    """Where one lane's words, records and arena lie."""

    def __init__(self, memory, shared, records, record_count, arena, arena_bytes):
        self.memory, self.shared = memory, shared
        self.records, self.record_count = records, record_count
        self.arena, self.arena_bytes = arena, arena_bytes
        self.position = self.arena_position = 0

    def _word(self, offset):
        """In the memory itself: one load or store of 8 bytes, where struct, told a byte order, would make eight."""
        return ctypes.c_uint64.from_buffer(self.memory, self.shared + offset)

    def word(self, offset):
        return self._word(offset).value

    def set_word(self, offset, value):
        self._word(offset).value = value


PRODUCED, ARENA_CONSUMED, CONSUMED, SLEEPING = 0, 64, 72, 128


class Ring:
    """The worker's ends of both lanes of a Shared."""

    def __init__(self, shared):
        self.shared = shared
        memory = shared.ring_map
        commands, completions, command_arena, completion_arena = struct.unpack_from("<IIQQ", memory, 8)
        at = PAGE_BYTES + _round_up(commands * RECORD_BYTES, PAGE_BYTES)
        arena = at + _round_up(completions * RECORD_BYTES, PAGE_BYTES)
        self.commands = Lane(memory, 64, PAGE_BYTES, commands, arena, command_arena)
        self.completions = Lane(memory, 64 + 192, at, completions, arena + command_arena, completion_arena)
        self.seen = []

    def post(self, kind, tag, payload=b""):
        lane = self.commands
        begin = lane.arena_position
        if begin % lane.arena_bytes + len(payload) > lane.arena_bytes:
            begin = _round_up(begin, lane.arena_bytes)
        assert lane.position - lane.word(CONSUMED) < lane.record_count, "the lane is full"
        assert not payload or begin + len(payload) - lane.word(ARENA_CONSUMED) <= lane.arena_bytes, "the arena is full"
        place = lane.arena + begin % lane.arena_bytes
        lane.memory[place:place + len(payload)] = payload
        self.post_record(struct.pack("<QQIIQ", lane.position + 1, tag, kind, len(payload), begin))
        lane.arena_position = begin + _round_up(len(payload), PAYLOAD_ALIGNMENT)

    def post_record(self, record):
        """Whatever it says."""
        lane = self.commands
        place = lane.records + lane.position % lane.record_count * RECORD_BYTES
        lane.memory[place:place + RECORD_BYTES] = record.ljust(RECORD_BYTES, b"\0")
        lane.position += 1
        lane.set_word(PRODUCED, lane.position)
        self.wake()

    def wake(self):
        os.write(self.shared.command_event, struct.pack("<Q", 1))

    def take(self):
        """The next completion, None when there is none now."""
        lane = self.completions
        if lane.word(PRODUCED) == lane.position:
            return None
        place = lane.records + lane.position % lane.record_count * RECORD_BYTES
        sequence, tag, kind, count, begin = struct.unpack_from("<QQIIQ", lane.memory, place)
        assert sequence == lane.position + 1
        at = lane.arena + begin % lane.arena_bytes
        payload = bytes(lane.memory[at:at + count])
        lane.position += 1
        lane.arena_position = begin + _round_up(count, PAYLOAD_ALIGNMENT)
        lane.set_word(ARENA_CONSUMED, lane.arena_position)
        lane.set_word(CONSUMED, lane.position)
        return Completion(kind, tag, payload)

    def wait(self, tag, kinds=(DONE, REFUSED, FAILED), seconds=60):
        """The completion of that tag that is one of `kinds`; others are kept in `seen`."""
        while True:
            completion = self.take()
            if completion is None:
                self.sleep(seconds)
                continue
            self.seen.append(completion)
            if completion.tag == tag and completion.kind in kinds:
                return completion

    def sleep(self, seconds):
        lane = self.completions
        struct.pack_into("<I", lane.memory, lane.shared + SLEEPING, 1)
        if lane.word(PRODUCED) == lane.position:
            ready, _, _ = select.select([self.shared.completion_event], [], [], seconds)
            assert ready, "no completion came"
            assert os.read(self.shared.completion_event, 8), "nobody posts completions any more"
        struct.pack_into("<I", lane.memory, lane.shared + SLEEPING, 0)


def zero_blocks(pool_id, blocks, epoch, wait=None, signal=None, deadline_ns=0):
    """A step of one op. wait, signal: (word, value)."""
    return _step(ZERO_BLOCKS, pool_id, blocks, epoch, bytes(48), wait, signal, deadline_ns)


def store(pool_id, slots, epoch, buffer_id, row_bytes, wait=None, signal=None, deadline_ns=0):
    """Rows from the begin of a buffer into region 0, layer 0."""
    view = struct.pack("<QQQQIIQ", buffer_id, 0, len(slots), row_bytes, row_bytes, 1, 0)
    return _step(STORE, pool_id, slots, epoch, view, wait, signal, deadline_ns)


def _step(kind, pool_id, elements, epoch, source, wait, signal, deadline_ns):
    data = struct.pack(f"<{len(elements)}i", *elements)
    offset = _round_up(64 + 320 + 40, 8)
    total = offset + _round_up(len(data), 8)
    flags = (WAITS if wait else 0) | (SIGNALS if signal else 0)
    step = struct.pack("<8I4Q", STEP_MAGIC, STEP_VERSION, 1, 1, total, 0, 0, 0, epoch, 0, deadline_ns, 0)
    op = struct.pack("<IIQII4I", kind, flags, pool_id, 0, 0, 0, NO_ARRAY, NO_ARRAY, NO_ARRAY)
    op += source + bytes(48 + 16 + 96 + 16 + 24)
    for point in (wait, signal):
        op += struct.pack("<IIQ", *((point[0], 0, point[1]) if point else (0, 0, 0)))
    assert len(op) == 320
    array = struct.pack("<QQQQQ", 0, offset, len(data), 0, 0)
    return (step + op + array + data).ljust(total, b"\0")


assert ctypes.sizeof(Error) == 440
