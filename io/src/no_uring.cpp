// Stands in for uring_lane.cpp and uring_probe.cpp when liburing was not found.
#include <cerrno>

#include "infinity_io/probe.h"
#include "lane.h"

namespace infinity::io {

bool built_with_uring() noexcept { return false; }

UringProbe probe_uring(RingFlags, std::uint32_t) noexcept {
  return {false, ENOSYS, "build", 0};
}

std::unique_ptr<Lane> make_uring_lane(const Options&, std::shared_ptr<const Hooks>,
                                      std::shared_ptr<RegisteredArena>&) {
  return nullptr;
}

}  // namespace infinity::io
