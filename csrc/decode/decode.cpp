#include "decode.h"

#include <algorithm>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "kernels.h"
#include "update/dispatch.h"
#include "update/float_environment.h"
#include "update/thread_pool.h"

namespace infinity::decode {

namespace {

// Elements that one thread takes at a time; waking a thread costs about what that many do.
constexpr std::size_t kItemNumel = std::size_t{1} << 16;

// A tile of a transposed output is decoded by rows, and stored by columns.
constexpr std::size_t kTileRows = 128;
constexpr std::size_t kTileColumns = 64;

KernelTable find_kernels(std::string_view simd) {
  const update::InstructionSet* set = update::find_instruction_set(simd);
  const std::string_view name = set == nullptr ? std::string_view("scalar") : set->name;
  KernelTable table = scalar_kernels();
  if (name == "avx2") table = avx2_kernels();
  if (name == "avx512") table = avx512_kernels();
  return table.fp8[0] == nullptr ? scalar_kernels() : table;
}

RowsKernel kernel_of(const KernelTable& table, const Job& job) {
  const auto format = static_cast<std::size_t>(job.out_format);
  const auto product = static_cast<std::size_t>(job.product_format);
  if (job.code_format == CodeFormat::kFp8) return table.fp8[format];
  const bool is_affine = job.code_format == CodeFormat::kAffine;
  return is_affine ? table.affine[product][format] : table.four_bits[product][format];
}

std::size_t item_nbytes(FloatFormat format) { return format == FloatFormat::kFp32 ? 4 : 2; }

unsigned char* address_of(const Job& job, std::size_t row, std::size_t column) {
  const auto offset = static_cast<std::ptrdiff_t>(row / job.num_rows) * job.matrix_stride +
                      static_cast<std::ptrdiff_t>(row % job.num_rows) * job.row_stride +
                      static_cast<std::ptrdiff_t>(column) * job.column_stride;
  return static_cast<unsigned char*>(job.out) +
         offset * static_cast<std::ptrdiff_t>(item_nbytes(job.out_format));
}

// Stores columns of a tile whose rows are `kTileColumns` elements apart; `out` returns the address
// of a column's first element.
template <class Element, class Address>
void store_columns(const Element* tile, std::size_t num_rows, std::size_t column,
                   std::size_t num_columns, std::ptrdiff_t stride, const Address& out) {
  for (std::size_t c = column; c < num_columns; ++c) {
    Element* to = out(c);
    for (std::size_t r = 0; r < num_rows; ++r) {
      to[static_cast<std::ptrdiff_t>(r) * stride] = tile[r * kTileColumns + c];
    }
  }
}

#if defined(__SSE2__)

// Eight rows of eight elements become eight columns.
inline void transpose8(const std::uint16_t* tile, std::uint16_t* const* out) {
  __m128i a[8], b[8];
  for (std::size_t r = 0; r < 8; ++r) {
    a[r] = _mm_load_si128(reinterpret_cast<const __m128i*>(tile + r * kTileColumns));
  }
  for (std::size_t i = 0; i < 4; ++i) {
    b[2 * i] = _mm_unpacklo_epi16(a[i], a[i + 4]);
    b[2 * i + 1] = _mm_unpackhi_epi16(a[i], a[i + 4]);
  }
  for (std::size_t i = 0; i < 4; ++i) {
    a[2 * i] = _mm_unpacklo_epi16(b[i], b[i + 4]);
    a[2 * i + 1] = _mm_unpackhi_epi16(b[i], b[i + 4]);
  }
  for (std::size_t i = 0; i < 4; ++i) {
    b[2 * i] = _mm_unpacklo_epi16(a[i], a[i + 4]);
    b[2 * i + 1] = _mm_unpackhi_epi16(a[i], a[i + 4]);
  }
  for (std::size_t c = 0; c < 8; ++c) _mm_storeu_si128(reinterpret_cast<__m128i*>(out[c]), b[c]);
}

// Stores the columns that are a multiple of eight, as store_columns. Returns how many.
template <class Address>
std::size_t store_by_eight(const std::uint16_t* tile, std::size_t num_rows,
                           std::size_t num_columns, const Address& out) {
  const std::size_t full_rows = num_rows / 8 * 8;
  std::size_t column = 0;
  for (; column + 8 <= num_columns; column += 8) {
    std::uint16_t* to[8];
    for (std::size_t c = 0; c < 8; ++c) to[c] = out(column + c);
    for (std::size_t row = 0; row < full_rows; row += 8) {
      transpose8(tile + row * kTileColumns + column, to);
      for (auto& address : to) address += 8;
    }
    for (std::size_t row = full_rows; row < num_rows; ++row) {
      for (std::size_t c = 0; c < 8; ++c) *to[c]++ = tile[row * kTileColumns + column + c];
    }
  }
  return column;
}

#endif

template <class Element>
void store_tile(const Job& job, const Element* tile, std::size_t row, std::size_t num_rows,
                std::size_t first_column, std::size_t num_columns) {
  const auto address = [&](std::size_t column) {
    return reinterpret_cast<Element*>(address_of(job, row, first_column + column));
  };
  std::size_t column = 0;
#if defined(__SSE2__)
  if constexpr (sizeof(Element) == 2) {
    if (job.row_stride == 1) column = store_by_eight(tile, num_rows, num_columns, address);
  }
#endif
  store_columns(tile, num_rows, column, num_columns, job.row_stride, address);
}

template <class Element>
void decode_tile(const Job& job, RowsKernel kernel, std::size_t row, std::size_t num_rows,
                 std::size_t column, std::size_t num_columns) {
  alignas(64) Element tile[kTileRows * kTileColumns];
  kernel(job, row, num_rows, column, num_columns, tile, kTileColumns);
  store_tile(job, tile, row, num_rows, column, num_columns);
}

struct Band {  // Rows of one matrix, counted over all matrices, and columns of them.
  std::size_t row, num_rows, column, num_columns;
};

// Cuts every matrix into bands of `band_rows` x `band_columns`.
class Bands {
 public:
  Bands(const Job& job, std::size_t band_rows, std::size_t band_columns)
      : job_(job),
        band_rows_(band_rows),
        band_columns_(band_columns),
        down_((job.num_rows + band_rows - 1) / band_rows),
        across_((job.num_columns + band_columns - 1) / band_columns) {}

  [[nodiscard]] std::size_t count() const { return job_.num_matrices * down_ * across_; }
  [[nodiscard]] Band at(std::size_t index) const {
    const std::size_t column = index % across_ * band_columns_;
    const std::size_t row = index / across_ % down_ * band_rows_;
    const std::size_t matrix = index / across_ / down_;
    return {matrix * job_.num_rows + row, std::min(band_rows_, job_.num_rows - row), column,
            std::min(band_columns_, job_.num_columns - column)};
  }

 private:
  const Job& job_;
  std::size_t band_rows_, band_columns_, down_, across_;
};

void decode_rows(const Job& job, RowsKernel kernel, const Band& band) {
  kernel(job, band.row, band.num_rows, band.column, band.num_columns,
         address_of(job, band.row, band.column), job.row_stride);
}

void decode_tiles(const Job& job, RowsKernel kernel, const Band& band) {
  const std::size_t stop = band.column + band.num_columns;
  for (std::size_t column = band.column; column < stop; column += kTileColumns) {
    const std::size_t num_columns = std::min(kTileColumns, stop - column);
    if (job.out_format == FloatFormat::kFp32) {
      decode_tile<std::uint32_t>(job, kernel, band.row, band.num_rows, column, num_columns);
    } else {
      decode_tile<std::uint16_t>(job, kernel, band.row, band.num_rows, column, num_columns);
    }
  }
}

}  // namespace

void run(const Job& job, std::size_t num_threads, std::string_view simd) {
  const std::size_t numel = job.num_matrices * job.num_rows * job.num_columns;
  if (numel == 0) return;
  const KernelTable table = find_kernels(simd);
  const RowsKernel kernel = kernel_of(table, job);
  const bool is_by_rows = job.column_stride == 1 || job.num_columns == 1;
  const std::size_t band_columns = std::min(job.num_columns, kItemNumel);
  const std::size_t rows_of_item = std::max<std::size_t>(1, kItemNumel / band_columns);
  const Bands bands(job, is_by_rows ? rows_of_item : kTileRows,
                    is_by_rows ? band_columns : kItemNumel / kTileRows);
  const std::size_t num_worth = (numel + kItemNumel - 1) / kItemNumel;
  update::process_pool().run(bands.count(), std::min(num_threads, num_worth),
                             [&](std::size_t index) {
                               const update::DefaultFloatEnvironment environment;
                               const Band band = bands.at(index);
                               is_by_rows ? decode_rows(job, kernel, band)
                                          : decode_tiles(job, kernel, band);
                             });
}

}  // namespace infinity::decode
