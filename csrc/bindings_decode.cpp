// infinity._core.decode: quantised weights over addresses. Checks numbers, not memory: whether an
// address holds what it should is for infinity/codecs to know.
#include "bindings_decode.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include <pybind11/stl.h>

#include "address.h"
#include "decode/decode.h"
#include "update/dispatch.h"

namespace py = pybind11;

namespace infinity {

namespace {

using decode::FloatFormat;
using decode::Job;
using decode::Packing;
using decode::ScaleFormat;

// (address, format, strides of matrices, rows and columns in elements)
using OutTuple = std::tuple<std::uintptr_t, std::string, std::array<std::ptrdiff_t, 3>>;
using Shape = std::array<std::size_t, 3>;

FloatFormat float_format(const std::string& name) {
  if (name == "BF16") return FloatFormat::kBf16;
  if (name == "F16") return FloatFormat::kFp16;
  if (name == "F32") return FloatFormat::kFp32;
  throw py::value_error("there is no output of " + name);
}

ScaleFormat scale_format(const std::string& name) {
  if (name == "F32") return ScaleFormat::kFp32;
  if (name == "BF16") return ScaleFormat::kBf16;
  if (name == "F16") return ScaleFormat::kFp16;
  if (name == "F8_E8M0" || name == "U8") return ScaleFormat::kE8m0;
  if (name == "F8_E4M3") return ScaleFormat::kE4m3;
  throw py::value_error("there are no scales of " + name);
}

std::size_t nbytes_of(ScaleFormat format) {
  if (format == ScaleFormat::kFp32) return 4;
  return format == ScaleFormat::kBf16 || format == ScaleFormat::kFp16 ? 2 : 1;
}

Job make_job(std::uintptr_t codes, std::uintptr_t scales, const std::string& scale_name,
             const Shape& shape, const OutTuple& out) {
  const auto& [address, format, strides] = out;
  Job job;
  job.codes = pointer_to<const std::uint8_t*>(codes);
  job.scales = pointer_to<const std::uint8_t*>(scales);
  job.scale_format = scale_format(scale_name);
  job.scale_stride = nbytes_of(job.scale_format);
  job.num_matrices = shape[0];
  job.num_rows = shape[1];
  job.num_columns = shape[2];
  job.out = pointer_to<void*>(address);
  job.out_format = float_format(format);
  job.matrix_stride = strides[0];
  job.row_stride = strides[1];
  job.column_stride = strides[2];
  const bool is_empty = shape[0] == 0 || shape[1] == 0 || shape[2] == 0;
  if (!is_empty && (codes == 0 || scales == 0 || address == 0)) {
    throw py::value_error("an address is 0");
  }
  if (address % (job.out_format == FloatFormat::kFp32 ? 4 : 2) != 0) {
    throw py::value_error("the output is not aligned to its elements");
  }
  return job;
}

void run(const Job& job, std::size_t num_threads, const std::string& simd) {
  if (num_threads == 0) throw py::value_error("num_threads=0, expected at least 1");
  if (update::find_instruction_set(simd) == nullptr) {
    throw py::value_error("this processor or build has no " + simd);
  }
  const py::gil_scoped_release released;
  decode::run(job, num_threads, simd);
}

Packing packing_of(const std::string& name) {
  if (name == "ROWS") return Packing::kRows;
  if (name == "COLUMNS") return Packing::kColumns;
  if (name == "AWQ" || name == "SIGNED_AWQ") return Packing::kAwq;
  if (name == "BYTES") return Packing::kBytes;
  if (name == "PAIRS") return Packing::kPairs;
  if (name == "PLANES") return Packing::kPlanes;
  if (name == "FIELDS") return Packing::kFields;
  if (name == "FLOATS") return Packing::kFloats;
  throw py::value_error("there is no packing " + name);
}

std::uint8_t flipped_of(const std::string& packing) {
  return packing == "BYTES" ? 0x80 : packing == "SIGNED_AWQ" ? 8 : 0;
}

// Whether codes are two to a byte, with one scale for each run of them in the order of memory.
bool has_runs(const Job& job) {
  if (job.packed.packing == Packing::kPairs) return true;
  return job.packed.packing == Packing::kRows && job.packed.bits == 4 && job.order == nullptr &&
         job.block_rows == 1 && job.zeros.packing != Packing::kFloats && job.times == 1.0F &&
         job.num_columns % 8 == 0 && job.num_columns % job.group == 0;
}

// (address, or 0 for none; packing; what is added to words; the zero of all codes)
using ZerosTuple = std::tuple<std::uintptr_t, std::string, std::uint32_t, std::uint8_t>;
// (address, or 0 for none; of an order whether it is that of rows, of scales whether they divide,
// of minima whether they are added)
using PartTuple = std::pair<std::uintptr_t, bool>;
// The facts of infinity/fused/decode.py: Record.
using FieldTuple = std::array<unsigned, 3>;
using FactorsTuple = std::pair<std::string, unsigned>;
using RecordTuple =
    std::tuple<unsigned, unsigned, FieldTuple, unsigned, FieldTuple, int, FactorsTuple>;

decode::Field field_of(const FieldTuple& of, unsigned numel, unsigned nbytes) {
  const auto [at, bits, run] = of;
  const bool is_whole = bits != 0 && bits <= 8 && 8 % bits == 0 && run != 0 &&
                        numel % (run * 8 / bits) == 0;
  if (bits != 0 && (!is_whole || at + numel * bits / 8 > nbytes)) {
    throw py::value_error("a field of codes does not fit its record");
  }
  return {at, bits, run};
}

struct NamedFactors {
  const char* name;
  decode::Factors factors;
  unsigned nbytes, num_groups;
};

const NamedFactors& factors_of(const std::string& name) {
  using decode::Factors;
  static constexpr NamedFactors kAll[] = {
      {"", Factors::kNone, 0, 1},
      {"BYTES", Factors::kBytes, 16, 16},
      {"NIBBLES", Factors::kNibbles, 16, 16},
      {"SIX_PAIRS", Factors::kSixPairs, 12, 8},
      {"SIX_SIGNED", Factors::kSixSigned, 12, 16},
      {"SIX_SPLIT", Factors::kSixSplit, 6, 8},
  };
  for (const NamedFactors& one : kAll) {
    if (name == one.name) return one;
  }
  throw py::value_error("there are no factors " + name);
}

// Places the codes and numbers of a job in the records at `job.codes`.
void place(Job& job, const RecordTuple& record) {
  const auto& [numel, nbytes, low, scale, high, minimum, factors] = record;
  const NamedFactors& named = factors_of(factors.first);
  if (numel == 0 || numel > decode::Record::kMaxNumel || job.num_columns % numel != 0 ||
      job.group * named.num_groups != numel || job.are_groups_down) {
    throw py::value_error("rows are not full records of full groups");
  }
  const auto end = static_cast<int>(nbytes) - 2;
  if (static_cast<int>(scale) > end || minimum > end ||
      factors.second + named.nbytes > nbytes) {
    throw py::value_error("a scale is outside its record");
  }
  job.packed.record = {numel, nbytes, field_of(low, numel, nbytes), field_of(high, numel, nbytes)};
  job.scales = job.codes + scale;
  job.scale_stride = nbytes;
  job.minima = minimum < 0 ? nullptr : job.codes + minimum;
  job.factors = named.factors;
  job.factors_at = job.codes + factors.second;
  job.groups_of_scale = named.num_groups;
}

// The facts of infinity/fused/decode.py: CodeLayout. `values`: of 16 codes, or none.
void codes(std::uintptr_t codes, std::uintptr_t scales, const std::string& scale_name,
           const Shape& shape, const OutTuple& out, bool is_float, unsigned bits,
           const std::string& packing, const std::array<std::size_t, 2>& block,
           const std::vector<float>& values, const std::string& product, const ZerosTuple& zeros,
           const PartTuple& order, const PartTuple& global_scales, const PartTuple& minima,
           const std::optional<RecordTuple>& record, float times,
           std::size_t num_threads, const std::string& simd) {
  Job job = make_job(codes, scales, scale_name, shape, out);
  if (block[0] == 0 || block[1] == 0) throw py::value_error("a block has no elements");
  if (bits == 0 || bits > 8) throw py::value_error("codes have 1 to 8 bits");
  job.block_rows = block[0];
  job.block_columns = block[1];
  job.are_groups_down = block[0] > 1 || (order.first != 0 && order.second);
  job.group = block[job.are_groups_down ? 0 : 1];
  job.num_groups = ((job.are_groups_down ? shape[1] : shape[2]) + job.group - 1) / job.group;
  const auto& [address, zeros_packing, raised, zero] = zeros;
  const std::size_t plane = std::max<std::size_t>(1, shape[0] * shape[1] * shape[2] * bits / 8);
  job.packed = {job.codes, packing_of(packing), bits, shape[2], 0, flipped_of(packing), plane, {}};
  job.zeros = {pointer_to<const std::uint8_t*>(address), packing_of(zeros_packing), bits,
               job.are_groups_down ? shape[2] : job.num_groups, raised,
               flipped_of(zeros_packing), 1, {}};
  job.zero = zero;
  job.minima = pointer_to<const std::uint8_t*>(minima.first);
  job.are_minima_added = minima.second;
  job.times = times;
  job.order = pointer_to<const std::uint8_t*>(order.first);
  job.global_scales = pointer_to<const std::uint8_t*>(global_scales.first);
  job.is_divided = global_scales.second;
  job.product_format = float_format(product);
  job.has_values = bits == 4 && values.size() == std::size(job.values);
  if (!job.has_values && !values.empty()) {
    throw py::value_error("expected 16 values, of codes of 4 bits");
  }
  if (job.has_values) std::copy(values.begin(), values.end(), job.values);
  if (record) place(job, *record);
  job.code_format = is_float        ? decode::CodeFormat::kFp8
                    : has_runs(job) ? decode::CodeFormat::kFourBits
                                    : decode::CodeFormat::kAffine;
  if (record.has_value() != (job.packed.packing == Packing::kFields)) {
    throw py::value_error("fields are those of records");
  }
  if (!job.has_values && job.packed.packing == Packing::kPairs) {
    throw py::value_error("there are no values of codes in pairs");
  }
  run(job, num_threads, simd);
}

}  // namespace

void bind_decode(py::module_& module) {
  auto decode = module.def_submodule("decode", "Quantised weights over addresses.");
  decode.def("codes", &codes, py::arg("codes"), py::arg("scales"), py::arg("scale_format"),
             py::arg("shape"), py::arg("out"), py::kw_only(), py::arg("is_float"), py::arg("bits"),
             py::arg("packing"), py::arg("block"), py::arg("values"), py::arg("product"),
             py::arg("zeros"), py::arg("order"), py::arg("global_scales"), py::arg("minima"),
             py::arg("record"), py::arg("times"), py::arg("num_threads"), py::arg("simd"));
}

}  // namespace infinity
