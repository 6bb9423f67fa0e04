"""Hosts and variables from Ansible's inventory: the diagnostics have no settings of their own.

``ansible-inventory --list`` prints variables as they were written, so that ``{{ inventory_dir }}/key`` would stay a
template. Ansible's own loader runs in this process instead: it applies group precedence, templates and vaults as a
play does, and the SSH connection plugin's own option table says which variable, ini entry or environment variable sets
the user, the port or the key.
"""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent

REPORTS = REPOSITORY / "reports"

SERVICE_DEFAULTS: Mapping[str, str] = {
    "release_root": "/opt/sglang",
    "service_name": "sglang",
    "acceptance_reports": str(REPORTS),
}
SSH_CONNECTIONS = ("ssh", "smart", "ansible.builtin.ssh")


class UsageError(Exception):
    """What was asked for cannot be done; the message says what was given, what is allowed and what to do."""


@dataclass(frozen=True)
class Host:
    """One host of the inventory.

    ``ssh_options`` are the arguments that Ansible would give to OpenSSH, without the destination; relative paths in
    them are meant from the repository's root, where ``ansible.cfg`` lies. ``variables`` are all that the inventory
    sets for the host; each is templated when it is looked up. ``reports`` is the folder of documents and pages on this
    machine.
    """

    name: str
    address: str
    ssh_executable: str
    ssh_options: tuple[str, ...]
    release_root: str
    service_name: str
    variables: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    reports: Path = REPORTS
    service_port: int | None = None  # where the inventory sets it

    def given(self, names: Sequence[str]) -> dict[str, Any]:
        """Return those of the variables *names* that the inventory sets, as plain values.

        Raises UsageError when one cannot be templated.
        """
        from ansible.errors import AnsibleError

        try:
            return {name: _plain(self.variables[name]) for name in names if name in self.variables}
        except AnsibleError as error:
            raise UsageError(f"{self.name}: a variable of the inventory cannot be used: {error}") from error

    @property
    def deployment_path(self) -> str:
        """Path on the host of what the last activation claims to run."""
        return f"{self.release_root}/current/deployment.json"

    @property
    def keys_path(self) -> str:
        """Path on the host of the keys of the server; for root only, and there only where it has keys."""
        return f"{self.release_root}/current/credentials/server.yaml"

    @property
    def unit(self) -> str:
        """Name of the systemd unit that serves."""
        return f"{self.service_name}.service"


def _plain(value: Any) -> Any:
    """Ansible's lazy containers as dictionaries and lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def load_hosts(inventories: Sequence[str] | None = None, limit: str | None = None) -> list[Host]:
    """Return the hosts of *inventories* (default: what ``ansible.cfg`` names) that match the pattern *limit*.

    Raises UsageError when the inventory cannot be read, names no host, *limit* matches none, or a variable that the
    diagnostics need is undefined or of the wrong kind.
    """
    # Ansible reads its configuration once, when it is imported; it looks in the current folder only.
    os.environ.setdefault("ANSIBLE_CONFIG", str(REPOSITORY / "ansible.cfg"))
    return _select(_load(tuple(inventories or ())), limit)


@functools.cache
def _load(inventories: tuple[str, ...]) -> Any:
    from ansible import constants
    from ansible.errors import AnsibleError
    from ansible.inventory.manager import InventoryManager
    from ansible.parsing.dataloader import DataLoader
    from ansible.vars.hostvars import HostVars, HostVarsVars
    from ansible.vars.manager import VariableManager

    sources = list(inventories or constants.DEFAULT_HOST_LIST)
    for source in sources:
        # "a,b," is Ansible's notation for a list of hosts in place of a file.
        if "," not in source and not Path(source).exists():
            raise UsageError(
                f"inventory {source!r} does not exist; give an inventory file or folder with --inventory, "
                "or start the rehearsal host with `make host-up`"
            )
    _load_plugins()
    try:
        loader = DataLoader()
        if constants.DEFAULT_VAULT_PASSWORD_FILE or constants.DEFAULT_VAULT_IDENTITY_LIST:
            from ansible.cli import CLI

            CLI.setup_vault_secrets(loader, list(constants.DEFAULT_VAULT_IDENTITY_LIST), auto_prompt=False)
        manager = InventoryManager(loader=loader, sources=sources)
        variables = VariableManager(loader=loader, inventory=manager)
        HostVars(inventory=manager, variable_manager=variables, loader=loader)  # makes `hostvars` known to templates
    except AnsibleError as error:
        raise UsageError(f"Ansible cannot read the inventory {', '.join(sources)}: {error}") from error

    def variables_of(name: str) -> Mapping[str, Any]:
        return HostVarsVars(variables.get_vars(host=manager.get_host(name)), loader=loader, host=name)  # type: ignore[no-any-return]

    return manager, variables_of


@functools.cache
def _load_plugins() -> None:
    from ansible.plugins.loader import connection_loader, init_plugin_loader

    init_plugin_loader()  # collections, and with them the lookups of templates
    connection_loader.get("ssh", class_only=True)  # registers the plugin's option table with Ansible's configuration


def _select(loaded: Any, limit: str | None) -> list[Host]:
    """The hosts of *limit*, but for those that are only routers: there is no server on them."""
    from ansible.errors import AnsibleError

    manager, variables_of = loaded
    known = sorted(host.name for host in manager.get_hosts("all"))
    if not known:
        raise UsageError("the inventory names no host; add one (docs/diagnostics.md shows a minimal inventory)")
    try:
        routers = _members(manager, "sglang_router") - _members(manager, "sglang_hosts")
        names = [host.name for host in manager.get_hosts(limit or "all") if host.name not in routers]
    except AnsibleError as error:
        raise UsageError(f"--limit {limit!r} is not a host pattern: {error}") from error
    if not names:
        groups = sorted(name for name in manager.groups if name not in ("all", "ungrouped"))
        raise UsageError(f"--limit {limit!r} matches no host; known hosts: {', '.join(known)}; groups: {groups or '-'}")
    return [_host(name, variables_of(name)) for name in names]


def _members(manager: Any, group: str) -> set[str]:
    return {host.name for host in manager.groups[group].get_hosts()} if group in manager.groups else set()


def _host(name: str, variables: Mapping[str, Any]) -> Host:
    from ansible import constants
    from ansible.errors import AnsibleError

    try:
        connection = variables.get("ansible_connection", "ssh")
        if connection not in SSH_CONNECTIONS:
            raise UsageError(
                f"{name}: ansible_connection is {connection!r}; the diagnostics reach hosts by SSH only: remove it"
            )
        options = constants.config.get_plugin_options("connection", "ssh", variables=variables)
        service = {key: str(variables.get(key, default)) for key, default in SERVICE_DEFAULTS.items()}
        port = str(variables.get("service_port", ""))
    except AnsibleError as error:
        raise UsageError(f"{name}: a variable of the inventory cannot be used: {error}") from error
    if options["password"]:
        raise UsageError(f"{name}: ansible_password is set; the diagnostics log in with keys only: set up a key")
    if not service["release_root"].startswith("/"):
        raise UsageError(f"{name}: release_root is {service['release_root']!r}; it must be an absolute path")
    if port and not port.isdecimal():
        raise UsageError(f"{name}: service_port is {port!r}; it must be a port's number")
    return Host(
        name=str(name),
        address=str(options["host"] or name),
        ssh_executable=str(options["ssh_executable"]),
        ssh_options=ssh_options(options),
        release_root=service["release_root"].rstrip("/"),
        service_name=service["service_name"],
        variables=variables,
        reports=REPOSITORY / service["acceptance_reports"],
        service_port=int(port) if port else None,
    )


def ssh_options(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return OpenSSH's arguments for the resolved *options* of Ansible's SSH plugin, in the plugin's order.

    OpenSSH keeps the first value that it finds, so the order decides.
    """
    arguments = shlex.split(options.get("ssh_args") or "")
    if options.get("port"):
        arguments += ["-o", f"Port={options['port']}"]
    if options.get("private_key_file"):
        arguments += ["-o", f'IdentityFile="{Path(options["private_key_file"]).expanduser()}"']
    if options.get("remote_user"):
        arguments += ["-o", f'User="{options["remote_user"]}"']
    for key in ("ssh_common_args", "ssh_extra_args"):
        arguments += shlex.split(options.get(key) or "")
    return tuple(arguments)
