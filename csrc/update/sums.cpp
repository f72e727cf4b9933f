#include "sums.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "float_environment.h"
#include "thread_pool.h"

namespace infinity::update {

namespace {

// What a thread takes at a time: 1 MiB of fp32, a hundred microseconds.
constexpr std::size_t kItemNumel = std::size_t{1} << 18;
constexpr std::size_t kItemNbytes = std::size_t{1} << 21;
// A copy of so many bytes leaves nothing in caches that would be there when it is read.
constexpr std::size_t kStreamedNbytes = std::size_t{1} << 23;

float widen(float value) { return value; }
float widen(std::uint16_t value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value) << 16U);
}

// Calls body(start, stop) for all parts of `size`.
template <class Body>
void in_parts(std::size_t size, std::size_t part_size, std::size_t num_threads, const Body& body) {
  const std::size_t num_parts = size / part_size + (size % part_size != 0);
  process_pool().run(num_parts, num_threads, [&](std::size_t part) {
    const DefaultFloatEnvironment environment;
    body(part * part_size, std::min((part + 1) * part_size, size));
  });
}

// As memcpy, past the caches: the old bytes of the target are not read, a third of the traffic.
void copy_streamed(std::byte* to, const std::byte* from, std::size_t nbytes) {
#if defined(__x86_64__)
  constexpr std::size_t kLine = 64;
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(to) % kLine;
  const std::size_t head = std::min(nbytes, misaligned == 0 ? 0 : kLine - misaligned);
  std::memcpy(to, from, head);
  std::size_t done = head;
  for (; done + kLine <= nbytes; done += kLine) {
    const auto* source = reinterpret_cast<const __m128i*>(from + done);
    auto* target = reinterpret_cast<__m128i*>(to + done);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(to + done, from + done, nbytes - done);
  _mm_sfence();  // Whoever is told that it is over reads the new bytes.
#else
  std::memcpy(to, from, nbytes);
#endif
}

template <class T>
void add_of(float* total, const T* term, std::size_t numel, std::size_t num_threads) {
  in_parts(numel, kItemNumel, num_threads, [=](std::size_t start, std::size_t stop) {
    for (std::size_t i = start; i < stop; ++i) total[i] += widen(term[i]);
  });
}

template <class T>
void multiply_of(float* product, const T* values, float factor, std::size_t numel,
                 std::size_t num_threads) {
  in_parts(numel, kItemNumel, num_threads, [=](std::size_t start, std::size_t stop) {
    for (std::size_t i = start; i < stop; ++i) product[i] = widen(values[i]) * factor;
  });
}

}  // namespace

void add(float* total, const void* term, GradientFormat format, std::size_t numel,
         std::size_t num_threads) {
  if (format == GradientFormat::kFp32) {
    add_of(total, static_cast<const float*>(term), numel, num_threads);
  } else {
    add_of(total, static_cast<const std::uint16_t*>(term), numel, num_threads);
  }
}

void multiply(float* product, const void* values, GradientFormat format, float factor,
              std::size_t numel, std::size_t num_threads) {
  if (format == GradientFormat::kFp32) {
    multiply_of(product, static_cast<const float*>(values), factor, numel, num_threads);
  } else {
    multiply_of(product, static_cast<const std::uint16_t*>(values), factor, numel, num_threads);
  }
}

void copy(void* target, const void* source, std::size_t nbytes, std::size_t num_threads) {
  auto* to = static_cast<std::byte*>(target);
  const auto* from = static_cast<const std::byte*>(source);
  const bool is_streamed = nbytes >= kStreamedNbytes && target != source;
  in_parts(nbytes, kItemNbytes, num_threads, [=](std::size_t start, std::size_t stop) {
    if (is_streamed) {
      copy_streamed(to + start, from + start, stop - start);
    } else {
      std::memcpy(to + start, from + start, stop - start);
    }
  });
}

}  // namespace infinity::update
