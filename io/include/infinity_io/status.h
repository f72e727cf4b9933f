// Errors as values: the library is built without exceptions.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <utility>

// A broken invariant of the library itself. Stays on in release builds: going on would hand the
// caller wrong bytes.
#define INF_ASSERT(condition)                                                                \
  do {                                                                                       \
    if (!(condition)) [[unlikely]] {                                                         \
      std::fprintf(stderr, "infinity_io: %s:%d: broken invariant: %s\n", __FILE__, __LINE__, \
                   #condition);                                                              \
      std::abort();                                                                          \
    }                                                                                        \
  } while (false)

namespace infinity::io {

enum class Operation : std::uint8_t { kRead, kWrite, kOpen, kClose, kSync, kSetup };

[[nodiscard]] constexpr const char* name(Operation operation) noexcept {
  switch (operation) {
    case Operation::kRead: return "read";
    case Operation::kWrite: return "write";
    case Operation::kOpen: return "open";
    case Operation::kClose: return "close";
    case Operation::kSync: return "sync";
    case Operation::kSetup: return "setup";
  }
  return "unknown";
}

// What failed, where. `code` is a positive errno, 0 means "no error". `detail` is static text that
// says more than strerror(code), or null.
struct [[nodiscard]] Error {
  int code = 0;
  Operation operation = Operation::kSetup;
  std::int32_t file = -1;
  std::uint64_t offset_nbytes = 0;
  std::uint64_t nbytes = 0;
  const char* detail = nullptr;

  [[nodiscard]] explicit operator bool() const noexcept { return code != 0; }
};

// A value or the reason why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) noexcept : value_(std::move(value)) {}  // NOLINT: implicit on purpose.
  Result(Error error) noexcept : error_(error) { INF_ASSERT(error_.code != 0); }  // NOLINT

  [[nodiscard]] bool ok() const noexcept { return value_.has_value(); }
  [[nodiscard]] const Error& error() const noexcept { return error_; }
  [[nodiscard]] T& value() noexcept {
    INF_ASSERT(value_.has_value());
    return *value_;
  }

 private:
  std::optional<T> value_;
  Error error_;
};

}  // namespace infinity::io
