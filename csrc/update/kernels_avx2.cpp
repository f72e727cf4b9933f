// Compiled for its instruction set when CMake could; called only where dispatch.cpp found it.
#if defined(__AVX2__) && defined(__FMA__)

#include "lanes_avx2.h"
#include "rules.h"

namespace infinity::update {

KernelTable avx2_kernels() noexcept { return AllRules<Avx2Vector, PairLanes<Avx2Vector>>::kTable; }

}  // namespace infinity::update

#else

#include "kernels.h"

namespace infinity::update {

KernelTable avx2_kernels() noexcept { return {nullptr, 0}; }

}  // namespace infinity::update

#endif
