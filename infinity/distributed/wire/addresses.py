"""The machines of the ranks, and the address at which a rank is reached from other machines.

Ranks in one network namespace use UNIX sockets. Between machines a rank announces the
address of the interface that GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names, else the address that
routes to MASTER_ADDR. On the machine of MASTER_ADDR that is often a loopback address, because
Debian maps the host's own name to 127.0.1.1 in /etc/hosts; the rank then announces the address that
routes to a rank of another machine. A loopback address is never announced to another machine.

Sources: netdevice(7), namespaces(7), random(4) (boot_id); the environment variables of gloo and of
NCCL as their documentation has them.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

UNIX = "unix"  # In place of an address: sockets of the network namespace, unix(7).
_SIOCGIFADDR = 0x8915
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_DISCARD_PORT = 9  # Nothing is sent there: connect(2) of a datagram socket chooses a route.


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of a rank, as the rank describes it to the others.

    `boot`: the boot of the kernel, so that two machines of one name differ. `network`: the network
    namespace within that boot. `address`: the address for other machines as far as the rank knows
    it alone, or "". `fault`: the reason why the rank cannot be reached, or "".
    """

    host: str
    boot: str
    network: int
    address: str = ""
    fault: str = ""

    def is_node_of(self, other: Machine) -> bool:
        """Whether both divide one machine's memory and drives. Containers have names of their
        own."""
        return (self.boot, self.host) == (other.boot, other.host)

    def is_in_network_of(self, other: Machine) -> bool:
        """Whether both share abstract names of UNIX sockets."""
        return (self.boot, self.network) == (other.boot, other.network)


def this_machine(environment: Mapping[str, str] | None = None) -> Machine:
    """Returns the machine of this process."""
    environment = os.environ if environment is None else environment
    address, fault = own_address(environment)
    return Machine(socket.gethostname(), _boot_id(), _network_namespace(), address, fault)


def own_address(environment: Mapping[str, str]) -> tuple[str, str]:
    """Returns (address for other machines, fault); "" for what there is not."""
    for variable in _VARIABLES:
        names = environment.get(variable, "")
        if names and not names.startswith("^"):  # NCCL: all interfaces but these.
            return _address_of_interface(variable, names)
    return route_to(environment.get("MASTER_ADDR", "")), ""


def choose_address(
    rank: int, machines: Sequence[Machine], route: Callable[[str], str] | None = None
) -> str:
    """Returns the address that a rank announces to the others; "" if none is known, UNIX if it
    needs none.

    `machines` by rank. `route(address)`: as `route_to`.
    """
    own, route = machines[rank], route or route_to
    if all(own.is_in_network_of(other) for other in machines):
        return UNIX
    if own.address:
        return own.address
    for other in machines:
        if not own.is_in_network_of(other) and other.address:
            address = route(other.address)
            if address:
                return address
    return ""


def refusal(unreachable: Mapping[int, Machine]) -> str:
    """Returns the message for ranks that other machines cannot reach. Not empty."""
    rank, machine = next(iter(unreachable.items()))
    why = machine.fault or (
        "its only address for other machines is a loopback address, as /etc/hosts often has it for "
        "a machine's own name"
    )
    return (
        f"rank {rank} on {machine.host} cannot be reached from the other machines: {why}. Set "
        f"{_VARIABLES[0]} on each machine to the interface between them, such as eth0"
    )


def route_to(address: str) -> str:
    """Returns this machine's IPv4 address on the way to another one; "" without a way, and for a
    loopback address. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _DISCARD_PORT))
            own = str(probe.getsockname()[0])
        except OSError:
            return ""
    return "" if _is_of_no_use(own) else own


def _is_of_no_use(address: str) -> bool:
    found = ipaddress.ip_address(address)
    return found.is_loopback or found.is_unspecified


def _address_of_interface(variable: str, names: str) -> tuple[str, str]:
    """Gloo takes names; NCCL takes beginnings of names, or names behind "="."""
    is_exact = variable == _VARIABLES[0] or names.startswith("=")
    wanted = [name for name in names.removeprefix("=").split(",") if name]
    there = [name for _, name in socket.if_nameindex()]
    for name in there:
        if name in wanted or (not is_exact and name.startswith(tuple(wanted))):
            address = _address_of(name)
            if address:
                return address, ""
    fault = f"{variable}={names} names no interface with an IPv4 address; there are {there}"
    return "", fault


def _address_of(interface: str) -> str:
    request = array.array("B", struct.pack("256s", interface.encode()))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(request[20:24].tobytes())


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _network_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return 0
