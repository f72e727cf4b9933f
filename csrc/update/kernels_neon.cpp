// Compiled for its instruction set when CMake could; called only where dispatch.cpp found it.
#if defined(__aarch64__)

#include "lanes_neon.h"
#include "rules.h"

namespace infinity::update {

KernelTable neon_kernels() noexcept { return AllRules<NeonVector, PairLanes<NeonVector>>::kTable; }

}  // namespace infinity::update

#else

#include "kernels.h"

namespace infinity::update {

KernelTable neon_kernels() noexcept { return {nullptr, 0}; }

}  // namespace infinity::update

#endif
