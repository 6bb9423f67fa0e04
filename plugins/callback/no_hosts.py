"""Ends a run with an error when a play matches no host; Ansible itself skips such a play and exits with 0."""

from __future__ import annotations

import sys

from ansible.playbook.play import Play
from ansible.plugins.callback import CallbackBase
from ansible.utils.display import Display

DOCUMENTATION = """
    name: no_hosts
    type: notification
    short_description: A play without hosts is an error
    description:
      - A deploy that reached no host deployed nothing. It must not look like a success. Only a router is not needed, so
        the plays of C(sglang_router) may be without hosts.
"""


class CallbackModule(CallbackBase):  # type: ignore[misc]
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "notification"
    CALLBACK_NAME = "no_hosts"

    def v2_playbook_on_play_start(self, play: Play) -> None:
        self._optional = play.hosts == ["sglang_router"]

    def v2_playbook_on_no_hosts_matched(self) -> None:
        if self._optional:
            return
        Display().error(
            "The play matched no host, so nothing was done. The playbooks work on the inventory's group "
            "'sglang_hosts': put a host into it, or correct --inventory or --limit. "
            "`ansible-inventory --graph` prints the groups and hosts that Ansible sees."
        )
        # Exceptions of callbacks are turned into warnings; leaving is the one way to change the exit status.
        sys.exit(2)
