// One addition of the ordered fold.
//
// An accumulator may be fp32, fp16 or bf16. Each single addition is made in fp32 and rounded once to the accumulator's
// dtype, so sources folded in one call or one by one give the same bits.
#pragma once

#include <type_traits>

#include "zc/math/cast.h"

namespace zc::math {

// A sum as an accumulator of dtype Acc (float, F16 or BF16) holds it. In 16 bits that is never -0: a small negative sum
// may round to it, and a later +0 (from a rank without a micro-batch) would change its sign. An fp32 accumulator that
// started at +0 cannot get there.
template <class Acc>
ZC_HOST_DEVICE inline Acc round_sum(float sum) {
  Acc out = from_float<Acc>(sum);
  if constexpr (!std::is_same_v<Acc, float>) out.bits = out.bits == 0x8000 ? 0 : out.bits;
  return out;
}

template <class Acc, class In>
ZC_HOST_DEVICE inline Acc add_element(Acc acc, In in) {
  return round_sum<Acc>(to_float(acc) + to_float(in));
}

}  // namespace zc::math
