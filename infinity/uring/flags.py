"""Numbers of the kernel's interface: setup flags, features and operations of io_uring.

The numbers are those of include/uapi/linux/io_uring.h, which never change.
"""

from __future__ import annotations

from enum import IntFlag


class SetupFlag(IntFlag):
    """Setup of a ring: IORING_SETUP_*, without the flags that change the layout of the ring."""

    NONE = 0
    IOPOLL = 1 << 0
    SQPOLL = 1 << 1
    CLAMP = 1 << 4
    SUBMIT_ALL = 1 << 7
    COOP_TASKRUN = 1 << 8
    TASKRUN_FLAG = 1 << 9
    SINGLE_ISSUER = 1 << 12
    DEFER_TASKRUN = 1 << 13


class Feature(IntFlag):
    """Features of the rings of a kernel: IORING_FEAT_*. Bits of newer kernels are kept."""

    NONE = 0
    SINGLE_MMAP = 1 << 0
    NODROP = 1 << 1
    SUBMIT_STABLE = 1 << 2
    RW_CUR_POS = 1 << 3
    CUR_PERSONALITY = 1 << 4
    FAST_POLL = 1 << 5
    POLL_32BITS = 1 << 6
    SQPOLL_NONFIXED = 1 << 7
    EXT_ARG = 1 << 8
    NATIVE_WORKERS = 1 << 9
    RSRC_TAGS = 1 << 10
    CQE_SKIP = 1 << 11
    LINKED_FILE = 1 << 12
    REG_REG_RING = 1 << 13
    RECVSEND_BUNDLE = 1 << 14
    MIN_TIMEOUT = 1 << 15
    RW_ATTR = 1 << 16
    NO_IOWAIT = 1 << 17


# IORING_OP_*, in the kernel's order, as of Linux 6.18.
OPCODES = (
    "NOP", "READV", "WRITEV", "FSYNC", "READ_FIXED", "WRITE_FIXED", "POLL_ADD", "POLL_REMOVE",
    "SYNC_FILE_RANGE", "SENDMSG", "RECVMSG", "TIMEOUT", "TIMEOUT_REMOVE", "ACCEPT", "ASYNC_CANCEL",
    "LINK_TIMEOUT", "CONNECT", "FALLOCATE", "OPENAT", "CLOSE", "FILES_UPDATE", "STATX", "READ",
    "WRITE", "FADVISE", "MADVISE", "SEND", "RECV", "OPENAT2", "EPOLL_CTL", "SPLICE",
    "PROVIDE_BUFFERS", "REMOVE_BUFFERS", "TEE", "SHUTDOWN", "RENAMEAT", "UNLINKAT", "MKDIRAT",
    "SYMLINKAT", "LINKAT", "MSG_RING", "FSETXATTR", "SETXATTR", "FGETXATTR", "GETXATTR", "SOCKET",
    "URING_CMD", "SEND_ZC", "SENDMSG_ZC", "READ_MULTISHOT", "WAITID", "FUTEX_WAIT", "FUTEX_WAKE",
    "FUTEX_WAITV", "FIXED_FD_INSTALL", "FTRUNCATE", "BIND", "LISTEN", "RECV_ZC", "EPOLL_WAIT",
    "READV_FIXED", "WRITEV_FIXED", "PIPE",
)  # fmt: skip
