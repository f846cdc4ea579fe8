"""libkvpool, loaded once: its structs and the types of its functions, as kvpool.h and worker.h declare them."""
import collections
import ctypes
import ctypes.util
import os
import threading
import weakref
from ctypes import (CFUNCTYPE, POINTER, Structure, byref, c_bool, c_char, c_char_p, c_float, c_int, c_int32,
                    c_int64, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p)

from ._errors import error_from, error_of_fork
from ._given import TEXT, Checked, given

HANDLE = c_void_p
STATUS = c_int
NAME = c_char * 64


class ErrorStruct(Structure):
    _fields_ = [("status", c_int), ("op", c_int32), ("position", c_int64), ("value", c_int64), ("array", c_char * 32),
                ("text", c_char * 384)]


class ConnectOptions(Checked):
    _fields_ = [("size_bytes", c_size_t), ("timeout_ms", c_uint32), ("wait_until_serving", c_bool)]


class DeviceInfo(Structure):
    _fields_ = [("name", NAME), ("state", c_int), ("executor_pid", c_uint64), ("restarts", c_uint64),
                ("memory_limit_bytes", c_uint64), ("pool_bytes", c_uint64), ("buffer_bytes", c_uint64),
                ("steps_in_flight", c_uint64), ("steps_done", c_uint64), ("description", c_char * 256),
                ("driver", NAME), ("mps", c_bool), ("memory_bytes", c_uint64), ("memory_left_bytes", c_uint64),
                ("memory_others_bytes", c_uint64), ("memory_granularity_bytes", c_uint64),
                ("waiting_for", c_char * 384), ("ring_bytes", c_uint64)]


class FormatInfo(Structure):
    _fields_ = [("name", NAME), ("quantized_dtype", c_char * 16), ("scale_format", c_char * 16),
                ("quantized_elements", c_uint32), ("elements_per_scale", c_uint32), ("bf16_elements", c_uint32),
                ("dequantize_on_load", c_bool), ("token_interleaved", c_bool), ("data_bytes", c_uint32),
                ("scale_bytes", c_uint32), ("bytes_per_token", c_uint32), ("row_bytes", c_uint32),
                ("loaded_row_bytes", c_uint32), ("loaded_scale_bytes", c_uint32), ("note", c_char * 256)]


class RegionSpec(Checked):
    _fields_ = [("name", c_char_p), ("format", c_char_p), ("width", c_uint32), ("compression_ratio", c_uint32),
                ("num_layers", c_uint32), ("note", c_char_p)]


class PoolSpec(Checked):
    _fields_ = [("name", c_char_p), ("kind", c_int), ("block_size", c_uint32), ("num_blocks", c_uint32),
                ("placements", POINTER(c_char_p)), ("placement_count", c_size_t), ("regions", POINTER(RegionSpec)),
                ("region_count", c_size_t), ("namespace_name", c_char_p)]


class RegionInfo(Structure):
    _fields_ = [("name", NAME), ("format", NAME), ("note", c_char * 256), ("width", c_uint32),
                ("compression_ratio", c_uint32), ("num_layers", c_uint32), ("tokens_per_block", c_uint32),
                ("bytes_per_token", c_uint32), ("data_bytes", c_uint32), ("scale_bytes", c_uint32),
                ("block_stride_bytes", c_uint64), ("layer_stride_bytes", c_uint64), ("region_bytes", c_uint64)]


class SessionEvent(Structure):
    _fields_ = [("kind", c_int), ("device", c_char_p), ("pool_id", c_uint64), ("blocks", POINTER(c_int32)),
                ("block_count", c_size_t), ("error", POINTER(ErrorStruct))]


SESSION_EVENT_FN = CFUNCTYPE(None, c_void_p, POINTER(SessionEvent))


class SessionOptions(Checked):
    _fields_ = [("size_bytes", c_size_t), ("name", c_char_p), ("namespace_name", c_char_p), ("blocks_max", c_uint32),
                ("on_event", SESSION_EVENT_FN), ("context", c_void_p)]


class Layer(Checked):
    _fields_ = [("pool", HANDLE), ("region", c_uint32), ("layer", c_uint32)]


class View(Checked):
    _fields_ = [("buffer", HANDLE), ("offset_bytes", c_uint64), ("rows", c_uint64), ("row_stride_bytes", c_uint64),
                ("row_bytes", c_uint32)]


class AssembleSwa(Checked):
    _fields_ = [("layer", Layer), ("segments", c_uint32), ("total_k", c_uint64)]


class AssembleChunk(Checked):
    _fields_ = [("source", POINTER(View)), ("reserved", c_uint64), ("gather", POINTER(c_uint32)),
                ("store_slots", POINTER(c_uint32)), ("cast_back", c_bool), ("layer", POINTER(Layer))]


class AssembleCompressed(Checked):
    _fields_ = [("layer", Layer), ("segments", c_uint32), ("total_k", c_uint64), ("keep_compressed", c_bool)]


class FusedStore(Checked):
    _fields_ = [("layer", Layer), ("source", View), ("norm_weight", View), ("eps", c_float), ("slots", c_uint32),
                ("positions", c_uint32), ("cos_sin", POINTER(View)), ("rope_offset", POINTER(c_uint32)),
                ("neox", c_bool), ("hadamard", c_bool), ("keep_float32", c_bool), ("cast_back", POINTER(View))]


class Matrix(Checked):
    _fields_ = [("view", POINTER(View)), ("array", c_uint32)]


class OpReport(Structure):
    _fields_ = [(name, c_uint64) for name in (
        "rows_stored", "rows_loaded", "rows_skipped", "rows_rejected", "rows_nonfinite", "groups_saturated",
        "bytes_read", "bytes_written", "queued_ns", "started_ns", "finished_ns")] + [
            ("unchecked_arrays", c_bool), ("hazard_unchecked", c_bool), ("main_kv_offset", c_uint64)]


class CompletionStruct(Structure):
    _fields_ = [("step_id", c_uint64), ("accepted", c_bool), ("error", POINTER(ErrorStruct)),
                ("reports", POINTER(OpReport)), ("report_count", c_size_t)]


COMPLETION_FN = CFUNCTYPE(None, c_void_p, POINTER(CompletionStruct))


class Sequence(Checked):
    _fields_ = [("seqlen_k", c_int64), ("seqlen_q", c_int64), ("block_table", POINTER(c_int32)),
                ("table_count", c_size_t)]


class SwaSequence(Checked):
    _fields_ = [("state_id", c_int32), ("seqlen_k", c_int64), ("seqlen_q", c_int64), ("swa_valid_start", c_int64)]


class AttachOptions(Checked):
    _fields_ = [("size_bytes", c_size_t), ("socket", c_char_p), ("session_id", c_uint64), ("secret", c_uint8 * 16),
                ("device", c_char_p), ("timeout_ms", c_uint32)]


class AttachmentInfo(Structure):
    _fields_ = [("attachment_id", c_uint64), ("generation", c_uint64), ("epoch", c_uint64),
                ("deadline_ns_max", c_uint64), ("steps_in_flight", c_uint32), ("mps", c_bool),
                ("device_memory", c_bool), ("device", NAME), ("uuid", NAME)]


class MappedRegionStruct(Structure):
    _fields_ = [("base", c_void_p), ("memory_bytes", c_uint64), ("num_layers", c_uint32), ("num_blocks", c_uint32),
                ("tokens_per_block", c_uint32), ("bytes_per_token", c_uint32), ("data_bytes", c_uint32),
                ("scale_bytes", c_uint32), ("layer_stride_bytes", c_uint64), ("block_stride_bytes", c_uint64),
                ("token_interleaved", c_bool), ("token_stride_bytes", c_uint32), ("scale_stride_bytes", c_uint32),
                ("scales_offset_bytes", c_uint64)]


class ArrayStruct(Checked):
    _fields_ = [("data", c_void_p), ("ndim", c_int32), ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)),
                ("type_code", c_uint8), ("type_bits", c_uint8)]


class PostOptions(Checked):
    _fields_ = [("size_bytes", c_size_t), ("base", c_uint64), ("deadline_ms", c_uint32), ("want_accepted", c_bool)]


class ReplayOptions(Checked):
    _fields_ = [("size_bytes", c_size_t), ("mode", c_int), ("deadline_ms", c_uint32)]


# Name in C of each struct above, for whoever compares layouts.
STRUCTS = {
    "kvpool_error": ErrorStruct, "kvpool_connect_options": ConnectOptions, "kvpool_device_info": DeviceInfo,
    "kvpool_format_info": FormatInfo, "kvpool_region_spec": RegionSpec, "kvpool_pool_spec": PoolSpec,
    "kvpool_region_info": RegionInfo, "kvpool_session_event": SessionEvent, "kvpool_session_options": SessionOptions,
    "kvpool_layer": Layer, "kvpool_view": View, "kvpool_assemble_swa": AssembleSwa,
    "kvpool_assemble_chunk": AssembleChunk, "kvpool_assemble_compressed": AssembleCompressed,
    "kvpool_fused_store": FusedStore, "kvpool_matrix": Matrix, "kvpool_op_report": OpReport,
    "kvpool_completion": CompletionStruct, "kvpool_sequence": Sequence, "kvpool_swa_sequence": SwaSequence,
    "kvpool_attach_options": AttachOptions, "kvpool_attachment_info": AttachmentInfo,
    "kvpool_mapped_region": MappedRegionStruct, "kvpool_array": ArrayStruct, "kvpool_post_options": PostOptions,
    "kvpool_replay_options": ReplayOptions,
}

_I32 = POINTER(c_int32)
_ERROR = POINTER(ErrorStruct)
_OUT = POINTER(HANDLE)
_U32, _U64, _SIZE = POINTER(c_uint32), POINTER(c_uint64), POINTER(c_size_t)
_VIEW, _LAYER, _MATRIX = POINTER(View), POINTER(Layer), POINTER(Matrix)
_SEQUENCES, _SWA = POINTER(Sequence), POINTER(SwaSequence)
_PLAN_TAIL = (c_void_p, ("capacity", c_size_t), _SIZE)

# Calls that can fail: their last argument, the error, is not listed. What programs give has its name.
_FALLIBLE = {
    "client_connect": (("target", c_char_p), POINTER(ConnectOptions), _OUT),
    "server_info_get": (HANDLE, _OUT),
    "pool_create": (HANDLE, POINTER(PoolSpec), _OUT),
    "pool_open": (HANDLE, ("name", TEXT), _OUT),
    "pool_refresh": (HANDLE,),
    "pool_delete": (HANDLE, c_bool),
    "session_open": (HANDLE, POINTER(SessionOptions), _OUT),
    "session_state": (HANDLE,),
    "blocks_allocate": (HANDLE, HANDLE, ("count", c_uint32), _I32),
    "blocks_allocate_range": (HANDLE, HANDLE, ("first", c_uint32), ("count", c_uint32)),
    "blocks_free": (HANDLE, HANDLE, c_void_p, ("blocks", c_uint32)),
    "buffer_create": (HANDLE, ("device", c_char_p), ("count", c_uint64), _OUT),
    "buffer_write": (HANDLE, ("offset_bytes", c_uint64), c_void_p, ("count", c_uint64)),
    "buffer_read": (HANDLE, ("offset_bytes", c_uint64), c_void_p, ("count", c_uint64)),
    "buffer_release": (HANDLE,),
    "buffer_export": (HANDLE, POINTER(ArrayStruct), c_bool, _OUT),
    "step_new": (HANDLE, _OUT),
    "step_set_placement": (HANDLE, ("device", c_char_p)),
    "step_add_array": (HANDLE, c_void_p, ("values", c_size_t), _U32),
    "step_add_buffer_array": (HANDLE, HANDLE, ("offset_bytes", c_uint64), ("count", c_uint64), _U32),
    "step_add_store": (HANDLE, _LAYER, _VIEW, ("slots", c_uint32), _VIEW),
    "step_add_load_flags": (HANDLE, _LAYER, ("segments", c_uint32), ("total_k", c_uint64), _VIEW, _VIEW,
                            ("flags", c_uint32)),
    "step_add_assemble": (HANDLE, _VIEW, POINTER(AssembleSwa), POINTER(AssembleChunk), POINTER(AssembleCompressed),
                          ("flags", c_uint32)),
    "step_add_fused_store": (HANDLE, POINTER(FusedStore)),
    "step_add_convert_kv_index": (HANDLE, _LAYER, _MATRIX, ("block_tables", c_uint32), ("table_columns", c_uint32),
                                  ("valid", c_uint32), ("queries", c_uint32), _VIEW),
    "step_add_swa_index_decode": (HANDLE, _LAYER, ("offset_len", c_uint32), ("window", c_uint32), _VIEW),
    "step_add_expand_swa_index": (HANDLE, ("pivots", c_uint32), ("width", c_uint32), _VIEW),
    "step_add_kv_index_cat": (HANDLE, _MATRIX, ("left_columns", c_uint32), _MATRIX, ("right_columns", c_uint32),
                              ("right_base", c_int32), _VIEW),
    "step_add_copy_blocks": (HANDLE, HANDLE, ("pairs", c_uint32)),
    "step_add_zero_blocks": (HANDLE, HANDLE, ("blocks", c_uint32)),
    "step_set_wait": (HANDLE, ("word", c_uint32), ("value", c_uint64)),
    "step_set_signal": (HANDLE, ("word", c_uint32), ("value", c_uint64)),
    "step_run": (HANDLE, POINTER(OpReport), ("reports", c_size_t)),
    "queue_open": (HANDLE, COMPLETION_FN, c_void_p, c_bool, _OUT),
    "queue_submit": (HANDLE, HANDLE, _U64),
    "queue_wait": (HANDLE,),
    "rows_store": (HANDLE, _LAYER, c_void_p, ("rows", c_uint64), ("row_bytes", c_uint32), c_void_p,
                   ("slots", c_size_t), POINTER(OpReport)),
    "rows_load": (HANDLE, _LAYER, c_void_p, ("segments", c_size_t), ("total_k", c_uint64), c_void_p, c_void_p,
                  POINTER(OpReport)),
    "plan_paged_range": (c_void_p, ("block_table", c_size_t), ("tokens_per_block", c_uint32), ("token_begin", c_int64),
                         ("token_end", c_int64), ("dst_begin", c_int32), *_PLAN_TAIL),
    "plan_slot_mapping": (c_void_p, ("block_table", c_size_t), ("tokens_per_block", c_uint32), ("token_begin", c_int64),
                          ("token_end", c_int64), c_void_p),
    "plan_new_compressed": (("seqlen_k", c_int64), ("seqlen_q", c_int64), ("ratio", c_uint32), POINTER(c_int64),
                            POINTER(c_int64)),
    "plan_compressed": (_SEQUENCES, ("sequences", c_size_t), ("ratio", c_uint32), ("tokens_per_block", c_uint32),
                        c_void_p, *_PLAN_TAIL, POINTER(c_int64)),
    "plan_compressed_visible": (_SEQUENCES, ("sequences", c_size_t), ("ratio", c_uint32), c_void_p, c_void_p, c_void_p,
                                ("queries", c_size_t)),
    "plan_swa": (_SWA, ("sequences", c_size_t), ("window", c_uint32), ("ring_tokens", c_uint32), *_PLAN_TAIL,
                 POINTER(c_int64)),
    "plan_swa_slots": (_SWA, ("sequences", c_size_t), ("ring_tokens", c_uint32), *_PLAN_TAIL),
    "plan_swa_pivots": (_SWA, ("sequences", c_size_t), ("window", c_uint32), *_PLAN_TAIL),
    "plan_swa_decode": (_SWA, ("sequences", c_size_t), ("window", c_uint32), ("ring_tokens", c_uint32), *_PLAN_TAIL),
    "plan_mirror": (POINTER(c_int64), ("seqlens_q", c_size_t), ("ranks", c_uint32), ("rank", c_uint32), *_PLAN_TAIL),
    "plan_mirror_reverse": (POINTER(c_int64), ("seqlens_q", c_size_t), ("ranks", c_uint32), *_PLAN_TAIL),
    "attach": (POINTER(AttachOptions), _OUT),
    "attachment_state": (HANDLE,),
    "attachment_map_pool": (HANDLE, ("name", TEXT), ("access", c_int), _OUT),
    "attachment_create_buffer": (HANDLE, ("count", c_uint64), _OUT),
    "attachment_map_buffer": (HANDLE, ("buffer_id", c_uint64), _OUT),
    "attachment_import_memfd": (HANDLE, ("fd", c_int), ("memfd_bytes", c_uint64), ("offset_bytes", c_uint64),
                                ("count", c_uint64), _OUT),
    "attachment_import_device": (HANDLE, ("address", c_void_p), ("count", c_uint64), _OUT),
    "attachment_import_vmm": (HANDLE, ("fd", c_int), ("allocation_bytes", c_uint64), ("offset_bytes", c_uint64),
                              ("count", c_uint64), ("address", c_void_p), _OUT),
    "timeline_device_address": (HANDLE, ("word", c_uint32), _U64),
    "timeline_stream_signal": (HANDLE, ("word", c_uint32), ("value", c_uint64), ("stream", c_void_p)),
    "timeline_stream_wait": (HANDLE, ("word", c_uint32), ("value", c_uint64), ("stream", c_void_p)),
    "memfd_create": (("name", TEXT), ("count", c_uint64), POINTER(c_int)),
    "pool_map_export": (HANDLE, POINTER(ArrayStruct), c_bool, _OUT),
    "attachment_step_new": (HANDLE, _OUT),
    "attachment_post": (HANDLE, HANDLE, POINTER(PostOptions), _U64),
    "attachment_poll": (HANDLE, POINTER(POINTER(CompletionStruct))),
    "attachment_wait": (HANDLE, ("timeout_ms", c_uint32), POINTER(POINTER(CompletionStruct))),
    "attachment_run": (HANDLE, HANDLE, POINTER(PostOptions), POINTER(OpReport), ("reports", c_size_t)),
    "timeline_new": (HANDLE, ("writer", c_int), _U32, _U64),
    "timeline_signal": (HANDLE, ("word", c_uint32), ("value", c_uint64)),
    "timeline_poison": (HANDLE, ("word", c_uint32)),
    "timeline_read": (HANDLE, ("word", c_uint32), _U64),
    "timeline_wait": (HANDLE, ("word", c_uint32), ("value", c_uint64), ("timeout_ms", c_uint32)),
    "replay_new": (HANDLE, ("points", c_uint32), POINTER(ReplayOptions), _OUT),
    "step_set_replay_points": (HANDLE, ("begins", c_uint32), ("ends", c_uint32)),
    "replay_post": (HANDLE, HANDLE, _U64),
    "replay_begin": (HANDLE, ("stream", c_void_p)),
    "replay_end": (HANDLE, ("stream", c_void_p), ("last_point", c_uint32)),
    "replay_signal": (HANDLE, ("stream", c_void_p), ("point", c_uint32)),
    "replay_wait": (HANDLE, ("stream", c_void_p), ("point", c_uint32)),
    "replay_signal_and_wait": (HANDLE, ("stream", c_void_p), ("point", c_uint32)),
    "replay_check": (HANDLE,),
}

# The others: result, arguments.
_PLAIN = {
    "version": (c_char_p,),
    "client_destroy": (None, HANDLE),
    "client_interrupt": (None, HANDLE, ("timeout_ms", c_uint32)),
    "server_info_destroy": (None, HANDLE),
    "server_info_version": (c_char_p, HANDLE),
    "server_info_pid": (c_uint64, HANDLE),
    "server_info_attach_socket": (c_char_p, HANDLE),
    "server_info_device_count": (c_size_t, HANDLE),
    "server_info_device": (POINTER(DeviceInfo), HANDLE, ("index", c_size_t)),
    "server_info_format_count": (c_size_t, HANDLE),
    "server_info_format": (POINTER(FormatInfo), HANDLE, ("index", c_size_t)),
    "pool_destroy": (None, HANDLE),
    "pool_id": (c_uint64, HANDLE),
    "pool_name": (c_char_p, HANDLE),
    "pool_get_kind": (c_int, HANDLE),
    "pool_block_size": (c_uint32, HANDLE),
    "pool_num_blocks": (c_uint32, HANDLE),
    "pool_free_blocks": (c_uint32, HANDLE),
    "pool_placement_count": (c_size_t, HANDLE),
    "pool_placement": (c_char_p, HANDLE, ("index", c_size_t)),
    "pool_region_count": (c_size_t, HANDLE),
    "pool_region": (POINTER(RegionInfo), HANDLE, ("index", c_size_t)),
    "session_close": (None, HANDLE),
    "session_id": (c_uint64, HANDLE),
    "session_secret": (None, HANDLE, c_void_p),
    "session_epoch": (c_uint64, HANDLE),
    "buffer_id": (c_uint64, HANDLE),
    "buffer_bytes": (c_uint64, HANDLE),
    "buffer_data": (c_void_p, HANDLE),
    "step_destroy": (None, HANDLE),
    "step_clear": (None, HANDLE),
    "queue_close": (None, HANDLE),
    "detach": (None, HANDLE),
    "attachment_info_get": (None, HANDLE, POINTER(AttachmentInfo)),
    "attachment_saw_epoch": (None, HANDLE, ("epoch", c_uint64)),
    "attachment_dl_device": (None, HANDLE, POINTER(c_int32), POINTER(c_int32)),
    "attachment_fd": (c_int, HANDLE),
    "attachment_arm": (c_bool, HANDLE),
    "pool_map_destroy": (None, HANDLE),
    "pool_map_pool": (HANDLE, HANDLE),
    "pool_map_region": (POINTER(MappedRegionStruct), HANDLE, ("index", c_size_t)),
    "timeline_free": (None, HANDLE, ("word", c_uint32)),
    "replay_destroy": (None, HANDLE),
    "replay_mode_get": (c_int, HANDLE),
    "replay_abort": (None, HANDLE),
}


def _load():
    """$KVPOOL_LIBRARY, else what the loader finds."""
    name = os.environ.get("KVPOOL_LIBRARY") or ctypes.util.find_library("kvpool") or "libkvpool.so.0"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise ImportError(f"{error}: install libkvpool, or let KVPOOL_LIBRARY name libkvpool.so") from None


def _typed(function, result, types):
    """What turns the arguments of a call into what the function takes."""
    named = [found if isinstance(found, tuple) else (None, found) for found in types]
    function.restype, function.argtypes = result, [kind for _, kind in named]
    checked = [(index, name, kind) for index, (name, kind) in enumerate(named) if name is not None]

    def arguments_of(arguments):
        arguments = list(arguments)
        for index, name, kind in checked:
            arguments[index] = given(name, arguments[index], kind)
        return arguments

    return arguments_of if checked else tuple


def _fallible(function, types):
    arguments_of = _typed(function, STATUS, [*types, _ERROR])

    def call(*arguments):
        error = ErrorStruct()
        if function(*arguments_of(arguments), byref(error)) != 0:
            raise error_from(error)

    call.c_function = function
    return call


def _plain(function, result, types):
    arguments_of = _typed(function, result, types)
    if arguments_of is tuple:
        return function
    return lambda *arguments: function(*arguments_of(arguments))


class _Functions:
    """Functions by their name without kvpool_; those that can fail raise."""

    def __init__(self, library):
        for name, types in _FALLIBLE.items():
            setattr(self, name, _fallible(getattr(library, f"kvpool_{name}"), types))
        for name, (result, *types) in _PLAIN.items():
            setattr(self, name, _plain(getattr(library, f"kvpool_{name}"), result, types))


library = _Functions(_load())


class OfProcess:
    """Something of the library's is the business of the process that made it alone. A child of a fork has neither the
    threads nor the ring behind a handle: it gives nothing back, and whoever uses one there is told."""

    _pid = None

    def _is_here(self):
        return self._pid == os.getpid()

    def _check_process(self):
        if not self._is_here():
            raise error_of_fork(type(self).__name__, self._pid)

    def _finalize(self, release, *arguments):
        """To be called when this object is gone, or at exit."""
        self._pid = os.getpid()
        return weakref.finalize(self, _release, self._pid, release, *arguments)


def _release(pid, release, *arguments):
    if os.getpid() == pid:
        release(*arguments)


_gone = collections.deque()  # of holds and watches: what nobody has any more
_watches = {}  # by the id of their hold


def give_back_gone(gone):
    """Whoever is interrupted here leaves the rest, and what it was at, to the next."""
    while gone:
        first = gone[0]
        first.give_back()
        if gone and gone[0] is first:
            gone.popleft()


class Hold(HANDLE):
    """A handle, to be given back once. It is there before the call that writes the handle into it: whatever a signal
    handler raises, and wherever, the handle is somebody's. Handlers run behind calls and at the begin of functions of
    Python's; where no handle may get lost there is none between two lines."""

    _release = None

    def __init__(self, release, *arguments, turns=None):
        """release(handle, *arguments): a function of C's. turns: in one of which it is given back when it is gone."""
        super().__init__()
        self._arguments, self._turns, self._pid = arguments, turns, os.getpid()
        self._gone = _gone if turns is None else turns.gone
        self._release = release

    def give_back(self):
        """What the function returns; None when it has been given back, or is another process's."""
        if self._pid != os.getpid():
            return None
        _watches.pop(id(self), None)
        handle, self.value = self.value, None
        return self._release(handle, *self._arguments) if handle is not None else None

    def watch(self, owner):
        """It is gone with its owner."""
        watch = _Watch(owner, self._gone.append)
        watch.hold = self
        _watches[id(self)] = watch

    def drop(self):
        """Nobody has it any more."""
        self._gone.append(self)
        if self._turns is None or self._turns.is_over:
            give_back_gone(self._gone)

    def __del__(self):
        """It never had an owner."""
        if self._release is not None and self.value is not None and self._pid == os.getpid():
            self.drop()


class _Watch(weakref.ref):
    """Tells that an owner is gone by C alone: a finalizer of Python's can be interrupted before its first line."""
    __slots__ = ("hold",)

    def give_back(self):
        self.hold.give_back()


class FallibleHold(Hold):
    """Of a release that can fail."""

    def __init__(self, release, turns=None):
        self._error = ErrorStruct()
        super().__init__(release.c_function, byref(self._error), turns=turns)

    def give_back_or_raise(self):
        if self.give_back():
            raise error_from(self._error)


class Owned(OfProcess):
    """Something of the library's that this object gives back: when it is told to, when it is gone, at exit."""

    _handle = None

    def _make(self, hold, call, *arguments):
        """call(*arguments, out)"""
        give_back_gone(_gone)
        call(*arguments, byref(hold))
        self._handle = hold
        self._finalizer = self._finalize(hold.drop)
        hold.watch(self)

    @property
    def handle(self):
        handle = self._handle
        if handle is None:
            raise ValueError(f"this {type(self).__name__} has been given back")
        self._check_process()
        return handle

    def _disown(self):
        """What is to be given back at once; None: it has been."""
        hold, self._handle = self._handle, None
        if hold is not None:
            self._finalizer.detach()
        return hold

    def _give_back(self):
        hold = self._disown()
        if hold is not None:
            hold.give_back()


_callback = threading.local()
_callbacks_kept = []


def is_in_callback():
    """On a thread of the library's, where nothing may wait for it."""
    return getattr(_callback, "is_running", False)


def callback(kind, function):
    """A function of the library's type `kind` that calls function(what is pointed to)."""
    def tell(_, told):
        _callback.is_running = True
        try:
            function(told.contents)
        finally:
            _callback.is_running = False

    return kind(tell)


def drop_callback(function):
    """Who gave callbacks has been closed. One that runs is still needed when it returns."""
    if is_in_callback():
        _callbacks_kept.append(function)


class CallbackHold(Hold):
    """Of somebody who gives callbacks, until it has been closed."""

    def __init__(self, release, function):
        self._function = function
        super().__init__(release)

    def give_back(self):
        super().give_back()
        drop_callback(self._function)


class ClientHold(Hold):
    """Given back by another thread where the last of a client went inside a callback: it waits for the thread that runs
    those."""

    def give_back(self):
        if is_in_callback():
            threading.Thread(target=super().give_back).start()
        else:
            super().give_back()


def fields_of(struct):
    """A struct of plain fields as a dict."""
    values = {name: getattr(struct, name) for name, *_ in struct._fields_}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}
