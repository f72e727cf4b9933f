// Which instruction sets this processor and this build have, and their kernels.
#pragma once

#include <span>
#include <string_view>

#include "kernels.h"

namespace infinity::update {

struct InstructionSet {
  std::string_view name;
  KernelTable table;
};

// Those that can run here, the widest first; "scalar" is always the last. Thread-safe.
[[nodiscard]] std::span<const InstructionSet> instruction_sets() noexcept;

// By name; "" is the widest. Null when it cannot run here.
[[nodiscard]] const InstructionSet* find_instruction_set(std::string_view name) noexcept;
[[nodiscard]] const RuleKernels* find_rule(const InstructionSet& set,
                                           std::string_view name) noexcept;

}  // namespace infinity::update
