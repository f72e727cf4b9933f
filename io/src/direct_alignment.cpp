#include <cstring>

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "infinity_io/probe.h"

namespace infinity::io {

namespace {

constexpr unsigned kStatxDioAlign = 0x2000;

// The kernel's struct statx, as far as we read it: the C library's may be older than the kernel.
struct KernelStatx {
  std::uint32_t mask;
  std::uint8_t unused[148];
  std::uint32_t dio_mem_align;     // at byte 152
  std::uint32_t dio_offset_align;  // at byte 156
  std::uint8_t rest[96];
};
static_assert(sizeof(KernelStatx) == 256);
static_assert(offsetof(KernelStatx, dio_mem_align) == 152);

}  // namespace

DirectAlignment direct_alignment(int fd) noexcept {
  KernelStatx answer;
  std::memset(&answer, 0, sizeof answer);
  if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, kStatxDioAlign, &answer) != 0) return {};
  if ((answer.mask & kStatxDioAlign) == 0) return {};
  return {answer.dio_mem_align, answer.dio_offset_align};
}

}  // namespace infinity::io
