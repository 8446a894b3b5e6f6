// The floating-point environment that results depend on.
#pragma once

#include <cfenv>

namespace zc {

// Within a scope: round to nearest even, subnormals kept. A host program may have asked its threads to flush
// subnormals to zero (torch.set_flush_denormal, some libraries' fast-math start-up code), and new threads inherit it.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace zc
