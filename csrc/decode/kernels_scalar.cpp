#include "rows.h"

namespace infinity::decode {

KernelTable scalar_kernels() noexcept { return table_of<ScalarLookup>(); }

}  // namespace infinity::decode
