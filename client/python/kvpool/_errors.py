"""What a call that fails raises."""
import enum


class Status(enum.IntEnum):
    OK = 0
    INVALID_ARGUMENT = 1
    OUT_OF_RANGE = 2
    NOT_OWNER = 3
    STALE_BLOCK = 4
    SEALED_BLOCK = 5
    HAZARD_STORE_BEFORE_LOAD = 6
    WRONG_FORMAT = 7
    WRONG_DEVICE = 8
    TOO_LARGE = 9
    BUSY = 10
    UNKNOWN_SESSION = 11
    DEVICE_LOST = 12
    UNKNOWN_POOL = 13
    UNKNOWN_REGION = 14
    UNKNOWN_LAYER = 15
    UNKNOWN_BUFFER = 16
    WRONG_SECRET = 17
    PERMISSION_DENIED = 18
    OUT_OF_MEMORY = 19
    OUT_OF_BLOCKS = 20
    ALREADY_EXISTS = 21
    MALFORMED = 22
    QUOTA_EXCEEDED = 23
    DEADLINE_EXCEEDED = 24
    CANCELLED = 25
    SHUTTING_DOWN = 26
    UNIMPLEMENTED = 27
    IN_USE = 28
    VERSION_MISMATCH = 29
    INTERNAL = 30
    DISCONNECTED = 100
    NO_MEMORY = 101


class Error(Exception):
    """status: a Status. op: index of the op in its step, or None. array, position, value: which element was wrong."""

    def __init__(self, status, text, op=None, array="", position=None, value=0):
        super().__init__(f"{status.name.lower()}: {text}")
        self.status, self.text, self.op = status, text, op
        self.array, self.position, self.value = array, position, value


class Busy(Error):
    """The ring, or the queue, is full: take completions, then try again."""


class DeviceLost(Error):
    """The executor died; it is replaced by itself."""


class DeadlineExceeded(Error):
    """Not done in time."""


class Disconnected(Error):
    """The daemon is gone."""


_CLASSES = {Status.BUSY: Busy, Status.DEVICE_LOST: DeviceLost, Status.DEADLINE_EXCEEDED: DeadlineExceeded,
            Status.DISCONNECTED: Disconnected}


def error_of_fork(what, pid):
    return Error(Status.INVALID_ARGUMENT, f"this {what} is of process {pid}, no handle survives a fork")


def error_from(struct):
    """An Error of libkvpool's kvpool_error."""
    try:
        status = Status(struct.status)
    except ValueError:
        status = Status.INTERNAL
    return _CLASSES.get(status, Error)(
        status, struct.text.decode(errors="replace"), struct.op if struct.op >= 0 else None,
        struct.array.decode(errors="replace"), struct.position if struct.position >= 0 else None, struct.value)
