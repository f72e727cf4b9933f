// Finds how many blocks one drive should have in flight, from the rate at which it answers.
//
// Pure: no clock, no locks. The lane measures epochs of steady work and calls note() for each.
//
// The base depth is compared with a neighbour (twice or half of it) by taking turns: base, other,
// base, other, base, other, base. An epoch at the other depth is divided by the mean of the two
// epochs around it, so a drive whose rate drifts favours neither. The median of the three ratios
// decides. A deeper queue must earn more than kRaise; a shallower one may lose at most kLower,
// because bytes in flight are what an urgent read waits for. kLower < kRaise, so a drive that
// answers equally fast to both moves down and stays there.
// After a trial that changes nothing the next one comes later: the pause doubles.
#pragma once

#include <array>
#include <cstdint>

namespace infinity::io {

class DepthControl {
 public:
  static constexpr double kRaise = 0.03;
  static constexpr double kLower = 0.01;
  static constexpr std::uint32_t kMinPause = 8;  // epochs
  static constexpr std::uint32_t kMaxPause = 512;

  // `least` and `most` bound depth(). least == most: fixed.
  DepthControl(std::uint32_t start, std::uint32_t least, std::uint32_t most) noexcept;

  // Blocks to have in flight during the epoch that runs now.
  [[nodiscard]] std::uint32_t depth() const noexcept { return is_other_ ? other_ : base_; }

  // The depth that has won so far; depth() differs from it only during a trial.
  [[nodiscard]] std::uint32_t base() const noexcept { return base_; }

  // The epoch at depth() is over: bytes per second.
  void note(double rate) noexcept;

  // The epoch says nothing: the queue ran empty, or the work was of another kind. A trial is
  // called off and counts as one that changed nothing.
  void interrupt() noexcept;

 private:
  static constexpr std::size_t kNumPairs = 3;

  void begin_trial() noexcept;
  void end_trial(bool is_won) noexcept;

  [[nodiscard]] bool is_in_trial() const noexcept { return other_ != 0; }
  [[nodiscard]] std::uint32_t neighbour(bool is_up) const noexcept;

  std::uint32_t base_;
  std::uint32_t least_;
  std::uint32_t most_;
  std::uint32_t other_ = 0;  // 0: no trial
  bool is_other_ = false;    // The epoch that runs is at `other_`.
  bool is_up_ = true;        // the direction of the next trial, or of the one that runs
  std::uint32_t pause_ = 0;  // epochs after a trial that changed nothing
  std::uint32_t left_ = 0;   // epochs until the next trial
  double before_ = 0;        // rate of the last epoch at the base
  double between_ = 0;       // rate of the last epoch at the other depth
  std::array<double, kNumPairs> ratios_{};
  std::size_t num_ratios_ = 0;
};

}  // namespace infinity::io
