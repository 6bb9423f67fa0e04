"""Runs that are ended from outside end as with Ctrl-C: fixtures take down the servers and hosts that they started."""

import signal


def pytest_sessionstart() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
