// Every rule there is. A new one is a file in rules/ and a name in the list below.
#pragma once

#include "kernels.h"
#include "norm.h"
#include "rules/adam.h"
#include "rules/lion.h"
#include "rules/sgd.h"
#include "rules/stream.h"
#include "sweep.h"
#include "sweep_blocks.h"

namespace infinity::update {
namespace {

// `V` are lanes of one vector, `L` those for arrays of 16 bits.
template <class V, class L, class Rule>
constexpr RuleKernels kernels_of() {
  static_assert(sizeof(typename Rule::Coefficients) % sizeof(float) == 0);
  static_assert(Rule::kStates <= kMaxStates);
  return {Rule::kName,
          Rule::kStates,
          sizeof(typename Rule::Coefficients) / sizeof(float),
          {{{&sweep<V, Rule, WeightFormat::kFp32, GradientFormat::kFp32>,
             &sweep<V, Rule, WeightFormat::kFp32, GradientFormat::kBf16>},
            {&sweep<L, Rule, WeightFormat::kSplit, GradientFormat::kFp32>,
             &sweep<L, Rule, WeightFormat::kSplit, GradientFormat::kBf16>}},
           {{&sweep_blocks<V, V, Rule, WeightFormat::kFp32, GradientFormat::kFp32>,
             &sweep_blocks<V, V, Rule, WeightFormat::kFp32, GradientFormat::kBf16>},
            {&sweep_blocks<V, L, Rule, WeightFormat::kSplit, GradientFormat::kFp32>,
             &sweep_blocks<V, L, Rule, WeightFormat::kSplit, GradientFormat::kBf16>}}}};
}

template <class V, class L, class... Rules>
struct RuleList {
  static constexpr RuleKernels kRules[] = {kernels_of<V, L, Rules>()...};
  static constexpr KernelTable kTable = {kRules, sizeof...(Rules), norms_of<V>()};
};

template <class V, class L>
using AllRules = RuleList<V, L, Adam, PlainSgd, MomentumSgd, Lion, Stream>;

}  // namespace
}  // namespace infinity::update
