// Adds `infinity._core.update`.
#pragma once

#include <pybind11/pybind11.h>

namespace infinity {

void bind_update(pybind11::module_& module);

}  // namespace infinity
