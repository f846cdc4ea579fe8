"""Captured CUDA graphs: what the daemon does at their points."""
import ctypes
from ctypes import byref, c_uint64

from ._library import Hold, Owned, ReplayOptions, library

AUTOMATIC, ONE_LAUNCH, BY_OP = 0, 1, 2


def _address(stream):
    """Of a torch.cuda.Stream, a CUstream as a number, or None: the default stream, and what a host device takes."""
    return getattr(stream, "cuda_stream", stream)


class Replay(Owned):
    """Points 1 to `points` of graphs that are launched one after another on the attachment's device.

    While a graph is captured, all on its stream: `begin`, then `signal` and `wait` (or both at once) in its layers, and
    `end`. For each launch of it: `post` a step, whose ops have points (AttachmentStep.points), before or after. On a host
    device there are no graphs: begin, signal, wait and end act at once.

    mode: of tests and benchmarks. deadline_ms: of each wait of a graph, and of a step's waits together; 0, or more than
    the daemon's: the daemon's. Of a GPU, the context is current in which graphs are captured, and no capture is under
    way. Destroyed when no graph runs."""

    def __init__(self, attachment, points, mode=AUTOMATIC, deadline_ms=0):
        options = ReplayOptions(ctypes.sizeof(ReplayOptions), mode, deadline_ms)
        self.attachment, self.points = attachment, points
        attachment.turn(self._make, Hold(library.replay_destroy, turns=attachment.turn), library.replay_new,
                        attachment.handle, points, byref(options))
        self.mode = library.replay_mode_get(self.handle)

    def destroy(self):
        """No graph with its points runs, or is launched any more. Returns when the daemon has released its words,
        behind the steps that use them, at most after the attachment's timeout; other threads' calls wait meanwhile."""
        if self._is_here():
            self.attachment.turn(self._give_back)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.destroy()

    def begin(self, stream=None):
        """First on the stream, once a launch: counts it."""
        library.replay_begin(self.handle, _address(stream))

    def signal(self, stream, point):
        """Op `point` may begin: all before this on the stream is done."""
        library.replay_signal(self.handle, _address(stream), point)

    def wait(self, stream, point):
        """What follows on the stream sees what the op that ends at `point`, and those before it, have done."""
        library.replay_wait(self.handle, _address(stream), point)

    def signal_and_wait(self, stream, point):
        """Both, by one kernel where that is possible."""
        library.replay_signal_and_wait(self.handle, _address(stream), point)

    def end(self, stream, last_point):
        """Last on the stream, once a launch: waits for the step's last point."""
        library.replay_end(self.handle, _address(stream), last_point)

    def post(self, step):
        """The step of one launch, all of whose ops have points, the last one its end; its id. As Attachment.post."""
        step_id = c_uint64()
        self.attachment.turn(lambda: library.replay_post(self.handle, step.handle, byref(step_id)))
        return step_id.value

    def check(self):
        """Raises when a wait of a graph ended without its point. Then make another Replay, and capture anew."""
        library.replay_check(self.handle)

    def abort(self):
        """Waits of graphs that run, or will be launched, end at once. Any thread."""
        library.replay_abort(self.handle)
