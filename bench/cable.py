"""Hosts joined by cables of a chosen latency and bandwidth, on one machine: network namespaces and a switch between them.

The switch is a process that carries packets from one host's TUN device to another's, each at its time: it leaves when the
sender's cable is free, is `latency` on its way, and arrives when the receiver's cable is free. Nothing is lost. TCP, the
kernel and everything above are the real ones. Wants root and `ip`.
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
from contextlib import contextmanager

MTU = 15_000  # large packets: the switch is Python, and pays by the packet
TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000


@contextmanager
def cables(hosts, latency, bandwidth):
    """The names of `hosts` network namespaces whose device eth0, 10.77.0.10, .11, ..., is joined to the others'.

    latency: seconds one way; bandwidth: bytes per second, each way.
    """
    names = [f"lockstep{os.getpid()}c{host}" for host in range(hosts)]
    context = multiprocessing.get_context("forkserver")
    up, told = context.Pipe(duplex=False)
    carrier = context.Process(target=switch, args=(names, latency, bandwidth, told), daemon=True)
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        carrier.start()
        told.close()
        up.recv()  # EOFError: the switch has died, and said why
        yield names
    finally:
        if carrier.pid:
            carrier.kill()
            carrier.join()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def enter(name):
    """From here on this thread, and those it starts, live on the host `name`."""
    with open(f"/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def plugged_in(name, host):
    """The TUN device eth0 of the host `name`, as a file of packets."""
    enter(name)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"eth0", IFF_TUN | IFF_NO_PI))
    for words in ("link set lo up", f"addr add 10.77.0.{10 + host}/24 dev eth0", f"link set eth0 mtu {MTU} txqueuelen 10000 up"):
        subprocess.run(["ip", *words.split()], check=True)
    return device


def switch(names, latency, bandwidth, told):
    devices = [plugged_in(name, host) for host, name in enumerate(names)]
    told.send("up")
    number, due = 0, []
    sends, receives = [0.0] * len(names), [0.0] * len(names)  # when each host's cable is free again, either way
    while True:
        now = time.perf_counter()
        # A host whose cable has work for two more packets waits, in its kernel, which then knows that its queue is full.
        ready = [device for host, device in enumerate(devices) if sends[host] - now < 2 * MTU / bandwidth]
        wakes = [due[0][0] if due else math.inf] + [free - 2 * MTU / bandwidth for free in sends if free - now >= 2 * MTU / bandwidth]
        readable, _, _ = select.select(ready, [], [], max(0, min(min(wakes) - now, 60)))
        for device in readable:
            host, now = devices.index(device), time.perf_counter()
            packet = os.read(device, MTU)
            to = packet[19] - 10
            if packet[0] >> 4 == 4 and 0 <= to < len(names):  # else IPv6 looks for neighbours
                takes = len(packet) / bandwidth
                sends[host] = max(now, sends[host]) + takes
                receives[to] = max(sends[host] + latency, receives[to] + takes)
                heapq.heappush(due, (receives[to], number, devices[to], packet))
                number += 1
        while due and due[0][0] <= time.perf_counter():
            _, _, device, packet = heapq.heappop(due)
            os.write(device, packet)
