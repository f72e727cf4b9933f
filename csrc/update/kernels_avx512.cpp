// Compiled for its instruction set when CMake could; called only where dispatch.cpp found it.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include "lanes_avx512.h"
#include "rules.h"

namespace infinity::update {

KernelTable avx512_kernels() noexcept {
  return AllRules<Avx512Vector, PairLanes<Avx512Vector>>::kTable;
}

}  // namespace infinity::update

#else

#include "kernels.h"

namespace infinity::update {

KernelTable avx512_kernels() noexcept { return {nullptr, 0}; }

}  // namespace infinity::update

#endif
