// infinity._core.update: the optimizer's update over addresses. Checks numbers, not memory: whether
// an address holds what it should is for infinity/ops to know.
#include "bindings_update.h"

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <pybind11/stl.h>

#include "address.h"
#include "page_checksums.h"
#include "update/squares.h"
#include "update/sums.h"
#include "update/update.h"

namespace py = pybind11;

namespace infinity {

namespace {

using update::InstructionSet;
using update::RuleKernels;
using update::Span;

// (weight, residual or 0, states), addresses as integers. `states` are as many as the rule has; when
// they are 8-bit, the codes and the scales of each.
using ArraysTuple = std::tuple<std::uintptr_t, std::uintptr_t, std::vector<std::uintptr_t>>;
// (arrays that are read, arrays that are written, gradient, numel); the arrays may be the same.
using SpanTuple = std::tuple<ArraysTuple, ArraysTuple, std::uintptr_t, std::size_t>;

void check_array(std::uintptr_t address, std::size_t numel, std::size_t item_nbytes,
                 const char* what) {
  if (numel == 0) return;
  const bool is_there =
      address != 0 && address % item_nbytes == 0 &&
      numel <= (std::numeric_limits<std::uintptr_t>::max() - address) / item_nbytes;
  if (is_there) return;
  throw py::value_error("there cannot be " + std::to_string(numel) + " elements of " +
                        std::to_string(item_nbytes) + " bytes at address " +
                        std::to_string(address) + " (" + what + ")");
}

// That no array is missing, misaligned, or longer than memory.
void check_arrays(const ArraysTuple& arrays, std::size_t numel, bool is_8bit, bool is_split) {
  const auto& [weight, residual, states] = arrays;
  check_array(weight, numel, is_split ? 2 : 4, "weight");
  if (is_split) check_array(residual, numel, 2, "residual");
  const std::size_t num_scales = numel / update::kBlockNumel + (numel % update::kBlockNumel != 0);
  for (std::size_t i = 0; i < states.size(); ++i) {
    if (!is_8bit) {
      check_array(states[i], numel, 4, "state");
    } else if (i % 2 == 0) {
      check_array(states[i], numel, 1, "codes");
    } else {
      check_array(states[i], num_scales, 4, "scales");
    }
  }
}

update::Arrays to_arrays(const ArraysTuple& fields, const RuleKernels& rule, bool is_8bit) {
  const auto& [weight, residual, states] = fields;
  const std::size_t num_arrays = is_8bit ? 2 * rule.num_states : rule.num_states;
  if (states.size() != num_arrays) {
    throw py::value_error(std::string(rule.name) + " needs " + std::to_string(num_arrays) +
                          " arrays of state, got " + std::to_string(states.size()));
  }
  update::Arrays arrays;
  arrays.weight = pointer_to<void*>(weight);
  arrays.residual = pointer_to<std::int16_t*>(residual);
  for (std::size_t i = 0; i < rule.num_states; ++i) {
    if (is_8bit) {
      arrays.codes[i] = pointer_to<std::uint8_t*>(states[2 * i]);
      arrays.scales[i] = pointer_to<float*>(states[2 * i + 1]);
    } else {
      arrays.states[i] = pointer_to<float*>(states[i]);
    }
  }
  return arrays;
}

update::GradientFormat format_of(bool is_bf16) {
  return is_bf16 ? update::GradientFormat::kBf16 : update::GradientFormat::kFp32;
}

void apply(const std::string& rule_name, const std::vector<SpanTuple>& tuples,
           const std::vector<float>& coefficients, bool is_split, bool is_gradient_bf16,
           bool is_8bit, float gradient_scale, std::size_t num_threads, const std::string& simd,
           const std::vector<PageDigests*>& digests) {
  const InstructionSet* set = update::find_instruction_set(simd);
  if (set == nullptr) throw py::value_error("this processor or build has no " + simd);
  const RuleKernels* rule = update::find_rule(*set, rule_name);
  if (rule == nullptr) throw py::value_error("there is no rule " + rule_name);
  if (coefficients.size() != rule->num_coefficients) {
    throw py::value_error(rule_name + " takes " + std::to_string(rule->num_coefficients) +
                          " coefficients, got " + std::to_string(coefficients.size()));
  }
  std::vector<Span> spans;
  spans.reserve(tuples.size());
  for (const SpanTuple& fields : tuples) {
    const auto& [from, to, gradient, numel] = fields;
    spans.push_back({to_arrays(from, *rule, is_8bit), to_arrays(to, *rule, is_8bit),
                     pointer_to<const void*>(gradient), numel});
    check_arrays(from, numel, is_8bit, is_split);
    check_arrays(to, numel, is_8bit, is_split);
    check_array(gradient, numel, is_gradient_bf16 ? 2 : 4, "gradient");
  }
  if (num_threads == 0) throw py::value_error("num_threads=0, expected at least 1");

  update::Job job;
  job.rule = rule;
  job.coefficients = coefficients.data();
  job.weight_format = is_split ? update::WeightFormat::kSplit : update::WeightFormat::kFp32;
  job.gradient_format = format_of(is_gradient_bf16);
  job.state_format = is_8bit ? update::StateFormat::k8Bit : update::StateFormat::kFp32;
  job.gradient_scale = gradient_scale;
  job.num_threads = num_threads;
  for (const PageDigests* const pages : digests) {
    if (pages == nullptr) throw py::value_error("digests: expected PageDigests, got None");
  }
  if (!digests.empty()) {
    job.written = [&digests](const void* start, std::size_t nbytes) {
      for (PageDigests* const pages : digests) pages->add(start, nbytes);
    };
  }
  const py::gil_scoped_release released;
  update::apply(job, spans);
}

void sum_squares(std::uintptr_t values, std::size_t numel, std::uintptr_t sums,
                 std::size_t num_threads) {
  check_array(values, numel, sizeof(float), "values");
  check_array(sums, numel / update::kSquaresNumel + (numel % update::kSquaresNumel != 0),
              sizeof(double), "sums");
  if (num_threads == 0) throw py::value_error("num_threads=0, expected at least 1");
  const py::gil_scoped_release released;
  update::sum_squares(pointer_to<const float*>(values), numel, pointer_to<double*>(sums),
                      num_threads);
}

std::vector<double> roots_of(std::uintptr_t sums, std::size_t count, std::uint64_t first) {
  check_array(sums, count, sizeof(double), "sums");
  const py::gil_scoped_release released;
  return update::roots_of(pointer_to<const double*>(sums), count, first);
}

std::size_t num_roots(std::uint64_t first, std::uint64_t last) {
  if (first > last) throw py::value_error("blocks end before they begin");
  return update::num_roots(first, last);
}

double tree_sum(const std::vector<double>& roots, const std::vector<std::uint64_t>& bounds) {
  std::size_t expected = 0;
  for (std::size_t i = 1; i < bounds.size(); ++i) expected += num_roots(bounds[i - 1], bounds[i]);
  if (bounds.empty() || bounds[0] != 0 || roots.size() != expected) {
    throw py::value_error("expected runs from block 0 on, and their " + std::to_string(expected) +
                          " roots, got " + std::to_string(roots.size()));
  }
  return update::tree_sum(roots.data(), bounds.data(), bounds.size() - 1);
}

double norm_of_bf16(std::uintptr_t values, std::size_t numel, const std::string& simd,
                    std::size_t variant) {
  check_array(values, numel, 2, "values");
  const update::InstructionSet* set = update::find_instruction_set(simd);
  if (set == nullptr || variant >= set->table.norms.size()) {
    throw py::value_error("no norm for simd='" + simd + "', variant=" + std::to_string(variant));
  }
  const py::gil_scoped_release released;
  return set->table.norms[variant](pointer_to<const std::uint16_t*>(values), numel);
}

void add(std::uintptr_t total, std::uintptr_t term, std::size_t numel, bool is_bf16,
         std::size_t num_threads) {
  check_array(total, numel, sizeof(float), "total");
  check_array(term, numel, is_bf16 ? 2 : 4, "term");
  if (num_threads == 0) throw py::value_error("num_threads=0, expected at least 1");
  const py::gil_scoped_release released;
  update::add(pointer_to<float*>(total), pointer_to<const void*>(term), format_of(is_bf16), numel,
              num_threads);
}

void multiply(std::uintptr_t product, std::uintptr_t values, float factor, std::size_t numel,
              bool is_bf16, std::size_t num_threads) {
  check_array(product, numel, sizeof(float), "product");
  check_array(values, numel, is_bf16 ? 2 : 4, "values");
  if (num_threads == 0) throw py::value_error("num_threads=0, expected at least 1");
  const py::gil_scoped_release released;
  update::multiply(pointer_to<float*>(product), pointer_to<const void*>(values), format_of(is_bf16),
                   factor, numel, num_threads);
}

void copy(std::uintptr_t target, std::uintptr_t source, std::size_t nbytes,
          std::size_t num_threads) {
  check_array(target, nbytes, 1, "target");
  check_array(source, nbytes, 1, "source");
  if (num_threads == 0) throw py::value_error("num_threads=0, expected at least 1");
  const py::gil_scoped_release released;
  update::copy(pointer_to<void*>(target), pointer_to<const void*>(source), nbytes, num_threads);
}

}  // namespace

void bind_update(py::module_& module) {
  auto update = module.def_submodule("update", "The optimizer's update over addresses.");
  update.def("instruction_sets", [] {
    std::vector<std::string> names;
    for (const InstructionSet& set : update::instruction_sets()) names.emplace_back(set.name);
    return names;
  });
  update.def("apply", &apply, py::arg("rule"), py::arg("spans"), py::arg("coefficients"),
             py::kw_only(), py::arg("is_split"), py::arg("is_gradient_bf16"), py::arg("is_8bit"),
             py::arg("gradient_scale"), py::arg("num_threads"), py::arg("simd"),
             py::arg("digests") = std::vector<PageDigests*>{});
  update.attr("SQUARES_NUMEL") = update::kSquaresNumel;
  update.def("sum_squares", &sum_squares, py::arg("values"), py::arg("numel"), py::arg("sums"),
             py::kw_only(), py::arg("num_threads"));
  update.def("roots_of", &roots_of, py::arg("sums"), py::arg("count"), py::arg("first"));
  update.def("num_roots", &num_roots, py::arg("first"), py::arg("last"));
  update.def("tree_sum", &tree_sum, py::arg("roots"), py::arg("bounds"));
  update.def("norm_of_bf16", &norm_of_bf16, py::arg("values"), py::arg("numel"), py::kw_only(),
             py::arg("simd"), py::arg("variant"));
  update.attr("NUM_NORMS") = std::tuple_size_v<update::NormKernels>;
  update.def("add", &add, py::arg("total"), py::arg("term"), py::arg("numel"), py::kw_only(),
             py::arg("is_bf16"), py::arg("num_threads"));
  update.def("multiply", &multiply, py::arg("product"), py::arg("values"), py::arg("factor"),
             py::arg("numel"), py::kw_only(), py::arg("is_bf16"), py::arg("num_threads"));
  update.def("copy", &copy, py::arg("target"), py::arg("source"), py::arg("nbytes"), py::kw_only(),
             py::arg("num_threads"));
}

}  // namespace infinity
