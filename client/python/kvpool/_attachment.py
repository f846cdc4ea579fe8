"""The other door: a worker on the daemon's host, its maps, buffers, steps and timelines."""
import ctypes
import functools
import os
import time
from ctypes import POINTER, byref, c_int, c_int64, c_uint32, c_uint64

from ._array import Array, dl_device_of, itemsize_of
from ._client import BufferBase, Completion, Ticket, _PoolDescription
from ._errors import DeadlineExceeded, DeviceLost, Status
from ._given import whole
from ._library import (AttachmentInfo, AttachOptions, CompletionStruct, Hold, OfProcess, Owned, PostOptions, fields_of,
                       library)
from ._step import Step
from ._turns import Turns

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


def _in_turn(method):
    """Of an Attachment: one thread at a time."""
    @functools.wraps(method)
    def call(self, *arguments, **options):
        return self.turn(method, self, *arguments, **options)

    return call


class Attachment(OfProcess):
    """Calls of several threads take turns; those of a Word don't. A step is built by one thread at a time.

    A step that was in flight when its executor died ends with DeviceLost; the next executor is taken into use by
    itself."""

    def __init__(self, ticket, device, timeout_ms):
        options = AttachOptions(ctypes.sizeof(AttachOptions), ticket.socket, ticket.session_id,
                                (ctypes.c_uint8 * 16)(*ticket.secret), device, timeout_ms)
        self._patience_ms = timeout_ms or _TIMEOUT_DEFAULT_MS
        self._running = set()  # steps of `run`, which takes their completions
        self._kept = {}  # completions that nobody was told, in their order
        self._told = POINTER(CompletionStruct)()  # of the library's: what is to be kept next
        self._hold, keeper = Hold(library.detach), Hold(library.step_destroy)
        library.attach(byref(options), byref(self._hold))
        # What is detached stays a valid handle as long as a step of it does: other threads may wait for its words.
        library.attachment_step_new(self._hold, byref(keeper))
        self._handle = ctypes.c_void_p(self._hold.value)
        self._keep = self._finalize(keeper.give_back)
        self.turn = Turns()
        self._finalizer = self._finalize(self.turn.end, self._hold)  # runs before the one above at exit
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
            handle, self._hold.value = self._hold.value, None
            if handle is not None:
                library.detach(handle)
            return
        self.turn(self.turn.end, self._hold)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.detach()

    @_in_turn
    def info(self):
        """The fields of kvpool_attachment_info."""
        out = AttachmentInfo()
        library.attachment_info_get(self.handle, byref(out))
        return fields_of(out)

    @_in_turn
    def check(self):
        """Raises DeviceLost while there is no executor, and why it ended when it has."""
        library.attachment_state(self.handle)

    def saw_epoch(self, epoch):
        """epoch: Session.epoch, told by whoever leased blocks after this worker was attached: steps on them are refused
        before (STALE_BLOCK). It never goes down. Any thread."""
        library.attachment_saw_epoch(self.handle, epoch)

    # -- memory

    @_in_turn
    def map_pool(self, name, access=READ):
        """A PoolMap. access: READ (a write faults the writer), READ_WRITE (for kernels of the worker's own: nothing
        checks what they write), or NOTHING (geometry alone, enough for steps). It stays valid while executors come
        and go. Raises kvpool.Error: UNKNOWN_POOL, WRONG_DEVICE (not placed on the attachment's), PERMISSION_DENIED
        (it is, or was, another namespace's)."""
        return PoolMap(self, name, access)

    @_in_turn
    def create_buffer(self, count):
        """Memory of `count` bytes that the daemon makes, zeroed, mapped here. It goes by release(), when nobody has the
        MappedBuffer any more, or with the attachment."""
        return MappedBuffer(self, library.attachment_create_buffer, count)

    @_in_turn
    def map_buffer(self, buffer_id):
        """One that the scheduler made (Buffer.id), mapped here; release() only unmaps it."""
        return MappedBuffer(self, library.attachment_map_buffer, buffer_id)

    @_in_turn
    def import_memfd(self, fd, memfd_bytes, offset_bytes=0, count=None):
        """`count` bytes (None: all behind offset_bytes) of a sealed memfd of memfd_bytes (make_memfd), of a host
        device. offset_bytes: a multiple of 16. The descriptor stays the caller's."""
        count = memfd_bytes - offset_bytes if count is None else count
        return MappedBuffer(self, library.attachment_import_memfd, fd, memfd_bytes, offset_bytes, count)

    @_in_turn
    def import_device(self, address, count):
        """Memory of this process's own on the attachment's GPU, inside one allocation of cudaMalloc, or of virtual memory
        that can be exported. It must not be freed before release() has returned. Raises kvpool.Error, UNIMPLEMENTED, for
        memory without a handle - cudaMallocAsync's, expandable segments: use create_buffer."""
        return MappedBuffer(self, library.attachment_import_device, address, count)

    @_in_turn
    def import_vmm(self, fd, allocation_bytes, offset_bytes=0, count=None, address=None):
        """Virtual memory that this process has exported as a descriptor, which stays its own; allocation_bytes: as
        cuMemCreate was told."""
        count = allocation_bytes - offset_bytes if count is None else count
        return MappedBuffer(self, library.attachment_import_vmm, fd, allocation_bytes, offset_bytes, count, address)

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
        buffer.tensor = buffer.handle.tensor = tensor  # until it has been given back, whenever that is
        return buffer

    # -- steps

    def step(self):
        """An empty AttachmentStep."""
        return AttachmentStep(self)

    @_in_turn
    def _post(self, step, options, step_id, is_run):
        library.attachment_post(self.handle, step.handle, byref(options), byref(step_id))
        if is_run:
            self._running.add(step_id.value)

    def post(self, step, base=0, deadline_ms=0, want_accepted=False):
        """Posts a step, which may be changed at once; its id. Steps run in the order in which they were posted.

        base           added to the values of the step's waits and signals.
        deadline_ms    of its waits, from its acceptance on; 0, or more than the daemon's: the daemon's.
        want_accepted  a Completion tells, too, when it was accepted.

        Raises Busy when the ring is full, or 1024 steps are not done; DeviceLost until the next executor serves."""
        step_id = c_uint64()
        self._post(step, PostOptions(ctypes.sizeof(PostOptions), base, deadline_ms, want_accepted), step_id, False)
        return step_id.value

    def _keep_told(self):
        """What the library told is valid until its next call, and told once: whoever sees it first keeps it, be it a
        signal handler's poll."""
        told, nothing = self._told, POINTER(CompletionStruct)()
        if told:
            completion = Completion(told.contents)
            if self._told is told:
                self._told = nothing
                self._kept[completion] = None

    def _find(self, is_wanted, taken):
        """Moves the first that is kept and wanted to `taken`."""
        for completion in tuple(self._kept):
            if is_wanted(completion) and completion in self._kept:
                del self._kept[completion]
                taken.append(completion)
                return True
        return False

    def _keep_again(self, taken):
        """Nobody was told, as a signal handler raised: it is the first for whoever comes next."""
        if taken:
            self._kept = {taken[0]: None, **self._kept}

    def _next(self, is_wanted, taken, call, *arguments):
        """The next that is wanted, if there is one, to `taken`. The others are kept for those who want them."""
        self._keep_told()
        while not self._find(is_wanted, taken):
            call(self.handle, *arguments, byref(self._told))
            if not self._told:
                self._find(is_wanted, taken)  # a signal handler's call may have kept it
                return
            self._keep_told()

    def _wait(self, is_wanted, taken, timeout_ms):
        """Nothing is taken after timeout_ms. The turn is given up between the slices."""
        slices = _Slices(timeout_ms)
        while not taken:
            try:
                self.turn(self._next, is_wanted, taken, library.attachment_wait, slices.next_ms())
            except DeadlineExceeded:
                if slices.is_over():
                    return

    def _is_for_all(self, completion):
        return completion.step_id not in self._running

    def poll(self):
        """The next Completion, or None."""
        taken = []
        try:
            self.turn(self._next, self._is_for_all, taken, library.attachment_poll)
        except BaseException:
            self._keep_again(taken)
            raise
        return taken[0] if taken else None

    def wait(self, timeout_ms):
        """The next Completion; raises DeadlineExceeded when none comes. Signal handlers run meanwhile."""
        taken = []
        try:
            self._wait(self._is_for_all, taken, timeout_ms)
        except BaseException:
            self._keep_again(taken)
            raise
        if not taken:
            raise DeadlineExceeded(Status.DEADLINE_EXCEEDED, "no step of the "
                                   f"{self.info()['steps_in_flight']} that are not done had a word to say for "
                                   f"{timeout_ms} ms")
        return taken[0]

    def run(self, step, base=0, deadline_ms=0):
        """Posts, and waits until it is done, at most the attachment's timeout and the deadline. A Report of each op.
        Signal handlers run meanwhile; when one raises, or it takes too long, the step's Completion is told by `poll`."""
        options, step_id, taken = PostOptions(ctypes.sizeof(PostOptions), base, deadline_ms), c_uint64(), []
        timeout_ms = self._patience_ms + deadline_ms
        try:
            self._post(step, options, step_id, True)
            self._wait(lambda completion: completion.step_id == step_id.value, taken, timeout_ms)
        except BaseException:
            self._keep_again(taken)
            raise
        finally:
            self._running.discard(step_id.value)
        if not taken:
            raise DeadlineExceeded(Status.DEADLINE_EXCEEDED,
                                   f"step {step_id.value} is not done after {timeout_ms} ms")
        return taken[0].check()

    @_in_turn
    def fileno(self):
        """For event loops: readable when there may be a completion, once `arm` said True."""
        return library.attachment_fd(self.handle)

    @_in_turn
    def arm(self):
        """Before a sleep on fileno(). False: something is there, poll instead."""
        self._keep_told()
        return not any(map(self._is_for_all, self._kept)) and library.attachment_arm(self.handle)

    # -- timelines

    def new_word(self, writer):
        """A Word; writer: WORKER (this process signals) or EXECUTOR (steps signal). There are 512 of each, until
        free(). When an executor has died the next one has new words, of both writers: what was given out stays given
        out, and begins at 0 again."""
        if writer not in (WORKER, EXECUTOR):
            raise ValueError(f"writer {writer!r} is neither WORKER nor EXECUTOR")
        word, value = c_uint32(_WORDS), c_uint64()
        try:
            library.timeline_new(self.handle, writer, byref(word), byref(value))
            return Word(self, word.value, value.value)
        except BaseException:  # of a signal handler: nobody knows of it
            if word.value != _WORDS:
                library.timeline_free(self.handle, word.value)
            raise


class Word:
    """A word of the timelines. value: what stood in it when it was given out; its user counts up from there."""

    def __init__(self, attachment, index, value):
        index = whole("index", index)
        if not 0 <= index < _WORDS:
            raise IndexError(f"word {index}, an attachment has {_WORDS}")
        self.attachment, self.index, self.value = attachment, index, value

    def __index__(self):
        return self.index

    def __repr__(self):
        return f"<kvpool.Word {self.index}>"

    def free(self):
        """It may be given out again; nobody uses it any more."""
        library.timeline_free(self.attachment.handle, self.index)

    def signal(self, value):
        """A WORKER's word becomes value, not below what it is and in (0, 2^62): whoever sees it sees what was written
        before. One thread at a time."""
        library.timeline_signal(self.attachment.handle, self.index, value)

    def poison(self):
        """Of a WORKER's: what waits for it fails, and it stays so."""
        library.timeline_poison(self.attachment.handle, self.index)

    def read(self):
        """What it is now. Poisoned: raises DeviceLost when its executor has died, else kvpool.Error, CANCELLED."""
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
    def __init__(self, attachment):
        super().__init__(library.attachment_step_new, attachment.handle)
        self.attachment = attachment

    def destroy(self):
        """It is gone; what was posted goes on."""
        if self._is_here():
            self.attachment.turn(self._give_back)

    def run(self, **options):
        """Attachment.run of this step."""
        return self.attachment.run(self, **options)

    def points(self, begins=0, ends=0):
        """About the op added last, a fused_store, in a step that a Replay posts: it begins when the graph has signalled
        `begins` (0: behind the op before), and with it and all before it done, `ends` is reached (0: not told). One of
        them at least; `ends` go up from op to op."""
        library.step_set_replay_points(self.handle, begins, ends)
        return self


class PoolMap(Owned, _PoolDescription):
    """A pool's memory in this process, read-only unless it was mapped with READ_WRITE."""

    def __init__(self, attachment, name, access):
        self._make(Hold(library.pool_map_destroy), library.attachment_map_pool, attachment.handle, name, access)
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
        return Region(self, self._described(region)[0])


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

    def __init__(self, attachment, call, *arguments):
        super().__init__(attachment.turn, call, attachment.handle, *arguments)
        self.attachment = attachment

    def release(self):
        """It is gone for this process whatever is raised; arrays over it stay mapped. Of one that was made or imported
        here it waits, at most the attachment's timeout, for the steps that use it: what their words wait for must not
        wait for the release. DeadlineExceeded: one is still there, and until it is done memory of the program's own is
        read and written, and calls that ask the daemon wait."""
        if self._is_here():
            self.attachment.turn(super().release)

    @property
    def address(self):
        """Where it is mapped here, of a GPU a device address; None: it isn't."""
        return library.buffer_data(self.handle)

    def array(self, dtype="uint8", shape=None, offset_bytes=0):
        """An array over it, without gaps; shape None: all of it, in one dimension."""
        itemsize = itemsize_of(dtype)
        offset_bytes = whole("offset_bytes", offset_bytes, c_int64)
        if shape is None:
            shape = ((self.bytes - offset_bytes) // itemsize,)
        shape = tuple(whole("shape", extent, c_int64) for extent in shape)
        if min(shape, default=0) < 0:
            raise ValueError(f"shape {shape} has a negative extent")
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
    fd = c_int(-1)
    try:
        library.memfd_create(name, count, byref(fd))
        os.set_inheritable(fd.value, False)
        return fd.value
    except BaseException:  # of a signal handler: nobody knows of it
        if fd.value >= 0:
            os.close(fd.value)
        raise
