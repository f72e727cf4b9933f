"""Addresses of ranks on several machines: what a machine says of itself, and what others reach."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.distributed.wire.addresses import (
    UNIX,
    Machine,
    choose_address,
    own_address,
    refusal,
    route_to,
    this_machine,
)

A = Machine("one", "boot-a", 1)
ROUTES = {"10.0.0.2": "10.0.0.1"}


def route(address: str) -> str:
    return ROUTES.get(address, "")


def test_ranks_of_one_network_use_the_loopback_interface() -> None:
    assert choose_address(0, [A, A], route) == UNIX
    assert choose_address(1, [A, Machine("other name", "boot-a", 1, "10.0.0.7")], route) == UNIX


def test_machines_of_one_name_are_two_and_reach_each_other_by_their_addresses() -> None:
    """The first maps its own name, which is MASTER_ADDR, to a loopback address."""
    namesake = Machine("one", "boot-b", 1, "10.0.0.2")
    assert not A.is_node_of(namesake) and not A.is_in_network_of(namesake)
    assert choose_address(0, [A, namesake], route) == "10.0.0.1"
    assert choose_address(1, [A, namesake], route) == "10.0.0.2"


def test_containers_of_one_machine_are_two_networks() -> None:
    container = Machine("other", "boot-a", 2, "10.0.0.2")
    assert not A.is_node_of(container)
    assert choose_address(0, [A, container], route) == "10.0.0.1"


def test_a_loopback_address_is_never_announced_to_another_machine() -> None:
    for address in ("127.0.1.1", "127.0.0.1", "0.0.0.0", "", "no such name."):
        assert route_to(address) == ""
    machines = [A, Machine("two", "boot-b", 1)]
    assert [choose_address(rank, machines, route) for rank in (0, 1)] == ["", ""]
    text = refusal({0: A})
    assert text.startswith("rank 0 on one cannot be reached") and "GLOO_SOCKET_IFNAME" in text


@given(st.lists(st.sampled_from([A, Machine("b", "boot-b", 1, "10.0.0.2")]), min_size=1))
def test_all_ranks_agree_on_whether_the_loopback_interface_is_used(machines: list[Machine]) -> None:
    chosen = {choose_address(rank, machines, route) for rank in range(len(machines))}
    assert (UNIX in chosen) == (chosen == {UNIX}) == (len(set(machines)) == 1)


def test_the_named_interface_decides() -> None:
    names = [name for _, name in socket.if_nameindex()]
    if "lo" not in names:
        pytest.skip("this network namespace has no interface lo")
    assert own_address({"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "10.0.0.2"}) == ("127.0.0.1", "")
    assert own_address({"NCCL_SOCKET_IFNAME": "=lo"}) == ("127.0.0.1", "")
    assert own_address({"NCCL_SOCKET_IFNAME": "l"}) == ("127.0.0.1", "")
    assert own_address({"NCCL_SOCKET_IFNAME": "^docker", "MASTER_ADDR": "127.0.0.1"}) == ("", "")
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        address, fault = own_address({variable: "nothing0"})
        assert address == "" and f"{variable}=nothing0 names no interface" in fault
        assert fault in refusal({1: Machine("two", "boot", 1, "", fault)})
    assert own_address({"GLOO_SOCKET_IFNAME": "l"})[0] == "", "gloo takes whole names"


def test_this_machine_is_itself() -> None:
    one, other = this_machine({}), this_machine({})
    assert one.is_node_of(other) and one.is_in_network_of(other) and one.boot and one.network
