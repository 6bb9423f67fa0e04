"""The hosts' network: a bridge of this checkout's own, and the way out to the package registries and nothing else."""

import fcntl
import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from rehearsal.machine import Unsuitable, run

# RFC 2544 sets this range aside for tests between networks: no site routes it.
RANGE = IPv4Network("198.18.0.0/15")
PREFIX = "rh-"
FORWARDING = Path("/run/specgate-forwarding")  # the interfaces on which forwarding was switched on here
INTERFACES = Path("/proc/sys/net/ipv4/conf")


class Network:
    """Bridge, addresses and packet filter of one rehearsal directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        digest = hashlib.sha256(str(directory).encode()).hexdigest()
        self.bridge = PREFIX + digest[:6]  # with "vb-" before and "-1" behind: 14 of the 15 characters of a name
        self._first_choice = int(digest[:8], 16)

    @property
    def is_up(self) -> bool:
        return Path("/sys/class/net", self.bridge).exists()

    def subnet(self) -> IPv4Network:
        """The subnet of the bridge; before there is one, the first free subnet from a start that the path decides."""
        if self.is_up:
            for address in _ip("-4", "address", "show", "dev", self.bridge)[0]["addr_info"]:
                return IPv4Network(f"{address['local']}/{address['prefixlen']}", strict=False)
        routes = _ip("-4", "route", "show", "table", "all")
        taken = [IPv4Network(route["dst"]) for route in routes if route["dst"] != "default"]
        choices = list(RANGE.subnets(new_prefix=24))
        start = self._first_choice % len(choices)
        for subnet in choices[start:] + choices[:start]:
            if not any(subnet.overlaps(other) for other in taken):
                return subnet
        raise Unsuitable(f"no free network in {RANGE}: this machine routes all of it (ip route)")

    def up(self, further_ports: Iterable[int] = ()) -> IPv4Network:
        """Make the network, or what is missing of it; `further_ports` are let out besides 53, 80 and 443."""
        with _lock():
            subnet = self.subnet()
            if not self.is_up:
                _change("link", "add", self.bridge, "type", "bridge")
            _change("address", "replace", f"{subnet[1]}/{subnet.prefixlen}", "dev", self.bridge)
            _change("link", "set", self.bridge, "up")
            # Less preferred than the bridge's own route: when the bridge goes, nothing meant for a host leaves the
            # machine by the default route.
            _change("route", "replace", "unreachable", str(subnet), "metric", "4000")
            self._filter(subnet, further_ports)
            self._forward()
        return subnet

    def down(self) -> None:
        """Remove every trace of the network, the bridge last: while it is there, there is something to remove."""
        if not self.is_up:
            return
        with _lock():
            # `flush`, because systemd-networkd may have removed this route that it does not know.
            _change("route", "flush", "exact", str(self.subnet()), "type", "unreachable")
            run(["nft", "--file", "-"], what="removing the packet filter", input=self._no_filter())
            self._stop_forwarding()
            _change("link", "delete", self.bridge)

    def _no_filter(self) -> str:
        # `table` first, because deleting what is not there is an error.
        return f"table ip {self.bridge}\ndelete table ip {self.bridge}\n"

    def _filter(self, subnet: IPv4Network, further_ports: Iterable[int]) -> None:
        ports = ", ".join(str(port) for port in sorted({80, 443, *further_ports}))
        rules = f"""
            table ip {self.bridge} {{
                chain forward {{
                    type filter hook forward priority 0; policy accept;
                    iifname "{self.bridge}" oifname "{self.bridge}" accept
                    iifname "{self.bridge}" meta l4proto {{ tcp, udp }} th dport 53 accept
                    iifname "{self.bridge}" tcp dport {{ {ports} }} accept
                    iifname "{self.bridge}" reject
                }}
                chain postrouting {{
                    type nat hook postrouting priority 100; policy accept;
                    ip saddr {subnet} oifname != "{self.bridge}" masquerade
                }}
            }}
        """
        run(["nft", "--file", "-"], what="setting the packet filter", input=self._no_filter() + rules)

    def warn_of_other_filters(self) -> None:
        """Say so when the machine has a packet filter that may drop what the hosts send, whatever ours allows."""
        rules = json.loads(run(["nft", "--json", "list", "chains"], what="asking for the machine's packet filters"))
        chains = [entry["chain"] for entry in rules["nftables"] if "chain" in entry]
        dropping = [
            f"{chain['family']} {chain['table']} {chain['name']}"
            for chain in chains
            if chain.get("hook") == "forward" and chain.get("policy") == "drop" and chain["family"] in {"ip", "inet"}
        ]
        if dropping:
            print(
                f"rehearsal: this machine drops what it forwards unless a rule allows it (nft list chain "
                f"{dropping[0]}). If the hosts cannot reach the package registries, allow what comes from and goes to "
                f"{self.bridge}; with Docker: iptables -I DOCKER-USER -i {self.bridge} -j ACCEPT; "
                f"iptables -I DOCKER-USER -o {self.bridge} -j ACCEPT",
                flush=True,
            )

    def _forward(self) -> None:
        """Let packets pass between the bridge and the interfaces that have routes.

        Interface by interface rather than by ip_forward, so that putting it back cannot take forwarding away from
        somebody who switched it on for the whole machine in the meantime.
        """
        devices = {route["dev"] for route in _ip("-4", "route", "show") if "dev" in route}
        changed = set(FORWARDING.read_text().split()) if FORWARDING.exists() else set()
        for device in sorted(devices):
            switch = INTERFACES / device / "forwarding"
            if switch.read_text().strip() == "0":
                switch.write_text("1")
                if not device.startswith(PREFIX):
                    changed.add(device)
        FORWARDING.write_text("\n".join(sorted(changed)))

    def _stop_forwarding(self) -> None:
        bridges = {path.name for path in Path("/sys/class/net").iterdir() if path.name.startswith(PREFIX)}
        if bridges != {self.bridge} or not FORWARDING.exists():
            return
        if (INTERFACES / "all/forwarding").read_text().strip() == "0":
            for device in FORWARDING.read_text().split():
                switch = INTERFACES / device / "forwarding"
                if switch.exists():
                    switch.write_text("0")
        FORWARDING.unlink()


@contextmanager
def _lock() -> Iterator[None]:
    """One at a time on this machine: checkouts must not choose the same subnet, nor forget each other's forwarding."""
    with Path("/run/specgate-network.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _ip(*arguments: str) -> list[dict[str, Any]]:
    output = run(["ip", "-json", *arguments], what="asking for the machine's network")
    return list(json.loads(output or "[]"))


def _change(*arguments: str) -> None:
    run(["ip", *arguments], what="setting up the hosts' network")
