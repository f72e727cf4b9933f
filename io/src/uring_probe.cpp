#include <cerrno>

#include "infinity_io/probe.h"
#include "ring.h"

namespace infinity::io {

namespace {

// NODROP (5.5): completions are never lost. SUBMIT_STABLE (5.5): an SQE may be reused once
// submitted. EXT_ARG (5.11): marks the oldest kernel that the lane was written for.
constexpr std::uint32_t kNeededFeatures =
    IORING_FEAT_NODROP | IORING_FEAT_SUBMIT_STABLE | IORING_FEAT_EXT_ARG;

constexpr int kNeededOpcodes[] = {IORING_OP_READ,    IORING_OP_WRITE,      IORING_OP_READV,
                                  IORING_OP_WRITEV,  IORING_OP_READ_FIXED, IORING_OP_WRITE_FIXED,
                                  IORING_OP_POLL_ADD};

UringProbe examine(io_uring& ring, std::uint32_t flags) noexcept {
  if ((ring.features & kNeededFeatures) != kNeededFeatures)
    return {false, ENOSYS, "features", flags};
  io_uring_probe* opcodes = io_uring_get_probe_ring(&ring);
  if (opcodes == nullptr) return {false, ENOSYS, "opcodes", flags};
  bool has_all = true;
  for (const int opcode : kNeededOpcodes)
    has_all &= io_uring_opcode_supported(opcodes, opcode) != 0;
  io_uring_free_probe(opcodes);
  if (!has_all) return {false, ENOSYS, "opcodes", flags};
  io_uring_prep_nop(io_uring_get_sqe(&ring));
  const int answer = io_uring_submit_and_wait(&ring, 1);
  if (answer < 0) return {false, -answer, "io_uring_enter", flags};
  return {true, 0, "", flags};
}

}  // namespace

bool built_with_uring() noexcept { return true; }

UringProbe probe_uring(RingFlags wanted, std::uint32_t num_entries) noexcept {
  io_uring ring{};
  std::uint32_t flags = 0;
  if (const int code = set_up_ring(ring, num_entries, wanted, flags)) {
    return {false, code, "io_uring_setup", 0};
  }
  const UringProbe probe = examine(ring, flags);
  io_uring_queue_exit(&ring);
  return probe;
}

}  // namespace infinity::io
