"""The gRPC door: connection, pools, sessions, buffers, queues."""
import ctypes
import json
from ctypes import byref, c_char_p, c_uint8, c_uint64

from ._errors import Error, Status, error_from
from ._int32 import Int32In, Int32Out
from ._library import (COMPLETION_FN, SESSION_EVENT_FN, ConnectOptions, OpReport, Owned, PoolSpec, RegionSpec,
                       SessionOptions, callback, destroy_client, drop_callback, fields_of, is_in_callback, library,
                       made)
from ._step import BufferArray, LayerRef, Report, Step, ViewRef

PAGED, RING = 0, 1
_SECRET_BYTES = 16


def _text(value):
    return None if value is None else value.encode()


class Client(Owned):
    """A connection. target: the path of kvpoold's socket; None: $KVPOOLD_SOCKET, else /run/kvpoold/kvpoold.sock. It
    reconnects by itself; sessions of a daemon that went are over."""

    def __init__(self, target=None, timeout_ms=0, wait_until_serving=False):
        options = ConnectOptions(ctypes.sizeof(ConnectOptions), timeout_ms, wait_until_serving)
        self._formats = None
        self._own(made(library.client_connect, _text(target), byref(options)), destroy_client)

    def close(self):
        if is_in_callback():
            raise Error(Status.INVALID_ARGUMENT, "a client can't be closed from inside a callback")
        self._give_back()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def info(self):
        """What the daemon says of itself: version, pid, attach_socket, devices, formats."""
        handle = made(library.server_info_get, self.handle)
        try:
            return {
                "version": library.server_info_version(handle).decode(),
                "pid": library.server_info_pid(handle),
                "attach_socket": library.server_info_attach_socket(handle).decode(),
                "devices": [fields_of(library.server_info_device(handle, i).contents)
                            for i in range(library.server_info_device_count(handle))],
                "formats": [fields_of(library.server_info_format(handle, i).contents)
                            for i in range(library.server_info_format_count(handle))],
            }
        finally:
            library.server_info_destroy(handle)

    def format(self, name):
        """The entry of info()'s formats, None for one that the daemon hasn't."""
        if self._formats is None:
            self._formats = {found["name"]: found for found in self.info()["formats"]}
        return self._formats.get(name)

    def pool(self, name):
        """An open handle of the pool of this name."""
        return Pool(made(library.pool_open, self.handle, name.encode()), self)

    def create_pool(self, name, block_size, num_blocks, regions, kind=PAGED, placements=(), namespace=None):
        """An operator's right. regions: dicts of name, format, num_layers, and width, compression_ratio, note.
        namespace: whose sessions alone may have its blocks and map it."""
        specs = (RegionSpec * max(len(regions), 1))()
        for spec, region in zip(specs, regions):
            for key, value in region.items():
                setattr(spec, key, value.encode() if isinstance(value, str) else value)
        devices = (c_char_p * max(len(placements), 1))(*(device.encode() for device in placements))
        spec = PoolSpec(name.encode(), kind, block_size, num_blocks, devices, len(placements), specs, len(regions),
                        _text(namespace))
        return Pool(made(library.pool_create, self.handle, byref(spec)), self)

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
        if isinstance(region, int):
            return region
        for index, info in enumerate(self.regions):
            if info["name"] == region:
                return index
        raise KeyError(f"pool {self.name!r} has no region {region!r}")

    def layer(self, region, layer=0):
        """One layer of a region, for steps."""
        return LayerRef(self, self.region_index(region), layer)


class Pool(Owned, _PoolDescription):
    """A pool as it was when it was asked for. regions: the fields of kvpool_region_info, a dict each."""

    def __init__(self, handle, client):
        self._client = client
        self._own(handle, library.pool_destroy)
        self._describe(handle)

    @property
    def pool_handle(self):
        return self.handle

    def refresh(self):
        library.pool_refresh(self.pool_handle)
        self._describe(self.pool_handle)

    @property
    def free_blocks(self):
        return library.pool_free_blocks(self.pool_handle)

    def delete(self, force=False):
        """An operator's right."""
        library.pool_delete(self.pool_handle, force)


class Ticket:
    """What a worker needs to attach to a session. It is a secret: whoever has it acts for the session."""

    def __init__(self, socket, session_id, secret, device=None, epoch=0):
        self.socket, self.session_id, self.secret = socket, session_id, bytes(memoryview(secret))
        if len(self.secret) != _SECRET_BYTES:
            raise ValueError(f"a secret has {_SECRET_BYTES} bytes, this one {len(self.secret)}")
        self.device, self.epoch = device, epoch

    def __repr__(self):
        return f"<kvpool.Ticket session {self.session_id}>"

    def to_json(self):
        return json.dumps({"socket": self.socket, "session_id": self.session_id, "secret": self.secret.hex(),
                           "device": self.device, "epoch": self.epoch})

    @classmethod
    def from_json(cls, text):
        fields = json.loads(text)
        return cls(fields["socket"], fields["session_id"], bytes.fromhex(fields["secret"]), fields["device"],
                   fields["epoch"])


def _event_of(struct):
    event = {"kind": {1: "device_lost", 2: "device_restored", 3: "ended"}.get(struct.kind, "unknown")}
    if struct.kind in (1, 2):
        event["device"] = struct.device.decode()
    if struct.kind == 1:
        event["pool_id"], event["blocks"] = struct.pool_id, struct.blocks[:struct.block_count]
    if struct.kind == 3:
        event["error"] = error_from(struct.error.contents)
    return event


def _close_session(handle, on_event):
    library.session_close(handle)
    drop_callback(on_event)  # not before: it may be running


class Session(Owned):
    """It lives as long as this process holds it."""

    def __init__(self, client, name, namespace, blocks_max, on_event):
        self.client = client
        tell = SESSION_EVENT_FN(0)
        if on_event is not None:
            tell = callback(SESSION_EVENT_FN, lambda event: on_event(_event_of(event)))
        options = SessionOptions(ctypes.sizeof(SessionOptions), _text(name), _text(namespace), blocks_max, tell, None)
        self._own(made(library.session_open, client.handle, byref(options)), _close_session, tell)
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
        return library.session_epoch(self.handle)

    def check(self):
        """Raises why it ended, when it has."""
        library.session_state(self.handle)

    def ticket(self, device=None):
        secret = (c_uint8 * _SECRET_BYTES)()
        library.session_secret(self.handle, secret)
        return Ticket(self.client.info()["attach_socket"], self.id, secret, device, self.epoch)

    def allocate(self, pool, count):
        """Block ids, int32 [count]."""
        out = Int32Out(count)
        library.blocks_allocate(self.handle, pool.pool_handle, count,
                                ctypes.cast(out.address, ctypes.POINTER(ctypes.c_int32)))
        return out.get()

    def allocate_range(self, pool, first, count):
        library.blocks_allocate_range(self.handle, pool.pool_handle, first, count)

    def free(self, pool, blocks):
        given = Int32In(blocks)
        library.blocks_free(self.handle, pool.pool_handle, given.address, given.count)

    def create_buffer(self, count, device=None):
        """Device memory of `count` bytes, written and read over gRPC."""
        return Buffer(made(library.buffer_create, self.handle, _text(device), count), self)

    def step(self):
        return SessionStep(made(library.step_new, self.handle), self)

    def open_queue(self, on_completion, want_accepted=False):
        """on_completion(Completion): on a thread of the library's."""
        return Queue(self, on_completion, want_accepted)

    def store_rows(self, layer, rows, slots):
        """rows: [n, row_bytes of any type], contiguous. The report."""
        data, shape = _bytes_of(rows)
        given, report = Int32In(slots), OpReport()
        library.rows_store(self.handle, byref(layer.struct), data, shape[0], len(data) // max(shape[0], 1),
                           given.address, given.count, byref(report))
        return Report(report)

    def load_rows(self, layer, segments, total_k, row_bytes, scale_bytes=0):
        """(rows, scales, report): bytearrays of total_k * row_bytes and total_k * scale_bytes."""
        self._check_loaded(layer, row_bytes, scale_bytes)
        given, report = Int32In(segments), OpReport()
        rows, scales = bytearray(total_k * row_bytes), bytearray(total_k * scale_bytes)
        library.rows_load(self.handle, byref(layer.struct), given.address, given.count // 4, total_k,
                          _address_of(rows), _address_of(scales) if scale_bytes else None, byref(report))
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


def drop_buffer(handle):
    try:
        library.buffer_release(handle)
    except Error:  # it goes with its session, or its attachment
        pass


class BufferBase(Owned):
    """Memory of a session's that steps use."""

    def __init__(self, handle, drop=drop_buffer):
        self._own(handle, drop)
        self.id, self.bytes = library.buffer_id(handle), library.buffer_bytes(handle)

    def view(self, rows, row_bytes, offset_bytes=0, row_stride_bytes=0):
        """`rows` rows of row_bytes, one every row_stride_bytes (0: without gaps)."""
        return ViewRef(self, rows, row_bytes, offset_bytes, row_stride_bytes)

    def int32(self, count, offset_bytes=0):
        """An array of a step that is read and checked when the op runs."""
        return BufferArray(self, count, offset_bytes)


    def release(self):
        """It is gone for this process whatever is raised. Arrays over it stay mapped."""
        if not self._is_here():
            return
        handle, self._handle = self.handle, None
        self._finalizer.detach()
        library.buffer_release(handle)


class Buffer(BufferBase):
    """A buffer over gRPC."""

    def __init__(self, handle, session):
        super().__init__(handle)
        self._session = session

    def write(self, data, offset_bytes=0):
        given = memoryview(data).tobytes()
        library.buffer_write(self.handle, offset_bytes, given, len(given))

    def read(self, count=None, offset_bytes=0):
        out = bytearray(self.bytes - offset_bytes if count is None else count)
        library.buffer_read(self.handle, offset_bytes, _address_of(out), len(out))
        return out


class SessionStep(Step):
    def __init__(self, handle, session):
        super().__init__(handle)
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


def _close_queue(handle, on_completion):
    library.queue_close(handle)
    drop_callback(on_completion)


class Queue(Owned):
    """Steps that run in order, without waiting for each."""

    def __init__(self, session, on_completion, want_accepted):
        self._session = session
        tell = callback(COMPLETION_FN, lambda completion: on_completion(Completion(completion)))
        self._own(made(library.queue_open, session.handle, tell, None, want_accepted), _close_queue, tell)

    def submit(self, step):
        step_id = c_uint64()
        library.queue_submit(self.handle, step.handle, byref(step_id))
        return step_id.value

    def wait(self):
        """Until every step submitted so far has had its last word, and was told."""
        library.queue_wait(self.handle)

    def close(self):
        self._give_back()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
