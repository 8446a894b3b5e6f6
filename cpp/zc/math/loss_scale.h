// The loss-scale rule of fp16 training: a pure state machine, for host and device alike.
//
// The rule is that of DeepSpeed (runtime/fp16/loss_scaler.py), step for step, so that runs move over with the same
// sequence of scales. With `hysteresis` h > 1 the first h - 1 overflows cost a skipped step each but leave the scale;
// from then on each overflow halves it. A step without overflow that follows `window` such steps in a row doubles the
// scale and refills h; so does every `window`-th one after it.
#pragma once

#include <cstdint>

#include "zc/base/host_device.h"

namespace zc::math {

struct LossScaleRule {
  bool dynamic = true;                  // false: the scale stays at initial_scale
  double initial_scale = 65536;         // > 0
  std::int64_t window = 1000;           // >= 1
  std::int64_t hysteresis = 2;          // >= 1
  bool consecutive_hysteresis = false;  // true: every step without overflow refills the hysteresis
  double min_scale = 1;                 // halving stops here
};

inline constexpr double kLossScaleFactor = 2;

// All of it belongs in a checkpoint.
struct LossScaleState {
  double scale = 1;
  std::int64_t iteration = 0;       // steps seen
  std::int64_t last_overflow = -1;  // the iteration of the last overflow
  std::int64_t hysteresis = 1;      // overflows left until the scale halves; 1: the next one does

  friend bool operator==(const LossScaleState&, const LossScaleState&) = default;
};

ZC_HOST_DEVICE inline LossScaleState initial_loss_scale(const LossScaleRule& rule) {
  LossScaleState state;
  state.scale = rule.initial_scale;
  state.hysteresis = rule.hysteresis;
  return state;
}

// Moves the state past one optimizer step. overflow: a gradient of the step was not finite, on any rank; the caller
// skips that update. Gradients of this step carry the scale from before the call.
// Returns false, with the state unchanged, when a dynamic scale overflows at its minimum: training cannot go on.
ZC_HOST_DEVICE inline bool update(const LossScaleRule& rule, LossScaleState& state, bool overflow) {
  if (!rule.dynamic) {
    if (overflow) state.last_overflow = state.iteration;
    ++state.iteration;
    return true;
  }
  if (overflow) {
    if (rule.hysteresis == 1 || state.hysteresis == 1) {
      if (state.scale == rule.min_scale) return false;
      const double halved = state.scale / kLossScaleFactor;
      state.scale = halved > rule.min_scale ? halved : rule.min_scale;
    } else {
      --state.hysteresis;
    }
    state.last_overflow = state.iteration;
  } else {
    if (rule.consecutive_hysteresis) state.hysteresis = rule.hysteresis;
    const std::int64_t clean_steps = state.iteration - state.last_overflow - 1;  // before this one
    if (clean_steps > 0 && clean_steps % rule.window == 0) {
      state.hysteresis = rule.hysteresis;
      state.scale *= kLossScaleFactor;
    }
  }
  ++state.iteration;
  return true;
}

}  // namespace zc::math
