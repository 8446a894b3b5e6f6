// The scalars of one optimizer step that depend on the gradients. Kernels read them by pointer, so that an
// accelerator can compute them in device memory without a host round trip.
#pragma once

#include <cmath>
#include <cstdint>

#include "zc/base/host_device.h"

namespace zc::math {

struct StepScalars {
  double grad_norm = 0;    // L2 norm of the mean gradient, before clipping; infinity when skip
  double clip = 1;         // min(1, max_norm / (grad_norm + 1e-6)); 1 without clipping
  float factor = 1;        // what each summed gradient is multiplied by: clip / divisor, rounded once
  std::uint32_t skip = 0;  // 1: a gradient is not finite, nothing may be updated
};

// square_sum: sum of squares of the summed gradients, as they stand in the accumulators, without the blocks that are
// not finite; finite: there is no such block on any rank. divisor: loss scale times number of micro-batches, exact in
// double. max_norm: 0 switches clipping off. The clip rule is torch.nn.utils.clip_grad_norm_'s.
ZC_HOST_DEVICE inline StepScalars step_scalars(double square_sum, bool finite, double divisor, double max_norm) {
  StepScalars out;
  if (!finite) {
    out.grad_norm = HUGE_VAL;
    out.skip = 1;
    return out;
  }
  out.grad_norm = std::sqrt(square_sum) / divisor;
  if (max_norm > 0) {
    const double ratio = max_norm / (out.grad_norm + 1e-6);
    out.clip = ratio < 1 ? ratio : 1;
  }
  out.factor = static_cast<float>(out.clip / divisor);
  return out;
}

}  // namespace zc::math
