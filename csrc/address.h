// Addresses as integers, which is how memory crosses the boundary to Python.

#pragma once

#include <cstdint>

namespace infinity {

template <class Pointer>
Pointer pointer_to(std::uintptr_t address) {
  return reinterpret_cast<Pointer>(address);  // NOLINT: addresses are what crosses the boundary.
}

}  // namespace infinity
