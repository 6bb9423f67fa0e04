"""A rehearsal host for the tests: apart from the user's own, and gone when they end, however they end."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy_target import State, Target
from rehearsal_commands import REPOSITORY, Rehearsal, booted

# Five minutes each and more: `make extended` runs them, `make test` does not. pytest obeys this only where a module is
# not named on its command line.
collect_ignore = [
    "test_deployed_arms.py",
    "test_release_sources.py",
    "test_rolling.py",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the modules that share the host, test_deploy.py comes first: it needs the host as it was booted."""
    items.sort(key=lambda item: item.path.parent == Path(__file__).parent and item.path.name != "test_deploy.py")


# In the checkout rather than in a folder for temporary files, which may be too small for a host with SGLang.
@pytest.fixture(scope="session")
def rehearsal_host() -> Iterator[Rehearsal]:
    """A host of the tests' own, with the model at hand that the inventory serves."""
    with booted(REPOSITORY / ".rehearsal/tests") as rehearsal:
        done = rehearsal.rehearsal("model")
        assert done.returncode == 0, done.stderr
        yield rehearsal


@pytest.fixture(scope="module")
def target(rehearsal_host: Rehearsal) -> Target:
    """The tests' host, with a deployment that serves."""
    target = Target(rehearsal_host)
    if not target.is_healthy():
        done = target.deploy("--skip-tags", "load")
        assert done.returncode == 0, done.stdout
    return target


@pytest.fixture
def unharmed(target: Target) -> Iterator[State]:
    """The deployment that serves; afterwards the same one must still serve, by the same process."""
    before = target.state()
    yield before
    assert target.state() == before
    assert target.is_healthy()
