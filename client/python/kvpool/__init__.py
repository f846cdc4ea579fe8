"""kvpool: client of kvpoold, the daemon that owns the paged KV pool of a host.

A scheduler: Client, its pools, open_session, Session (blocks, buffers, steps over gRPC, ticket).
A worker on the same host: attach(ticket), Attachment (map_pool, buffers, steps through a ring, timelines).
plan: planners of slots and segments, which need no daemon.

Everything that fails raises Error, which names the op, the array, the position and the value.
"""
from . import plan
from ._array import Array
from ._attachment import (EXECUTOR, NOTHING, READ, READ_WRITE, WORKER, Attachment, AttachmentStep, MappedBuffer,
                          PoolMap, Region, Word, attach, make_memfd)
from ._client import PAGED, RING, Buffer, Client, Completion, Pool, Queue, Session, SessionStep, Ticket
from ._errors import Busy, DeadlineExceeded, DeviceLost, Disconnected, Error, Status
from ._library import library as _library
from ._replay import AUTOMATIC, BY_OP, ONE_LAUNCH, Replay
from ._step import BufferArray, LayerRef, Report, Step, ViewRef

__all__ = [
    "AUTOMATIC", "BY_OP", "EXECUTOR", "NOTHING", "ONE_LAUNCH", "PAGED", "READ", "READ_WRITE", "RING", "WORKER",
    "Array", "Attachment", "AttachmentStep", "Buffer", "BufferArray", "Busy", "Client", "Completion",
    "DeadlineExceeded", "DeviceLost", "Disconnected", "Error", "LayerRef", "MappedBuffer", "Pool", "PoolMap", "Queue",
    "Region", "Replay", "Report", "Session", "SessionStep", "Status", "Step", "Ticket", "ViewRef", "Word", "attach",
    "make_memfd", "plan", "version",
]


def version():
    """Of the library that is loaded."""
    return _library.version().decode()
