"""Fixtures for tests of workers by the Python package, to be imported: a scheduler, its session, a pool of the module's
BLOCK_SIZE, BLOCKS and REGIONS, seven blocks of it, and a worker that is attached to the session."""
import pytest

from support.device import DEVICE
from support.libkvpool import kvpool


@pytest.fixture(scope="module")
def scheduler(daemon):
    with kvpool.Client(str(daemon.socket), wait_until_serving=True) as made:
        yield made


@pytest.fixture
def session(scheduler):
    with scheduler.open_session("engine") as made:
        yield made


@pytest.fixture
def pool(request, scheduler, pool_name):
    of = request.module
    made = scheduler.create_pool(pool_name, of.BLOCK_SIZE, of.BLOCKS, of.REGIONS)
    yield made
    made.delete(force=True)


@pytest.fixture
def blocks(session, pool):
    return session.allocate(pool, 7)


@pytest.fixture
def worker(session, blocks):
    """Attached when the session has the blocks."""
    with kvpool.attach(session.ticket(DEVICE)) as made:
        yield made
