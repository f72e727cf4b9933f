// What tests put between a lane and the kernel. No caller of the library sees this.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "infinity_io/engine.h"
#include "block.h"

namespace infinity::io {

// Sees each answer of the kernel; what it returns is taken for the answer.
using Tamper = std::function<std::int64_t(const Block&, std::int64_t)>;

struct Hooks {
  Tamper tamper;
};

struct EngineForTests {
  static Result<std::unique_ptr<Engine>> open(const Options& options, Tamper tamper) {
    return Engine::open(options, std::make_shared<const Hooks>(Hooks{std::move(tamper)}));
  }
};

}  // namespace infinity::io
