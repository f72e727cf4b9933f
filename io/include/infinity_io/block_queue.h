// The order in which parts go to one device. A plain data structure: the lane locks it.
#pragma once

#include <array>
#include <cstdint>

#include "infinity_io/request.h"

namespace infinity::io {

// Strict priority, first come first served within one, with one exception: after
// `kMaxOvertakes` blocks in a row that went ahead of a waiting write-back, one block of it goes
// through. Otherwise slots that only write-backs can free would starve the reads that wait for
// those slots.
class BlockQueue {
 public:
  static constexpr std::uint32_t kMaxOvertakes = 8;

  void push(Part* part) noexcept;

  // The part whose turn it is, or null. It stays queued: take one block from it, then charge() it.
  [[nodiscard]] Part* choose() const noexcept;

  // Counts one block taken from `part`, which must be the one choose() named.
  void charge(const Part* part) noexcept;

  // Removes a queued part, whichever it is.
  void remove(Part* part) noexcept;

  // Moves a queued part behind the others of a more urgent class.
  void promote(Part* part, Priority priority) noexcept;

  [[nodiscard]] bool empty() const noexcept { return choose() == nullptr; }

 private:
  struct Fifo {
    Part* head = nullptr;
    Part* tail = nullptr;
  };

  [[nodiscard]] Part* most_urgent() const noexcept;

  std::array<Fifo, kNumPriorities> fifos_;
  std::uint32_t num_overtakes_ = 0;
};

}  // namespace infinity::io
