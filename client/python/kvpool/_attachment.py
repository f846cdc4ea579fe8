"""The other door: a worker on the daemon's host, its maps, buffers, steps and timelines."""
import collections
import ctypes
import os
import threading
import time
from ctypes import POINTER, byref, c_int, c_uint32, c_uint64

from ._array import Array, dl_device_of, itemsize_of
from ._client import BufferBase, Completion, Ticket, _PoolDescription, _text, drop_buffer
from ._errors import DeadlineExceeded, DeviceLost, Status, error_of_fork
from ._library import (AttachmentInfo, AttachOptions, CompletionStruct, OfProcess, Owned, PostOptions, fields_of,
                       library, made)
from ._step import Step

READ, READ_WRITE, NOTHING = 0, 1, 2
WORKER, EXECUTOR = 0, 1

_WORKER_WORDS, _WORDS = 512, 1024  # of which the worker's are the first
_TIMEOUT_DEFAULT_MS = 10000
_SLICE_MS = 100  # signal handlers run, and other threads have their turn, after at most this time


def attach(ticket=None, *, socket=None, session_id=None, secret=None, device=None, epoch=0, timeout_ms=0):
    """Attaches this process to a scheduler's session: by its Ticket (or the ticket's JSON), or by id and secret."""
    if isinstance(ticket, str):
        ticket = Ticket.from_json(ticket)
    if ticket is None:
        if session_id is None or secret is None:
            raise TypeError("attach() wants a ticket, or session_id and secret")
        ticket = Ticket(socket, session_id, secret, device, epoch)
    if not isinstance(ticket, Ticket):
        raise TypeError(f"a ticket is a Ticket or its JSON, not {type(ticket).__name__}")
    return Attachment(ticket, device or ticket.device, timeout_ms)


class _Slices:
    """A wait of timeout_ms in all, cut into waits of the library's after which Python's signal handlers can run."""

    def __init__(self, timeout_ms):
        self._end = time.monotonic() + timeout_ms / 1000

    def next_ms(self):
        left_ms = (self._end - time.monotonic()) * 1000
        return 0 if left_ms <= 0 else min(int(left_ms) + 1, _SLICE_MS)

    def is_over(self):
        return time.monotonic() >= self._end


class _Turns(OfProcess):
    """One thread at a time, in the order in which they came: who waits in slices lets the others in between. Buffers
    that nobody has any more are given back when it is somebody's turn: they may be collected in the middle of a call,
    and by any thread."""

    def __init__(self):
        self._pid = os.getpid()
        self._lock, self._next = threading.RLock(), threading.RLock()
        self._dropped = collections.deque()
        self._over = False

    def __enter__(self):
        if not self._is_here():
            raise error_of_fork("Attachment", self._pid)
        with self._next:
            self._lock.acquire()
        while self._dropped:
            drop_buffer(self._dropped.popleft())

    def __exit__(self, *_):
        self._lock.release()

    def drop(self, handle):
        if self._over:
            drop_buffer(handle)
        else:
            self._dropped.append(handle)

    def detach(self, handle):
        """The attachment has no user any more; its buffers are this process's alone."""
        self._over = True
        library.detach(handle)
        while self._dropped:
            drop_buffer(self._dropped.popleft())


class Attachment(OfProcess):
    """Calls of several threads take turns; those of a Word don't.

    A step that was in flight when its executor died ends with DeviceLost; the next executor is taken into use by
    itself."""

    def __init__(self, ticket, device, timeout_ms):
        options = AttachOptions(ctypes.sizeof(AttachOptions), _text(ticket.socket), ticket.session_id,
                                (ctypes.c_uint8 * 16)(*ticket.secret), _text(device), timeout_ms)
        self._handle = made(library.attach, byref(options))
        self._patience_ms = timeout_ms or _TIMEOUT_DEFAULT_MS
        self._running = set()  # steps of `run`, which takes their completions
        self._kept = collections.deque()  # completions for others than whoever took them
        # What is detached stays a valid handle as long as a step of it does: other threads may wait for its words.
        keeper = made(library.attachment_step_new, self._handle)
        self._keep = self._finalize(library.step_destroy, keeper)
        self.turn = _Turns()
        self._finalizer = self._finalize(self.turn.detach, self._handle)  # runs before the one above at exit
        self.saw_epoch(ticket.epoch)
        self.dl_device = dl_device_of(self.handle)

    @property
    def handle(self):
        self._check_process()
        return self._handle

    def detach(self):
        """Its ring, its steps and the buffers that it made are gone; the session goes on. Arrays stay mapped. In a child
        of a fork: the child's copy of the socket, without which the daemon would miss its parent's death."""
        if not self._is_here():
            if self._finalizer.detach() is not None:
                library.detach(self._handle)
            return
        with self.turn:
            self._finalizer()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.detach()

    def info(self):
        """The fields of kvpool_attachment_info."""
        out = AttachmentInfo()
        with self.turn:
            library.attachment_info_get(self.handle, byref(out))
        return fields_of(out)

    def check(self):
        """Raises DeviceLost while there is no executor, and why it ended when it has."""
        with self.turn:
            library.attachment_state(self.handle)

    def saw_epoch(self, epoch):
        """The session's epoch, of whoever leased blocks after this worker was attached."""
        library.attachment_saw_epoch(self.handle, epoch)

    # -- memory

    def map_pool(self, name, access=READ):
        with self.turn:
            return PoolMap(made(library.attachment_map_pool, self.handle, name.encode(), access), self, access)

    def create_buffer(self, count):
        """Memory of `count` bytes that the daemon makes, zeroed, mapped here."""
        with self.turn:
            return MappedBuffer(made(library.attachment_create_buffer, self.handle, count), self)

    def map_buffer(self, buffer_id):
        """One that the scheduler made."""
        with self.turn:
            return MappedBuffer(made(library.attachment_map_buffer, self.handle, buffer_id), self)

    def import_memfd(self, fd, memfd_bytes, offset_bytes=0, count=None):
        """Bytes of a sealed memfd (make_memfd), of a host device."""
        count = memfd_bytes - offset_bytes if count is None else count
        with self.turn:
            return MappedBuffer(made(library.attachment_import_memfd, self.handle, fd, memfd_bytes, offset_bytes,
                                     count), self)

    def import_device(self, address, count):
        """Memory of this process's own on the attachment's GPU, inside one allocation of cudaMalloc, or of virtual memory
        that can be exported. It must not be freed before release() has returned. Raises kvpool.Error, UNIMPLEMENTED, for
        memory without a handle - cudaMallocAsync's, expandable segments: use create_buffer."""
        with self.turn:
            return MappedBuffer(made(library.attachment_import_device, self.handle, address, count), self)

    def import_vmm(self, fd, allocation_bytes, offset_bytes=0, count=None, address=None):
        """Virtual memory that this process has exported as a descriptor, which stays its own; allocation_bytes: as
        cuMemCreate was told."""
        count = allocation_bytes - offset_bytes if count is None else count
        with self.turn:
            return MappedBuffer(made(library.attachment_import_vmm, self.handle, fd, allocation_bytes, offset_bytes,
                                     count, address), self)

    def import_tensor(self, tensor):
        """A contiguous tensor of torch's, or any array with __cuda_array_interface__, on the attachment's GPU; as
        import_device. The buffer keeps it. Steps don't wait for torch's stream: signal a word on it."""
        if hasattr(tensor, "data_ptr"):
            if not tensor.is_contiguous():
                raise ValueError("the tensor isn't contiguous")
            address, count = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        else:
            interface = tensor.__cuda_array_interface__
            if interface.get("strides") is not None:
                raise ValueError("the array isn't contiguous")
            address, count = interface["data"][0], int(interface["typestr"][2:])
            for extent in interface["shape"]:
                count *= extent
        buffer = self.import_device(address, count)
        buffer.tensor = tensor
        return buffer

    # -- steps

    def step(self):
        return AttachmentStep(made(library.attachment_step_new, self.handle), self)

    def post(self, step, base=0, deadline_ms=0, want_accepted=False):
        """Posts a step; its id. Raises Busy when the ring is full."""
        options = PostOptions(ctypes.sizeof(PostOptions), base, deadline_ms, want_accepted)
        step_id = c_uint64()
        with self.turn:
            library.attachment_post(self.handle, step.handle, byref(options), byref(step_id))
        return step_id.value

    def _take(self, call, *arguments):
        """A completion of the library's, None when there is none. It is told once: an exception of a signal handler
        must not lose it."""
        out = POINTER(CompletionStruct)()
        try:
            call(self.handle, *arguments, byref(out))
        except BaseException:
            if out:
                self._kept.append(Completion(out.contents))
            raise
        return Completion(out.contents) if out else None

    def _kept_of(self, is_wanted):
        for completion in self._kept:
            if is_wanted(completion):
                self._kept.remove(completion)
                return completion
        return None

    def _is_for_all(self, completion):
        return completion.step_id not in self._running

    def _next(self, is_wanted, call, *arguments):
        """The next that is wanted, None when there is none. The others are kept for those who want them."""
        while True:
            completion = self._kept_of(is_wanted)
            if completion is not None:
                return completion
            completion = self._take(call, *arguments)
            if completion is None or is_wanted(completion):
                return completion
            self._kept.append(completion)

    def _wait(self, is_wanted, timeout_ms):
        """None after timeout_ms. The turn is given up between the slices."""
        slices = _Slices(timeout_ms)
        while True:
            try:
                with self.turn:
                    return self._next(is_wanted, library.attachment_wait, slices.next_ms())
            except DeadlineExceeded:
                if slices.is_over():
                    return None

    def poll(self):
        """The next Completion, or None."""
        with self.turn:
            return self._next(self._is_for_all, library.attachment_poll)

    def wait(self, timeout_ms):
        """The next Completion; raises DeadlineExceeded when none comes. Signal handlers run meanwhile."""
        completion = self._wait(self._is_for_all, timeout_ms)
        if completion is None:
            raise DeadlineExceeded(Status.DEADLINE_EXCEEDED, "no step of the "
                                   f"{self.info()['steps_in_flight']} that are not done had a word to say for "
                                   f"{timeout_ms} ms")
        return completion

    def run(self, step, base=0, deadline_ms=0):
        """Posts, and waits until it is done, at most the attachment's timeout and the deadline. A Report of each op.
        Signal handlers run meanwhile; when one raises, or it takes too long, the step's Completion is told by `poll`."""
        timeout_ms = self._patience_ms + deadline_ms
        with self.turn:
            step_id = self.post(step, base, deadline_ms)
            self._running.add(step_id)
        try:
            completion = self._wait(lambda found: found.step_id == step_id, timeout_ms)
        finally:
            self._running.discard(step_id)
        if completion is None:
            raise DeadlineExceeded(Status.DEADLINE_EXCEEDED, f"step {step_id} is not done after {timeout_ms} ms")
        return completion.check()

    def fileno(self):
        """For event loops: readable when there may be a completion, once `arm` said True."""
        with self.turn:
            return library.attachment_fd(self.handle)

    def arm(self):
        """Before a sleep on fileno(). False: something is there, poll instead."""
        with self.turn:
            return not any(map(self._is_for_all, self._kept)) and library.attachment_arm(self.handle)

    # -- timelines

    def new_word(self, writer):
        """writer: WORKER (this process signals) or EXECUTOR (steps signal)."""
        if writer not in (WORKER, EXECUTOR):
            raise ValueError(f"writer {writer!r} is neither WORKER nor EXECUTOR")
        word, value = c_uint32(), c_uint64()
        library.timeline_new(self.handle, writer, byref(word), byref(value))
        return Word(self, word.value, value.value)


class Word:
    """A word of the timelines. value: what stood in it when it was given out; its user counts up from there."""

    def __init__(self, attachment, index, value):
        if not 0 <= index < _WORDS:
            raise IndexError(f"word {index}, an attachment has {_WORDS}")
        self.attachment, self.index, self.value = attachment, index, value

    def __int__(self):
        return self.index

    def __repr__(self):
        return f"<kvpool.Word {self.index}>"

    def free(self):
        library.timeline_free(self.attachment.handle, self.index)

    def signal(self, value):
        library.timeline_signal(self.attachment.handle, self.index, value)

    def poison(self):
        """What waits for it fails."""
        library.timeline_poison(self.attachment.handle, self.index)

    def read(self):
        value = c_uint64()
        library.timeline_read(self.attachment.handle, self.index, byref(value))
        return value.value

    def wait(self, value, timeout_ms):
        """Until it is at least value. Raises when it is poisoned, and DeadlineExceeded. Signal handlers run meanwhile."""
        slices, generation = _Slices(timeout_ms), self._generation()
        while True:
            try:
                library.timeline_wait(self.attachment.handle, self.index, value, slices.next_ms())
                return
            except DeadlineExceeded as error:
                if slices.is_over():
                    raise DeadlineExceeded(error.status, f"word {self.index} is {error.value}, not {value}, after "
                                           f"{timeout_ms} ms", None, error.array, None, error.value) from None
            # The words of a successor, which was taken into use between two slices, hide that the old ones are poisoned.
            if self.index >= _WORKER_WORDS and self._generation() != generation:
                raise DeviceLost(Status.DEVICE_LOST, f"word {self.index} is poisoned: the executor that would have "
                                 "counted it up died", None, "word", None, self.index)

    def _generation(self):
        out = AttachmentInfo()
        library.attachment_info_get(self.attachment.handle, byref(out))
        return out.generation

    def device_address(self):
        """The word as the attachment's GPU sees it, for kernels of the program's own."""
        address = c_uint64()
        library.timeline_device_address(self.attachment.handle, self.index, byref(address))
        return address.value

    def stream_signal(self, value, stream=None):
        """When what the stream had to do before is done. stream: a CUstream's address, or torch's Stream."""
        library.timeline_stream_signal(self.attachment.handle, self.index, value, _stream(stream))

    def stream_wait(self, value, stream=None):
        """The stream goes on when the word is at least value, or poisoned."""
        library.timeline_stream_wait(self.attachment.handle, self.index, value, _stream(stream))


def _stream(stream):
    return getattr(stream, "cuda_stream", stream)


class AttachmentStep(Step):
    def __init__(self, handle, attachment):
        super().__init__(handle)
        self.attachment = attachment

    def run(self, **options):
        return self.attachment.run(self, **options)

    def points(self, begins=0, ends=0):
        """About the op added last, a fused_store, in a step that a Replay posts: it begins when the graph has signalled
        `begins` (0: behind the op before), and with it and all before it done, `ends` is reached (0: not told)."""
        library.step_set_replay_points(self.handle, begins, ends)
        return self


class PoolMap(Owned, _PoolDescription):
    """A pool's memory in this process, read-only unless it was mapped with READ_WRITE."""

    def __init__(self, handle, attachment, access):
        self._own(handle, library.pool_map_destroy)
        self.attachment, self.access = attachment, access
        self._describe(self.pool_handle)

    @property
    def pool_handle(self):
        return library.pool_map_pool(self.handle)

    def unmap(self):
        """No use of it for steps any more. The memory stays mapped until the last array of it is gone."""
        self._give_back()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.unmap()

    def region(self, region):
        """region: an index, or a name."""
        index = self.region_index(region)
        if not 0 <= index < len(self.regions):
            raise IndexError(f"region {index} of pool {self.name!r}, which has {len(self.regions)}")
        return Region(self, index)


class Region:
    """A region's memory: `array`, `data` and `scales` are uint8 arrays over it."""

    def __init__(self, pool_map, index):
        self.handle_owner = pool_map
        self.index = index
        self.__dict__.update(fields_of(library.pool_map_region(pool_map.handle, index).contents))

    def _array(self, layer, offset, per_token, stride):
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer {layer} of a region that has {self.num_layers}")
        if self.base is None:
            raise ValueError("the pool was mapped without its memory")
        owner = self.handle_owner
        return Array(owner, library.pool_map_export, self.base + layer * self.layer_stride_bytes + offset,
                     (self.num_blocks, self.tokens_per_block, 1, per_token),
                     (self.block_stride_bytes, stride, stride, 1), "uint8", owner.access != READ_WRITE,
                     owner.attachment.dl_device)

    def array(self, layer=0):
        """Of a main cache: whole records, [blocks, tokens, 1, bytes_per_token] with strides of (block_stride,
        bytes_per_token, bytes_per_token, 1) bytes."""
        if not self.token_interleaved and self.scale_bytes:
            raise ValueError("an index region has no whole records: take data and scales")
        return self._array(layer, 0, self.bytes_per_token, self.bytes_per_token)

    def data(self, layer=0):
        """[blocks, tokens, 1, data_bytes]"""
        return self._array(layer, 0, self.data_bytes, self.token_stride_bytes)

    def scales(self, layer=0):
        """[blocks, tokens, 1, scale_bytes]"""
        if not self.scale_bytes:
            raise ValueError("records of this region have no scales")
        return self._array(layer, self.scales_offset_bytes, self.scale_bytes, self.scale_stride_bytes)


class MappedBuffer(BufferBase):
    """Memory that daemon and worker share, writable here."""

    def __init__(self, handle, attachment):
        super().__init__(handle, attachment.turn.drop)
        self.attachment = attachment

    def release(self):
        if self._is_here():
            with self.attachment.turn:
                super().release()

    @property
    def address(self):
        return library.buffer_data(self.handle)

    def array(self, dtype="uint8", shape=None, offset_bytes=0):
        """An array over it, without gaps; shape None: all of it, in one dimension."""
        itemsize = itemsize_of(dtype)
        if shape is None:
            shape = ((self.bytes - offset_bytes) // itemsize,)
        strides, stride = [], itemsize
        for extent in reversed(shape):
            strides.insert(0, stride)
            stride *= extent
        if offset_bytes < 0 or stride > self.bytes - offset_bytes:
            raise ValueError(f"{stride} bytes at offset {offset_bytes} are not inside a buffer of {self.bytes}")
        return Array(self, library.buffer_export, self.address + offset_bytes, shape, strides, dtype, False,
                     self.attachment.dl_device)


def make_memfd(name, count):
    """A sealed memfd of `count` bytes as import_memfd takes it, a Python file descriptor's number: os.close it."""
    fd = c_int()
    library.memfd_create(name.encode(), count, byref(fd))
    os.set_inheritable(fd.value, False)
    return fd.value
