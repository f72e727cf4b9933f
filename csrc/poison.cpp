#include "poison.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>

#include <sys/mman.h>
#include <unistd.h>

namespace infinity {

namespace {

constexpr std::size_t kStepNbytes = std::size_t{2} << 20;

// Shared by all windows of the process and never closed: pages of it may be mapped to the end.
struct PoisonFile {
  std::mutex mutex;
  int fd = -1;
  std::size_t nbytes = 0;
  std::size_t num_pieces = 0;  // of all windows
};

PoisonFile& file() noexcept {
  static PoisonFile instance;
  return instance;
}

// Makes the file so large. Its mutex must be held.
bool grow(PoisonFile& file, std::size_t nbytes) noexcept {
  if (file.fd < 0) file.fd = memfd_create("infinity-poison", MFD_CLOEXEC);
  if (file.fd < 0 || ftruncate(file.fd, static_cast<off_t>(std::max(nbytes, file.nbytes))) != 0) {
    return false;
  }
  while (file.nbytes < nbytes) {
    void* fresh = mmap(nullptr, kStepNbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd,
                       static_cast<off_t>(file.nbytes));
    if (fresh == MAP_FAILED) return false;
    std::memset(fresh, 0xFF, kStepNbytes);
    munmap(fresh, kStepNbytes);
    file.nbytes += kStepNbytes;
  }
  return true;
}

}  // namespace

Poison::~Poison() {
  if (num_pieces_ == 0) return;
  std::lock_guard lock(file().mutex);
  file().num_pieces -= num_pieces_;
}

bool Poison::open(std::size_t capacity_nbytes) noexcept {
  const std::size_t eighth = (capacity_nbytes / 8 + kStepNbytes - 1) / kStepNbytes * kStepNbytes;
  const std::size_t piece = std::clamp(eighth, kMinPoisonPieceNbytes, kMaxPoisonPieceNbytes);
  const std::size_t num_pieces = (capacity_nbytes + piece - 1) / piece;
  std::lock_guard lock(file().mutex);
  if (file().num_pieces + num_pieces > kMaxPoisonPieces || !grow(file(), piece)) return false;
  file().num_pieces += num_pieces;
  piece_nbytes_ = piece;
  num_pieces_ = num_pieces;
  return true;
}

int Poison::cover(std::uintptr_t window, std::size_t offset_nbytes,
                  std::size_t nbytes) const noexcept {
  if (piece_nbytes_ == 0) return EOPNOTSUPP;
  const int fd = file().fd;
  const std::size_t end = offset_nbytes + nbytes;
  while (offset_nbytes < end) {
    // The same place of the window always shows the same place of the file, so that the kernel
    // merges neighbours, however the window was cut up in between.
    const std::size_t in_piece = offset_nbytes % piece_nbytes_;
    const std::size_t length = std::min(end - offset_nbytes, piece_nbytes_ - in_piece);
    void* at = reinterpret_cast<void*>(window + offset_nbytes);  // NOLINT
    void* got =
        mmap(at, length, PROT_READ, MAP_SHARED | MAP_FIXED, fd, static_cast<off_t>(in_piece));
    if (got == MAP_FAILED) return errno;
    offset_nbytes += length;
  }
  return 0;
}

}  // namespace infinity
