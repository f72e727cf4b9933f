#include "dispatch.h"

#include <array>

namespace infinity::update {

namespace {

struct Found {
  std::array<InstructionSet, 4> sets;
  std::size_t count = 0;

  void add(std::string_view name, KernelTable table) {
    if (table.rules != nullptr) sets[count++] = {name, table};
  }
};

Found find() {
  Found found;
#if defined(__x86_64__)
  // The compiler's library also asks whether the operating system saves the registers.
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512) found.add("avx512", avx512_kernels());
  if (has_avx2) found.add("avx2", avx2_kernels());
#endif
  found.add("neon", neon_kernels());  // Part of every AArch64 processor; null on others.
  found.add("scalar", scalar_kernels());
  return found;
}

}  // namespace

std::span<const InstructionSet> instruction_sets() noexcept {
  static const Found found = find();
  return {found.sets.data(), found.count};
}

const InstructionSet* find_instruction_set(std::string_view name) noexcept {
  for (const InstructionSet& set : instruction_sets()) {
    if (name.empty() || set.name == name) return &set;
  }
  return nullptr;
}

const RuleKernels* find_rule(const InstructionSet& set, std::string_view name) noexcept {
  for (std::size_t i = 0; i < set.table.num_rules; ++i) {
    if (name == set.table.rules[i].name) return &set.table.rules[i];
  }
  return nullptr;
}

}  // namespace infinity::update
