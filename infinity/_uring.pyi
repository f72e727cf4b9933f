"""liburing through cffi, as declared in io/cffi/build_uring.py. Use `infinity.uring`."""

from typing import Any

ffi: Any
lib: Any
