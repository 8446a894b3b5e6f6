// Element conversion between fp32, fp16 and bf16: exact to fp32, then rounded once to nearest even.
#pragma once

#include <type_traits>

#include "zc/base/half.h"

namespace zc::math {

// To: float, F16 or BF16.
template <class To>
ZC_HOST_DEVICE inline To from_float(float value) {
  if constexpr (std::is_same_v<To, F16>) {
    return to_f16(value);
  } else if constexpr (std::is_same_v<To, BF16>) {
    return to_bf16(value);
  } else {
    static_assert(std::is_same_v<To, float>);
    return value;
  }
}

template <class To, class From>
ZC_HOST_DEVICE inline To cast_element(From value) {
  return from_float<To>(to_float(value));
}

}  // namespace zc::math
