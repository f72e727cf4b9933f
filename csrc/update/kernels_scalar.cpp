#include "rules.h"

namespace infinity::update {

KernelTable scalar_kernels() noexcept { return AllRules<ScalarLanes, ScalarLanes>::kTable; }

}  // namespace infinity::update
