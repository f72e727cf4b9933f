// The floating-point environment of kernels whose bits must not depend on the caller.
#pragma once

#include <cfenv>

namespace infinity::update {

// The IEEE defaults while it lives: torch can set the flushing of denormals on some threads only.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;
  ~DefaultFloatEnvironment() { std::fesetenv(&before_); }

 private:
  std::fenv_t before_{};
};

}  // namespace infinity::update
