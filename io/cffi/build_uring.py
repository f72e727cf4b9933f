"""Writes the C source of `infinity._uring`, the liburing binding. Usage: build_uring.py OUT.c

cffi in API mode: a C compiler reads the installed liburing.h, so that structures have their true
layout and inline functions (nearly all of the `prep` family) can be called. Only what every
liburing since 2.0 has is named here; newer kernel features are numbers, in `infinity/uring/`.
"""

from __future__ import annotations

import sys

from cffi import FFI

MODULE = "infinity._uring"

# "...": the compiler knows the rest of the structure.
DECLARATIONS = """
struct io_uring_params { uint32_t sq_entries, cq_entries, flags, features; ...; };
struct io_uring { int ring_fd; ...; };
struct io_uring_sqe { uint64_t user_data; ...; };
struct io_uring_cqe { uint64_t user_data; int32_t res; uint32_t flags; };
struct io_uring_probe_op { uint8_t op; uint16_t flags; ...; };
struct io_uring_probe { uint8_t last_op, ops_len; struct io_uring_probe_op ops[]; ...; };
struct __kernel_timespec { int64_t tv_sec; long long tv_nsec; };
struct iovec { void *iov_base; size_t iov_len; };

#define IO_URING_OP_SUPPORTED ...

int io_uring_queue_init_params(unsigned, struct io_uring *, struct io_uring_params *);
void io_uring_queue_exit(struct io_uring *);
int io_uring_ring_dontfork(struct io_uring *);
struct io_uring_probe *io_uring_get_probe_ring(struct io_uring *);
void io_uring_free_probe(struct io_uring_probe *);

int io_uring_register_buffers(struct io_uring *, const struct iovec *, unsigned);
int io_uring_unregister_buffers(struct io_uring *);

struct io_uring_sqe *io_uring_get_sqe(struct io_uring *);
unsigned io_uring_sq_space_left(const struct io_uring *);
void io_uring_prep_read(struct io_uring_sqe *, int, void *, unsigned, uint64_t);
void io_uring_prep_write(struct io_uring_sqe *, int, const void *, unsigned, uint64_t);
void io_uring_prep_read_fixed(struct io_uring_sqe *, int, void *, unsigned, uint64_t, int);
void io_uring_prep_write_fixed(struct io_uring_sqe *, int, const void *, unsigned, uint64_t, int);

int io_uring_submit(struct io_uring *);
int io_uring_wait_cqes(struct io_uring *, struct io_uring_cqe **, unsigned,
                       struct __kernel_timespec *, void *);
int get_events(struct io_uring *);
unsigned io_uring_peek_batch_cqe(struct io_uring *, struct io_uring_cqe **, unsigned);
unsigned io_uring_cq_ready(const struct io_uring *);
void io_uring_cq_advance(struct io_uring *, unsigned);
"""

SOURCE = """
#include <errno.h>
#include <liburing.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* Lets the kernel post what has completed, without waiting: a ring with DEFER_TASKRUN posts only
   when asked. liburing has this as io_uring_get_events, since 2.3. */
static int get_events(struct io_uring *ring) {
  long answer = syscall(__NR_io_uring_enter, ring->ring_fd, 0, 0, IORING_ENTER_GETEVENTS, NULL, 0);
  return answer < 0 ? -errno : 0;
}
"""


def main(output: str) -> None:
    ffi = FFI()
    ffi.cdef(DECLARATIONS)
    ffi.set_source(MODULE, SOURCE)
    ffi.emit_c_code(output)


if __name__ == "__main__":
    main(sys.argv[1])
