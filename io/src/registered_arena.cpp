#include "registered_arena.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <vector>

#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "block.h"

namespace infinity::io {

namespace {

// Linux 6.12; liburing 2.3 does not name them. See io_uring_register(2).
constexpr unsigned kRegisterCloneBuffers = 30;
struct CloneBuffers {
  std::uint32_t source_fd = 0;
  std::uint32_t flags = 0;
  std::uint32_t zeros[6] = {};
};

// 0 or a positive errno: EINVAL where the kernel has no such call, ENXIO without buffers.
[[nodiscard]] int clone_buffers(io_uring& target, const io_uring& source) noexcept {
  CloneBuffers wish;
  wish.source_fd = static_cast<std::uint32_t>(source.ring_fd);
  return syscall(__NR_io_uring_register, target.ring_fd, kRegisterCloneBuffers, &wish, 1) < 0
             ? errno
             : 0;
}

}  // namespace

RegisteredArena::~RegisteredArena() {
  if (state_ == State::kFilled) io_uring_unregister_buffers(&source_);  // Unpins now.
  if (state_ == State::kFilled || state_ == State::kEmpty) io_uring_queue_exit(&source_);
}

int RegisteredArena::give(io_uring& ring) noexcept {
  if (arena_.nbytes == 0) return 0;
  {
    std::lock_guard lock(mutex_);
    if (has_source(ring)) {
      if (state_ == State::kEmpty) {
        if (const int code = register_with(source_)) return code;
        state_ = State::kFilled;
      }
      if (clone_buffers(ring, source_) == 0) return 0;
    }
  }
  return register_with(ring);
}

bool RegisteredArena::has_source(io_uring& ring) noexcept {
  if (state_ == State::kUnknown) {
    state_ = State::kRefused;
    if (io_uring_queue_init(1, &source_, 0) == 0) {
      if (clone_buffers(ring, source_) == ENXIO) {
        state_ = State::kEmpty;
        io_uring_ring_dontfork(&source_);
      } else {
        io_uring_queue_exit(&source_);
      }
    }
  }
  return state_ != State::kRefused;
}

int RegisteredArena::register_with(io_uring& ring) const noexcept {
  std::vector<iovec> buffers;
  for (std::uint64_t at = 0; at < arena_.nbytes; at += kRegisteredBufferNbytes) {
    void* base = reinterpret_cast<void*>(arena_.address + at);  // NOLINT
    buffers.push_back({base, std::min(kRegisteredBufferNbytes, arena_.nbytes - at)});
  }
  return -io_uring_register_buffers(&ring, buffers.data(), static_cast<unsigned>(buffers.size()));
}

}  // namespace infinity::io
