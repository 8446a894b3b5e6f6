// What becomes of one optimizer step: a pure rule from the reduced norm to the step's scalars and the next loss scale,
// for host and device alike.
#pragma once

#include "zc/math/loss_scale.h"
#include "zc/math/step_scalars.h"

namespace zc::math {

struct StepRule {
  double divisor = 1;   // of the summed gradients, without the loss scale: the number of micro-batches
  double max_norm = 0;  // 0: no clipping
  bool scaled = false;  // the gradients carry the loss scale in StepOutcome::scale
  LossScaleRule loss_scale{};
};

// Lives on from step to step in the memory of the device: the loss scale is both its input and its result.
struct StepOutcome {
  StepScalars scalars{};
  LossScaleState scale{};       // after the step
  float scale_f32 = 1;          // what the next losses are multiplied by
  std::uint32_t exhausted = 0;  // 1: an overflow at the minimum scale
};

// square_sum, finite: as for step_scalars().
ZC_HOST_DEVICE inline void finish_step(double square_sum, bool finite, const StepRule& rule, StepOutcome& outcome) {
  const double divisor = rule.scaled ? outcome.scale.scale * rule.divisor : rule.divisor;
  outcome.scalars = step_scalars(square_sum, finite, divisor, rule.max_norm);
  if (!rule.scaled) return;
  outcome.exhausted = update(rule.loss_scale, outcome.scale, !finite) ? 0 : 1;
  outcome.scale_f32 = static_cast<float>(outcome.scale.scale);
}

}  // namespace zc::math
