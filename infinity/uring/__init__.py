"""A binding of liburing: one ring of the kernel, its operations and its completions.

    with Ring(8) as ring:
        ring.read(fd, header, 0, token="header")
        ring.read(fd, body, 4096, token="body")
        for completion in ring.wait(2):
            if completion.errno:
                print(completion.token, "failed:", os.strerror(completion.errno))
            else:
                print(completion.token, completion.nbytes, "bytes")

    probe().setup_flags         # the flags that this kernel grants

The binding does not split operations, repeats none, and judges no completion. It shares no code
with the storage engine: `infinity doctor` asks the kernel through it, benchmarks measure the
ceiling of a raw ring with it, tests compare the engine with it. Training never uses it. See
docs/BENCH.md, io_uring(7), io_uring_setup(2), io_uring_enter(2).
"""

from infinity.uring.ring import (
    OPCODES,
    Completion,
    Feature,
    Memory,
    Probe,
    Raw,
    RegisteredBuffer,
    Ring,
    RingError,
    SetupFlag,
    is_built,
    probe,
    try_registering,
)

__all__ = [
    "OPCODES",
    "Completion",
    "Feature",
    "Memory",
    "Probe",
    "Raw",
    "RegisteredBuffer",
    "Ring",
    "RingError",
    "SetupFlag",
    "is_built",
    "probe",
    "try_registering",
]
