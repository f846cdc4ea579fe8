"""The gRPC door: connection, pools, sessions, buffers, queues."""
import ctypes
import json
import types
from ctypes import byref, c_char_p, c_uint8, c_uint64

from ._errors import Error, Status, error_from
from ._given import given, text, whole
from ._int32 import Int32In, Int32Out
from ._library import (COMPLETION_FN, SESSION_EVENT_FN, CallbackHold, ClientHold, ConnectOptions, FallibleHold, Hold,
                       OpReport, Owned, PoolSpec, RegionSpec, SessionOptions, callback, fields_of, is_in_callback,
                       library)
from ._step import BufferArray, LayerRef, Report, Step, ViewRef

PAGED, RING = 0, 1
_SECRET_BYTES = 16


class Client(Owned):
    """A connection. target: the path of kvpoold's socket; None: $KVPOOLD_SOCKET, else /run/kvpoold/kvpoold.sock. It
    reconnects by itself; sessions of a daemon that went are over."""

    def __init__(self, target=None, timeout_ms=0, wait_until_serving=False):
        options = ConnectOptions(ctypes.sizeof(ConnectOptions), timeout_ms, wait_until_serving)
        self._formats = None
        self._make(ClientHold(library.client_destroy), library.client_connect, target, byref(options))

    def close(self):
        """Its sessions end with it. Not from inside a callback."""
        if is_in_callback():
            raise Error(Status.INVALID_ARGUMENT, "a client can't be closed from inside a callback")
        self._give_back()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def info(self):
        """What the daemon says of itself: version, pid, attach_socket, devices, formats."""
        handle = Hold(library.server_info_destroy)
        library.server_info_get(self.handle, byref(handle))
        return {
            "version": library.server_info_version(handle).decode(),
            "pid": library.server_info_pid(handle),
            "attach_socket": library.server_info_attach_socket(handle).decode(),
            "devices": [fields_of(library.server_info_device(handle, i).contents)
                        for i in range(library.server_info_device_count(handle))],
            "formats": [fields_of(library.server_info_format(handle, i).contents)
                        for i in range(library.server_info_format_count(handle))],
        }

    def format(self, name):
        """The entry of info()'s formats, None for one that the daemon hasn't."""
        if self._formats is None:
            self._formats = {found["name"]: found for found in self.info()["formats"]}
        return self._formats.get(name)

    def pool(self, name):
        """An open handle of the pool of this name."""
        return Pool(self, library.pool_open, name)

    def create_pool(self, name, block_size, num_blocks, regions, kind=PAGED, placements=(), namespace=None):
        """An operator's right. regions: dicts of name, format, num_layers, and width, compression_ratio, note.
        namespace: whose sessions alone may have its blocks and map it."""
        specs = (RegionSpec * max(len(regions), 1))()
        for spec, region in zip(specs, regions):
            for key, value in region.items():
                setattr(spec, key, value)
        devices = (c_char_p * max(len(placements), 1))(*(text("placements", device) for device in placements))
        text("name", name)
        spec = PoolSpec(name, kind, block_size, num_blocks, devices, len(placements), specs, len(regions), namespace)
        return Pool(self, library.pool_create, byref(spec))

    def open_session(self, name=None, namespace=None, blocks_max=0, on_event=None):
        """on_event(dict): kind "device_lost" (with pool_id and blocks that may be torn), "device_restored" or "ended"
        (with error), on a thread of the library's."""
        return Session(self, name, namespace, blocks_max, on_event)


class _PoolDescription:
    """What a pool's handle tells; of a Pool, and of a pool that is mapped."""

    def _describe(self, handle):
        self.id = library.pool_id(handle)
        self.name = library.pool_name(handle).decode()
        self.kind = library.pool_get_kind(handle)
        self.block_size = library.pool_block_size(handle)
        self.num_blocks = library.pool_num_blocks(handle)
        self.placements = [library.pool_placement(handle, i).decode()
                           for i in range(library.pool_placement_count(handle))]
        self.regions = [fields_of(library.pool_region(handle, i).contents)
                        for i in range(library.pool_region_count(handle))]

    def region_index(self, region):
        """region: an index, or a name."""
        if not isinstance(region, str):
            return whole("region", region)
        for index, info in enumerate(self.regions):
            if info["name"] == region:
                return index
        raise KeyError(f"pool {self.name!r} has no region {region!r}")

    def _described(self, region):
        """(index, fields)"""
        index = self.region_index(region)
        if not 0 <= index < len(self.regions):
            raise IndexError(f"region {index} of pool {self.name!r}, which has {len(self.regions)}")
        return index, self.regions[index]

    def layer(self, region, layer=0):
        """One layer of a region, for steps."""
        return LayerRef(self, self.region_index(region), layer)


class Pool(Owned, _PoolDescription):
    """A pool as it was when it was asked for. regions: the fields of kvpool_region_info, a dict each."""

    def __init__(self, client, call, *arguments):
        self._client = client
        self._make(Hold(library.pool_destroy), call, client.handle, *arguments)
        self._describe(self.handle)

    @property
    def pool_handle(self):
        return self.handle

    def region(self, region):
        """region: an index, or a name. Its entry of `regions`, by attributes; memory has a pool that is mapped."""
        return types.SimpleNamespace(**self._described(region)[1])

    def refresh(self):
        """Asks again."""
        library.pool_refresh(self.pool_handle)
        self._describe(self.pool_handle)

    @property
    def free_blocks(self):
        """As of the latest refresh."""
        return library.pool_free_blocks(self.pool_handle)

    def delete(self, force=False):
        """An operator's right."""
        library.pool_delete(self.pool_handle, force)


# name in JSON: what it is, as JSON's types are of Python's.
_TICKET_FIELDS = {"socket": ("a string, or null", (str, type(None))), "session_id": ("a whole number", (int,)),
                  "secret": ("a string", (str,)), "device": ("a string, or null", (str, type(None))),
                  "epoch": ("a whole number", (int,))}


class Ticket:
    """What a worker needs to attach to a session. It is a secret: whoever has it acts for the session."""

    def __init__(self, socket, session_id, secret, device=None, epoch=0):
        for name, value in (("socket", socket), ("device", device)):
            given(name, value, c_char_p)
        self.socket, self.device, self.secret = socket, device, bytes(memoryview(secret))
        if len(self.secret) != _SECRET_BYTES:
            raise ValueError(f"a secret has {_SECRET_BYTES} bytes, this one {len(self.secret)}")
        self.session_id, self.epoch = whole("session_id", session_id, c_uint64), whole("epoch", epoch, c_uint64)

    def __repr__(self):
        return f"<kvpool.Ticket session {self.session_id}>"

    def to_json(self):
        """Text for the worker, the secret in it."""
        return json.dumps({"socket": self.socket, "session_id": self.session_id, "secret": self.secret.hex(),
                           "device": self.device, "epoch": self.epoch})

    @classmethod
    def from_json(cls, text):
        """ValueError names what is wrong in it, and shows nothing of it."""
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("the ticket is not JSON") from None
        if not isinstance(fields, dict):
            raise ValueError("the ticket is not an object of JSON's")
        for name, (what, kinds) in _TICKET_FIELDS.items():
            if name not in fields:
                raise ValueError(f"the ticket has no {name!r}")
            if type(fields[name]) not in kinds:
                raise ValueError(f"the ticket's {name!r} is not {what}")
        try:
            secret = bytes.fromhex(fields["secret"])
        except ValueError:
            raise ValueError("the ticket's 'secret' is not hexadecimal") from None
        try:
            return cls(fields["socket"], fields["session_id"], secret, fields["device"], fields["epoch"])
        except (OverflowError, ValueError) as error:
            raise ValueError(f"the ticket's {error}") from None


def _event_of(struct):
    event = {"kind": {1: "device_lost", 2: "device_restored", 3: "ended"}.get(struct.kind, "unknown")}
    if struct.kind in (1, 2):
        event["device"] = struct.device.decode()
    if struct.kind == 1:
        event["pool_id"], event["blocks"] = struct.pool_id, struct.blocks[:struct.block_count]
    if struct.kind == 3:
        event["error"] = error_from(struct.error.contents)
    return event


class Session(Owned):
    """It lives as long as this process holds it."""

    def __init__(self, client, name, namespace, blocks_max, on_event):
        self.client = client
        tell = SESSION_EVENT_FN(0)
        if on_event is not None:
            tell = callback(SESSION_EVENT_FN, lambda event: on_event(_event_of(event)))
        options = SessionOptions(ctypes.sizeof(SessionOptions), name, namespace, blocks_max, tell, None)
        self._make(CallbackHold(library.session_close, tell), library.session_open, client.handle, byref(options))
        self.id = library.session_id(self.handle)

    def close(self):
        """Ends it: blocks are freed, buffers released, workers detached."""
        self._give_back()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    @property
    def epoch(self):
        """Of its latest lease of blocks: workers that attached before are told it (Attachment.saw_epoch)."""
        return library.session_epoch(self.handle)

    def check(self):
        """Raises why it ended, when it has."""
        library.session_state(self.handle)

    def ticket(self, device=None):
        """For a worker to attach to the session on a device; None: the daemon's only one. It has the epoch of now."""
        secret = (c_uint8 * _SECRET_BYTES)()
        library.session_secret(self.handle, secret)
        return Ticket(self.client.info()["attach_socket"], self.id, secret, device, self.epoch)

    def allocate(self, pool, count):
        """Block ids, int32 [count], all or none. Raises kvpool.Error: OUT_OF_BLOCKS, QUOTA_EXCEEDED."""
        out = Int32Out(count)
        library.blocks_allocate(self.handle, pool.pool_handle, count,
                                ctypes.cast(out.address, ctypes.POINTER(ctypes.c_int32)))
        return out.get()

    def allocate_range(self, pool, first, count):
        """Exactly the blocks [first, first + count), for a scheduler with an allocator of its own. Raises kvpool.Error,
        IN_USE, with the first that isn't free."""
        library.blocks_allocate_range(self.handle, pool.pool_handle, first, count)

    def free(self, pool, blocks):
        """blocks: int32 [n]. They return to the pool when every step accepted before is done. All or none: NOT_OWNER
        names the position of one that isn't this session's."""
        freed = Int32In(blocks)
        library.blocks_free(self.handle, pool.pool_handle, freed.address, freed.count)

    def create_buffer(self, count, device=None):
        """Device memory of `count` bytes, written and read over gRPC."""
        return Buffer(self, device, count)

    def step(self):
        """An empty SessionStep."""
        return SessionStep(self)

    def open_queue(self, on_completion, want_accepted=False):
        """on_completion(Completion): on a thread of the library's."""
        return Queue(self, on_completion, want_accepted)

    def store_rows(self, layer, rows, slots):
        """rows: [n, row_bytes of any type], contiguous. slots: int32 [at most n], none twice, -1 skips; rows behind the
        slots are ignored. The Report."""
        data, shape = _bytes_of(rows)
        given_slots, report = Int32In(slots), OpReport()
        library.rows_store(self.handle, byref(layer.struct), data, shape[0], len(data) // max(shape[0], 1),
                           given_slots.address, given_slots.count, byref(report))
        return Report(report)

    def load_rows(self, layer, segments, total_k, row_bytes, scale_bytes=0):
        """(rows, scales, report): bytearrays of total_k * row_bytes and total_k * scale_bytes. segments: int32 [m,
        4], as Step.load's; rows that none covers are zero."""
        self._check_loaded(layer, row_bytes, scale_bytes)
        given_segments, report = Int32In(segments), OpReport()
        total_k = whole("total_k", total_k, c_uint64)
        rows, scales = bytearray(total_k * row_bytes), bytearray(total_k * scale_bytes)
        library.rows_load(self.handle, byref(layer.struct), given_segments.address,
                          given_segments.count // 4, total_k, _address_of(rows),
                          _address_of(scales) if scale_bytes else None, byref(report))
        return rows, scales, Report(report)

    def _check_loaded(self, layer, row_bytes, scale_bytes):
        """The library writes as many bytes as rows of the region's format have. What it refuses is left to it."""
        if not 0 <= layer.region < len(layer.pool.regions):
            return
        region = layer.pool.regions[layer.region]
        found = self.client.format(region["format"])
        if found is None:
            return
        expected = found["loaded_row_bytes"] if found["quantized_elements"] else region["data_bytes"]
        if row_bytes != expected:
            raise ValueError(f"row_bytes is {row_bytes}, rows of region {region['name']!r} have {expected}")
        if scale_bytes != found["loaded_scale_bytes"]:
            raise ValueError(f"scale_bytes is {scale_bytes}, scales of region {region['name']!r} have "
                             f"{found['loaded_scale_bytes']}")


def _bytes_of(data):
    view = memoryview(data)
    return view.tobytes(), view.shape


def _address_of(data):
    return ctypes.addressof((ctypes.c_uint8 * max(len(data), 1)).from_buffer(data)) if len(data) else None


class BufferBase(Owned):
    """Memory of a session's that steps use."""

    def __init__(self, turns, call, *arguments):
        """turns: as a Hold has them."""
        self._make(FallibleHold(library.buffer_release, turns), call, *arguments)
        self.id, self.bytes = library.buffer_id(self.handle), library.buffer_bytes(self.handle)

    def view(self, rows, row_bytes, offset_bytes=0, row_stride_bytes=0):
        """`rows` rows of row_bytes, one every row_stride_bytes (0: without gaps), from offset_bytes on, all inside it.
        row_bytes: what the region's format says, as 2 * elements of BF16. A ViewRef, which keeps the buffer."""
        return ViewRef(self, rows, row_bytes, offset_bytes, row_stride_bytes)

    def int32(self, count, offset_bytes=0):
        """`count` int32 at offset_bytes, as an array of a step that is read and checked when the op runs."""
        return BufferArray(self, count, offset_bytes)

    def release(self):
        """It is gone for this process whatever is raised; its memory goes when the steps that use it are done."""
        if self._is_here():
            hold = self._disown()
            if hold is None:
                raise ValueError(f"this {type(self).__name__} has been given back")
            hold.give_back_or_raise()


class Buffer(BufferBase):
    """A buffer over gRPC."""

    def __init__(self, session, device, count):
        super().__init__(None, library.buffer_create, session.handle, device, count)
        self._session = session

    def write(self, data, offset_bytes=0):
        """data: anything with the buffer protocol. OUT_OF_RANGE: not inside, nothing written."""
        written = memoryview(data).tobytes()
        library.buffer_write(self.handle, offset_bytes, written, len(written))

    def read(self, count=None, offset_bytes=0):
        """A bytearray of count bytes; None: all behind offset_bytes."""
        count = self.bytes - whole("offset_bytes", offset_bytes, c_uint64) if count is None else count
        out = bytearray(whole("count", count, c_uint64))
        library.buffer_read(self.handle, offset_bytes, _address_of(out), len(out))
        return out


class SessionStep(Step):
    def __init__(self, session):
        super().__init__(library.step_new, session.handle)
        self.session = session

    def run(self):
        """Submits, and waits until it is done. A Report of each op."""
        reports = (OpReport * max(self.op_count, 1))()
        library.step_run(self.handle, reports, self.op_count)
        return [Report(report) for report in reports[:self.op_count]]


class Completion:
    """step_id; accepted: only that; error: an Error, or None; reports: of each op, when it is done."""

    def __init__(self, struct):
        self.step_id, self.accepted = struct.step_id, struct.accepted
        self.error = error_from(struct.error.contents) if struct.error else None
        self.reports = [Report(report) for report in struct.reports[:struct.report_count]]

    def __repr__(self):
        what = "accepted" if self.accepted else self.error or "done"
        return f"<kvpool.Completion step {self.step_id}: {what}>"

    def check(self):
        """The reports; raises the error that it has."""
        if self.error is not None:
            raise self.error
        return self.reports


class Queue(Owned):
    """Steps that run in order, without waiting for each."""

    def __init__(self, session, on_completion, want_accepted):
        self._session = session
        tell = callback(COMPLETION_FN, lambda completion: on_completion(Completion(completion)))
        self._make(CallbackHold(library.queue_close, tell), library.queue_open, session.handle, tell, None,
                   want_accepted)

    def submit(self, step):
        """A step of the same session, which may be changed at once; its id. Raises Busy when too many wait."""
        step_id = c_uint64()
        library.queue_submit(self.handle, step.handle, byref(step_id))
        return step_id.value

    def wait(self):
        """Until every step submitted so far has had its last word, and was told."""
        library.queue_wait(self.handle)

    def close(self):
        """Waits for its steps, at most the client's timeout; the rest ends with CANCELLED."""
        self._give_back()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
