"""A drive that fails on demand: a FUSE file system of one file, in a process of its own.

    python fuse_drive.py MOUNT_POINT NBYTES [OPERATION NTH ANSWER]

The NTH read or write, counted from 1 as the kernel asks for it, is answered with ANSWER: an errno,
or "short" for half of what was asked. So the faults come to the engines through the real kernel.
Prints "ready" when mounted; ends when it is unmounted. Needs root. The kernel's own description of
the messages is include/uapi/linux/fuse.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE = 1, 2, 3, 4, 14, 15, 16
STATFS, RELEASE, FSYNC, FLUSH, INIT, ACCESS, DESTROY = 17, 18, 20, 25, 26, 34, 38
BATCH_FORGET, INTERRUPT = 42, 36
UNANSWERED = (FORGET, BATCH_FORGET, INTERRUPT)

IN_HEADER = struct.Struct("<IIQQIIIHH")
TRANSFER = struct.Struct("<QQIIQII")
ROOT, DATA = 1, 2
DIRECT_IO = 1
# Without it Linux 6.18 continues a short direct read of io_uring at the wrong offset, in the kernel.
ASYNC_DIO = 1 << 15
MAX_WRITE_NBYTES = 1 << 20


class Drive:
    def __init__(self, nbytes: int, operation: str, nth: int, answer: str) -> None:
        self.content = bytearray(nbytes)
        self.faults = {(operation, nth): answer}
        self.counts = {"read": 0, "write": 0}

    def answer(self, opcode: int, node: int, body: bytes) -> bytes:
        """The body of the reply. Raises OSError for an error."""
        if opcode == INIT:
            return struct.pack(
                "<IIIIHHIIHHI28x", 7, 31, 0, ASYNC_DIO, 16, 12, MAX_WRITE_NBYTES, 1, 0, 0, 0
            )
        if opcode == LOOKUP:
            if body.rstrip(b"\0") != b"data":
                raise OSError(errno.ENOENT, "")
            return struct.pack("<QQQQII", DATA, 0, 3600, 3600, 0, 0) + self.attributes(DATA)
        if opcode in (GETATTR, SETATTR):
            return struct.pack("<QII", 3600, 0, 0) + self.attributes(node)
        if opcode == OPEN:
            return struct.pack("<QII", 0, DIRECT_IO, 0)
        if opcode == READ:
            _, offset, nbytes, *_ = TRANSFER.unpack_from(body)
            return bytes(self.content[offset : offset + self.granted("read", nbytes)])
        if opcode == WRITE:
            _, offset, nbytes, *_ = TRANSFER.unpack_from(body)
            nbytes = self.granted("write", nbytes)
            self.content[offset : offset + nbytes] = body[TRANSFER.size : TRANSFER.size + nbytes]
            return struct.pack("<II", nbytes, 0)
        if opcode == STATFS:
            return struct.pack("<QQQQQIIII24x", 1 << 20, 1 << 19, 1 << 19, 9, 9, 4096, 255, 4096, 0)
        if opcode in (RELEASE, FSYNC, FLUSH, ACCESS, DESTROY):
            return b""
        raise OSError(errno.ENOSYS, "")

    def granted(self, operation: str, nbytes: int) -> int:
        self.counts[operation] += 1
        fault = self.faults.get((operation, self.counts[operation]))
        if fault is None:
            return nbytes
        if fault == "short":
            return nbytes // 2
        raise OSError(int(fault), "")

    def attributes(self, node: int) -> bytes:
        mode = 0o40755 if node == ROOT else 0o100644
        size = 0 if node == ROOT else len(self.content)
        blocks = (size + 511) // 512
        return struct.pack(
            "<6Q10I", node, size, blocks, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0
        )


def main(
    mount_point: str, nbytes: str, operation: str = "", nth: str = "0", answer: str = ""
) -> None:
    drive = Drive(int(nbytes), operation, int(nth), answer)
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"drive", mount_point.encode(), b"fuse", 0, options) != 0:
        raise OSError(ctypes.get_errno(), "mount")
    print("ready", flush=True)
    while True:
        try:
            message = os.read(device, MAX_WRITE_NBYTES + 4096)
        except OSError as error:
            if error.errno == errno.ENODEV:  # Unmounted.
                return
            if error.errno == errno.ENOENT:  # The request was interrupted.
                continue
            raise
        _, opcode, unique, node, *_ = IN_HEADER.unpack_from(message)
        if opcode in UNANSWERED:
            continue
        code, reply = 0, b""
        try:
            reply = drive.answer(opcode, node, message[IN_HEADER.size :])
        except OSError as error:
            code = error.errno or errno.EIO
        os.write(device, struct.pack("<IiQ", 16 + len(reply), -code, unique) + reply)


if __name__ == "__main__":
    main(*sys.argv[1:])
