"""Hosts on one machine, joined by a network of chosen latency and bandwidth: network namespaces and a switch.

The switch is a process that passes packets from one host's TUN device to another's: a packet leaves when the sender's
cable is free, takes `latency`, and arrives when the receiver's cable is free. Nothing is lost. TCP, the kernel and
everything above are the real ones. Needs root and `ip`.
"""

import ctypes
import fcntl
import heapq
import math
import multiprocessing
import os
import select
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

MTU = 15_000  # large packets: the switch is in Python, and a packet costs it time
TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000


@contextmanager
def cables(hosts: int, latency: float, bandwidth: float) -> Iterator[list[str]]:
    """The names of `hosts` network namespaces whose devices eth0 have the addresses 10.77.0.10, .11, ...

    latency: seconds one way. bandwidth: bytes per second, each way.
    """
    names = [f"lockstep{os.getpid()}c{host}" for host in range(hosts)]
    context = multiprocessing.get_context("forkserver")
    is_up, sender = context.Pipe(duplex=False)
    process = context.Process(target=switch, args=(names, latency, bandwidth, sender), daemon=True)
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        process.start()
        sender.close()
        is_up.recv()  # EOFError: the switch has failed and said why
        yield names
    finally:
        if process.pid:
            process.kill()
            process.join()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def enter(name: str) -> None:
    """From now on this thread, and threads that it starts, are on the host `name`."""
    with open(f"/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def open_device(name: str, host: int) -> int:
    """The TUN device eth0 of the host `name`: a file of packets."""
    enter(name)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"eth0", IFF_TUN | IFF_NO_PI))
    address = f"addr add 10.77.0.{10 + host}/24 dev eth0"
    for words in ("link set lo up", address, f"link set eth0 mtu {MTU} txqueuelen 10000 up"):
        subprocess.run(["ip", *words.split()], check=True)
    return device


def switch(names: Sequence[str], latency: float, bandwidth: float, is_up: Any) -> None:
    """Pass packets on, for ever."""
    devices = [open_device(name, host) for host, name in enumerate(names)]
    is_up.send(True)
    due: list[tuple[float, int, int, bytes]] = []  # (when, number of the packet, device, packet)
    sends, receives, number = [0.0] * len(names), [0.0] * len(names), 0  # when a host's cable is free, each way
    backlog = 2 * MTU / bandwidth
    while True:
        now = time.perf_counter()
        # Packets of a host whose cable is busy stay in its kernel, which then knows that its queue is full.
        ready = [device for host, device in enumerate(devices) if sends[host] - now < backlog]
        wakes = [due[0][0] if due else math.inf, *(free - backlog for free in sends if free - now >= backlog)]
        readable, _, _ = select.select(ready, [], [], max(0, min(min(wakes) - now, 60)))
        for device in readable:
            host, now = devices.index(device), time.perf_counter()
            packet = os.read(device, MTU)
            to = packet[19] - 10
            if packet[0] >> 4 == 4 and 0 <= to < len(names):  # else a neighbour search of IPv6
                seconds = len(packet) / bandwidth
                sends[host] = max(now, sends[host]) + seconds
                receives[to] = max(sends[host] + latency, receives[to] + seconds)
                heapq.heappush(due, (receives[to], number, devices[to], packet))
                number += 1
        while due and due[0][0] <= time.perf_counter():
            _, _, device, packet = heapq.heappop(due)
            os.write(device, packet)
