"""Turns: the threads of a process on one attachment."""
import collections
import os
import threading

from ._errors import error_of_fork
from ._library import OfProcess, give_back_gone


class Turns(OfProcess):
    """One thread at a time, in the order in which they came: who waits in slices lets the others in between. A thread
    whose turn it is may ask for one inside; so may a signal handler that interrupts it, also where it still queues.

    Who comes holds a place from then until its turn is over, and first waits for the place before its own. Places make
    the order alone: `_lock` keeps threads apart, also when a handler's exception takes one out of the queue. All that
    is held is held by `with` of a lock of Python's own, which no exception of a handler gets in between.

    What nobody has any more - it may be collected in the middle of a call, and by any thread - is given back when it is
    somebody's turn."""

    def __init__(self):
        self._pid = os.getpid()
        self._lock, self._last = threading.RLock(), threading.RLock()
        self._own = threading.local()
        self.gone = collections.deque()  # of Hold
        self.is_over = False

    def __call__(self, function, *arguments, **options):
        """What the function returns, when it is this thread's turn."""
        if not self._is_here():
            raise error_of_fork("Attachment", self._pid)
        place = getattr(self._own, "place", None)
        if place is not None and place._is_owned():
            with self._lock:
                return function(*arguments, **options)
        place = threading.RLock()
        with place:
            self._own.place = place
            before, self._last = self._last, place
            with before:
                pass
            with self._lock:
                give_back_gone(self.gone)
                return function(*arguments, **options)

    def end(self, hold):
        """The attachment that it holds has no user any more; what was made by it is this process's alone."""
        self.is_over = True
        hold.give_back()
        give_back_gone(self.gone)
