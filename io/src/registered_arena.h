// The arena as the buffers of rings: pinned once for all rings of an engine. Only built with
// liburing.
#pragma once

#include <mutex>

#include <liburing.h>

#include "infinity_io/request.h"

namespace infinity::io {

// A ring that registers the arena itself looks up every page: 70 ms for 8 GiB of huge pages, and
// 600 ms and 48 MiB of the kernel's memory for 8 GiB of small ones. A clone of another ring's
// buffers (IORING_REGISTER_CLONE_BUFFERS, Linux 6.12) takes neither, and counts once against the
// memlock limit. The ring that is cloned from does no I/O: the kernel refuses to clone from a ring
// of another thread that has SINGLE_ISSUER.
class RegisteredArena {
 public:
  explicit RegisteredArena(const ArenaRange& arena) noexcept : arena_(arena) {}
  ~RegisteredArena();
  RegisteredArena(const RegisteredArena&) = delete;
  RegisteredArena& operator=(const RegisteredArena&) = delete;

  // Gives a ring of the calling thread the arena as its buffers, in ranges of
  // kRegisteredBufferNbytes. 0, or the errno with which the kernel refused (ENOMEM:
  // RLIMIT_MEMLOCK).
  [[nodiscard]] int give(io_uring& ring) noexcept;

 private:
  enum class State { kUnknown, kRefused, kEmpty, kFilled };

  // Registers the arena with the ring itself.
  [[nodiscard]] int register_with(io_uring& ring) const noexcept;
  // `mutex_` must be held. Whether there is a ring to clone from; its buffers may still be missing.
  [[nodiscard]] bool has_source(io_uring& ring) noexcept;

  const ArenaRange arena_;
  std::mutex mutex_;
  State state_ = State::kUnknown;
  io_uring source_{};
};

}  // namespace infinity::io
