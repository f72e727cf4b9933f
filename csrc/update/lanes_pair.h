// Two vectors as one: 16-bit arrays are then packed and stored in whole vectors, which halves what
// the split format costs, and two chains of dependent operations run side by side.
#pragma once

#include "span.h"

namespace infinity::update {
namespace {

// `V` are lanes whose store_split() takes two vectors at a time.
template <class V>
struct PairLanes {
  struct Float {
    typename V::Float first, second;
  };
  static constexpr std::size_t kCount = 2 * V::kCount;

  static Float broadcast(float value) { return {V::broadcast(value), V::broadcast(value)}; }
  static Float load(const float* source) { return {V::load(source), V::load(source + V::kCount)}; }
  template <bool kPastCaches = false>
  static void store(float* target, Float value) {
    V::template store<kPastCaches>(target, value.first);
    V::template store<kPastCaches>(target + V::kCount, value.second);
  }

  static Float add(Float a, Float b) {
    return {V::add(a.first, b.first), V::add(a.second, b.second)};
  }
  static Float sub(Float a, Float b) {
    return {V::sub(a.first, b.first), V::sub(a.second, b.second)};
  }
  static Float mul(Float a, Float b) {
    return {V::mul(a.first, b.first), V::mul(a.second, b.second)};
  }
  static Float div(Float a, Float b) {
    return {V::div(a.first, b.first), V::div(a.second, b.second)};
  }
  static Float sqrt(Float a) { return {V::sqrt(a.first), V::sqrt(a.second)}; }
  static Float fma(Float a, Float b, Float c) {
    return {V::fma(a.first, b.first, c.first), V::fma(a.second, b.second, c.second)};
  }
  static Float signed_by(Float a, Float magnitude) {
    return {V::signed_by(a.first, magnitude.first), V::signed_by(a.second, magnitude.second)};
  }
  static Float keep_infinity(Float a, Float b) {
    return {V::keep_infinity(a.first, b.first), V::keep_infinity(a.second, b.second)};
  }

  static Float load_bf16(const std::uint16_t* source) {
    return {V::load_bf16(source), V::load_bf16(source + V::kCount)};
  }
  static Float load_split(const std::uint16_t* weight, const std::int16_t* residual) {
    return {V::load_split(weight, residual),
            V::load_split(weight + V::kCount, residual + V::kCount)};
  }
  template <bool kPastCaches>
  static void store_split(std::uint16_t* weight, std::int16_t* residual, Float master) {
    V::template store_split<kPastCaches>(weight, residual, master.first, master.second);
  }
};

}  // namespace
}  // namespace infinity::update
