"""Fixtures: one daemon shared by the tests of a module, and fresh ones for tests that need flags or break things."""
import itertools

import pytest

from support.daemon import Daemon

_names = itertools.count(1)


@pytest.fixture(scope="module")
def daemon():
    with Daemon() as running:
        yield running


@pytest.fixture
def start_daemon():
    """start_daemon(*flags, **options): stopped, and checked for leftovers, at the end of the test."""
    running = []

    def start(*flags, **options):
        started = Daemon(*flags, **options)
        running.append(started)
        return started

    yield start
    for started in running:
        if started.process.poll() is None:
            started.stop()
        else:
            started.remove()


@pytest.fixture
def client(daemon):
    opened = daemon.client()
    yield opened
    opened.close()
    daemon.clients.remove(opened)


@pytest.fixture
def session(client):
    opened = client.open_session()
    yield opened
    if not opened.ended.is_set():
        opened.close()


@pytest.fixture
def pool_name():
    """Names never repeat: the memfds of a pool are found by name."""
    return f"p{next(_names)}"
