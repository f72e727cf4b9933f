// What a released range of a window reads as: bytes of 0xFF, NaN in every floating-point format.
//
// One file in memory holds them for the whole process; windows map it, read-only and over and over,
// where they have no pages. The larger the piece that is mapped at a time, the fewer mappings and
// microseconds it takes, and the more memory the file.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity {

inline constexpr std::size_t kMinPoisonPieceNbytes = std::size_t{8} << 20;
inline constexpr std::size_t kMaxPoisonPieceNbytes = std::size_t{64} << 20;

// Mappings that poison may take, of the 65530 that Linux gives a process (vm.max_map_count).
inline constexpr std::size_t kMaxPoisonPieces = 16384;

// The part that one window has in the poison: none (piece_nbytes 0) until open(), and when memory
// or the budget of mappings ran out.
class Poison {
 public:
  Poison() = default;
  Poison(const Poison&) = delete;
  Poison& operator=(const Poison&) = delete;
  ~Poison();

  // Makes ready for a window of `capacity_nbytes`: an eighth of it in one piece, within the limits
  // above. Returns false when its ranges must stay without access instead.
  bool open(std::size_t capacity_nbytes) noexcept;

  // Maps poison over a range of the window that starts at `window`. Neighbours merge. Returns 0 or
  // an errno; EOPNOTSUPP when open() returned false.
  [[nodiscard]] int cover(std::uintptr_t window, std::size_t offset_nbytes,
                          std::size_t nbytes) const noexcept;

 private:
  std::size_t piece_nbytes_ = 0;
  std::size_t num_pieces_ = 0;
};

}  // namespace infinity
