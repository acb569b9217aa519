"""A wire with a delay that loses some frames: it carries Ethernet frames between two interfaces.

    python slow_wire.py INTERFACE INTERFACE MILLISECONDS SHARE_LOST
    python slow_wire.py whole INTERFACE      from now on its frames are checked and cut where they are sent

Linux has this as `netem`, which not every kernel has. Frames must be whole when they arrive here: by default an
interface of a namespace leaves checksums and cutting to hardware, which it lacks.
"""

from __future__ import annotations

import array
import collections
import contextlib
import fcntl
import random
import select
import socket
import struct
import sys
import time

SIOCETHTOOL = 0x8946
OFF = (0x15, 0x17, 0x1F, 0x24, 0x2C)  # ETHTOOL_SRXCSUM, STXCSUM, STSO, SGSO, SGRO
FRAMES_AT_ONCE = 64


def send_whole_frames(interface: str) -> None:
    with socket.socket() as any_socket:
        for command in OFF:
            value = array.array("B", struct.pack("II", command, 0))
            request = struct.pack("16sP", interface.encode(), value.buffer_info()[0])
            with contextlib.suppress(OSError):
                fcntl.ioctl(any_socket, SIOCETHTOOL, request)


def opened(interface: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003))  # ETH_P_ALL
    end.bind((interface, 0))
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    end.setblocking(False)
    return end


def carry(ends: list[socket.socket], seconds: float, lost: float) -> None:
    chance = random.Random(1)
    on_the_way: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    while True:
        now = time.monotonic()
        while on_the_way and on_the_way[0][0] <= now:
            _, end, frame = on_the_way.popleft()
            with contextlib.suppress(OSError):  # the cable is cut, or the queue full: a lost frame
                end.send(frame)
        wait = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else 0.5
        for end in select.select(ends, [], [], wait)[0]:
            other = ends[1 - ends.index(end)]
            for _ in range(FRAMES_AT_ONCE):
                try:
                    frame, address = end.recvfrom(65_536)
                except OSError:
                    break
                if address[2] != socket.PACKET_OUTGOING and chance.random() >= lost:
                    on_the_way.append((time.monotonic() + seconds, other, frame))


if __name__ == "__main__":
    if sys.argv[1] == "whole":
        send_whole_frames(sys.argv[2])
    else:
        carry([opened(name) for name in sys.argv[1:3]], float(sys.argv[3]) / 1e3, float(sys.argv[4]))
