// Adds `infinity._core.decode`.
#pragma once

#include <pybind11/pybind11.h>

namespace infinity {

void bind_decode(pybind11::module_& module);

}  // namespace infinity
