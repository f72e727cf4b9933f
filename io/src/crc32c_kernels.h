// The kernels of crc32c.h that need instructions of one processor family. Each is compiled for its
// own instruction set; crc32c.cpp asks the processor before it calls one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity::io {

inline constexpr std::uint32_t kCrc32cPolynomial = 0x82F63B78;  // reflected

#if defined(__x86_64__)

// SSE4.2: the crc32 instruction, on four pages at a time.
void crc32c_by_sse42(const unsigned char* pages, std::size_t num_pages,
                     std::uint32_t* checksums) noexcept;

// SSE4.2 and PCLMULQDQ: the crc32 instruction on three pages and folding on four others, which use
// different execution ports.
void crc32c_by_pclmul(const unsigned char* pages, std::size_t num_pages,
                      std::uint32_t* checksums) noexcept;

// AVX2 and VPCLMULQDQ: the crc32 instruction on three pages and folding, 32 bytes at a time, on
// four others.
void crc32c_by_vpclmul256(const unsigned char* pages, std::size_t num_pages,
                          std::uint32_t* checksums) noexcept;

// AVX-512F and VPCLMULQDQ: folding, 64 bytes of each of eight pages at a time.
void crc32c_by_vpclmul(const unsigned char* pages, std::size_t num_pages,
                       std::uint32_t* checksums) noexcept;

#elif defined(__aarch64__)

// The crc32cx instruction of ARMv8-A's CRC extension, on four pages at a time.
void crc32c_by_armv8(const unsigned char* pages, std::size_t num_pages,
                     std::uint32_t* checksums) noexcept;

#endif

}  // namespace infinity::io
