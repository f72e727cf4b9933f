// The order in which parts go to one device. A plain data structure: the lane locks it.
#pragma once

#include <array>
#include <cstdint>

#include "queued_request.h"

namespace infinity::io {

// Strict priority, first come first served within one, with one exception: a class has patience.
// After so many blocks in a row that went ahead of a waiting one of it, one block of it goes
// through. Otherwise slots that only write-backs can free would starve the reads that wait for
// those slots, and a drive that training keeps busy would never let a copy end.
class BlockQueue {
 public:
  static constexpr std::uint32_t kEndless = ~0U;
  static constexpr std::array<std::uint32_t, kNumPriorities> kPatience = {kEndless, kEndless,
                                                                          kEndless, 8, 16};

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

  std::array<Fifo, kNumPriorities> fifos_;
  std::array<std::uint32_t, kNumPriorities> num_overtakes_{};  // of the one that waits longest
};

}  // namespace infinity::io
