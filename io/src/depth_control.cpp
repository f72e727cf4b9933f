#include "depth_control.h"

#include <algorithm>

namespace infinity::io {

DepthControl::DepthControl(std::uint32_t start, std::uint32_t least, std::uint32_t most) noexcept
    : base_(std::clamp(start, least, most)), least_(least), most_(most) {}

void DepthControl::note(double rate) noexcept {
  if (!is_in_trial()) {
    before_ = rate;
    if (left_ > 0) {
      --left_;
    } else {
      begin_trial();
    }
    return;
  }
  if (is_other_) {
    between_ = rate;
    is_other_ = false;
    return;
  }
  ratios_[num_ratios_++] = between_ / (0.5 * (before_ + rate));
  before_ = rate;
  is_other_ = num_ratios_ < kNumPairs;
  if (is_other_) return;
  std::sort(ratios_.begin(), ratios_.end());
  const double gain = ratios_[kNumPairs / 2] - 1;
  end_trial(is_up_ ? gain > kRaise : gain >= -kLower);
}

void DepthControl::interrupt() noexcept {
  if (is_in_trial()) end_trial(false);
}

void DepthControl::begin_trial() noexcept {
  if (neighbour(is_up_) == base_) is_up_ = !is_up_;
  const std::uint32_t other = neighbour(is_up_);
  if (other == base_) return;  // Both limits are the same.
  other_ = other;
  is_other_ = true;
  num_ratios_ = 0;
}

void DepthControl::end_trial(bool is_won) noexcept {
  if (is_won) {
    base_ = other_;
    pause_ = 0;  // It may go further the same way.
  } else {
    is_up_ = !is_up_;
    pause_ = std::clamp(2 * pause_, kMinPause, kMaxPause);
  }
  other_ = 0;
  is_other_ = false;
  left_ = pause_;
}

std::uint32_t DepthControl::neighbour(bool is_up) const noexcept {
  return is_up ? std::min(most_, 2 * base_) : std::max(least_, base_ / 2);
}

}  // namespace infinity::io
