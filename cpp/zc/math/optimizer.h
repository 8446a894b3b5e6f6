// Element math of the optimizers: one definition for the CPU and for CUDA, no layout, no fused
// multiply-add (compile with -ffp-contract=off / --fmad=false). fp32 throughout; scalars are computed in
// double on the host and rounded once.
#pragma once

#include <cmath>
#include <cstdint>

#include "zc/base/host_device.h"

namespace zc::math {

// base^exponent by integer squaring: the same bits on every machine, at any step, after any resume.
ZC_HOST_DEVICE inline double integer_power(double base, std::int64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result *= base;
    base *= base;
  }
  return result;
}

// Hyperparameters of one parameter group, as the user gives them.
struct AdamHyper {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool decoupled_weight_decay = true;  // true: AdamW (Loshchilov & Hutter 2019); false: Adam with L2
  bool bias_correction = true;
};

struct AdamScalars {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
  float step_size;       // lr / (1 - beta1^t)
  float inv_sqrt_bias2;  // 1 / sqrt(1 - beta2^t)
  float decay;           // 1 - lr * weight_decay (decoupled), else 1
  float l2;              // weight_decay (coupled), else 0
};

// step: t of the update about to be made, 1 for a parameter's first.
ZC_HOST_DEVICE inline AdamScalars adam_scalars(const AdamHyper& h, std::int64_t step) {
  const double bias1 = h.bias_correction ? 1 - integer_power(h.beta1, step) : 1;
  const double bias2 = h.bias_correction ? 1 - integer_power(h.beta2, step) : 1;
  return {static_cast<float>(h.beta1),
          static_cast<float>(1 - h.beta1),
          static_cast<float>(h.beta2),
          static_cast<float>(1 - h.beta2),
          static_cast<float>(h.eps),
          static_cast<float>(h.lr / bias1),
          static_cast<float>(1 / std::sqrt(bias2)),
          static_cast<float>(h.decoupled_weight_decay ? 1 - h.lr * h.weight_decay : 1.0),
          static_cast<float>(h.decoupled_weight_decay ? 0.0 : h.weight_decay)};
}

// Adam (Kingma & Ba 2015, algorithm 1) on one element. `grad` is already unscaled and clipped.
ZC_HOST_DEVICE inline void adam_element(const AdamScalars& s, float grad, float& param, float& exp_avg,
                                        float& exp_avg_sq) {
  grad = grad + s.l2 * param;
  exp_avg = s.beta1 * exp_avg + s.one_minus_beta1 * grad;
  exp_avg_sq = s.beta2 * exp_avg_sq + (s.one_minus_beta2 * grad) * grad;
  const float denominator = std::sqrt(exp_avg_sq) * s.inv_sqrt_bias2 + s.eps;
  param = s.decay * param - s.step_size * (exp_avg / denominator);
}

struct SgdHyper {
  double lr = 1e-3, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false;
};

struct SgdScalars {
  float lr, momentum, one_minus_dampening, weight_decay;
  bool nesterov;
  bool first;  // the momentum buffer starts as the gradient itself, as in torch.optim.SGD
};

ZC_HOST_DEVICE inline SgdScalars sgd_scalars(const SgdHyper& h, std::int64_t step) {
  return {static_cast<float>(h.lr),
          static_cast<float>(h.momentum),
          static_cast<float>(1 - h.dampening),
          static_cast<float>(h.weight_decay),
          h.nesterov,
          step == 1};
}

// SGD without momentum on one element.
ZC_HOST_DEVICE inline void sgd_element(const SgdScalars& s, float grad, float& param) {
  grad = grad + s.weight_decay * param;
  param = param - s.lr * grad;
}

// SGD with (Nesterov) momentum on one element, torch.optim.SGD's formulation.
ZC_HOST_DEVICE inline void sgd_momentum_element(const SgdScalars& s, float grad, float& param, float& momentum_buffer) {
  grad = grad + s.weight_decay * param;
  momentum_buffer = s.first ? grad : s.momentum * momentum_buffer + s.one_minus_dampening * grad;
  const float direction = s.nesterov ? grad + s.momentum * momentum_buffer : momentum_buffer;
  param = param - s.lr * direction;
}

struct LionHyper {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, weight_decay = 0;
};

struct LionScalars {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, lr;
  float decay;  // 1 - lr * weight_decay
};

ZC_HOST_DEVICE inline LionScalars lion_scalars(const LionHyper& h) {
  return {static_cast<float>(h.beta1), static_cast<float>(1 - h.beta1),
          static_cast<float>(h.beta2), static_cast<float>(1 - h.beta2),
          static_cast<float>(h.lr),    static_cast<float>(1 - h.lr * h.weight_decay)};
}

// Lion (Chen et al. 2023, algorithm 2) on one element.
ZC_HOST_DEVICE inline void lion_element(const LionScalars& s, float grad, float& param, float& exp_avg) {
  const float direction = s.beta1 * exp_avg + s.one_minus_beta1 * grad;
  const float sign = (direction > 0 ? 1.0f : 0.0f) - (direction < 0 ? 1.0f : 0.0f);
  param = s.decay * param - s.lr * sign;
  exp_avg = s.beta2 * exp_avg + s.one_minus_beta2 * grad;
}

struct AdagradHyper {
  double lr = 1e-2, lr_decay = 0, eps = 1e-10, weight_decay = 0, initial_accumulator = 0;
};

struct AdagradScalars {
  float step_size;  // lr / (1 + (t - 1) lr_decay)
  float eps, weight_decay, initial_accumulator;
  bool first;  // the sum of squares starts at initial_accumulator, whatever lies there
};

ZC_HOST_DEVICE inline AdagradScalars adagrad_scalars(const AdagradHyper& h, std::int64_t step) {
  return {static_cast<float>(h.lr / (1 + static_cast<double>(step - 1) * h.lr_decay)), static_cast<float>(h.eps),
          static_cast<float>(h.weight_decay), static_cast<float>(h.initial_accumulator), step == 1};
}

// Adagrad (Duchi et al. 2011, diagonal) on one element, torch.optim.Adagrad's formulation.
ZC_HOST_DEVICE inline void adagrad_element(const AdagradScalars& s, float grad, float& param, float& sum) {
  grad = grad + s.weight_decay * param;
  sum = (s.first ? s.initial_accumulator : sum) + grad * grad;
  param = param - s.step_size * (grad / (std::sqrt(sum) + s.eps));
}

struct MuonHyper {
  double lr = 0.02, momentum = 0.95, weight_decay = 0;
  bool nesterov = true;
  int iterations = 5;  // of Newton-Schulz
};

struct MuonScalars {
  float momentum, one_minus_momentum;
  bool nesterov;
  float step_size;  // lr * sqrt(max(1, rows / columns))
  float decay;      // 1 - lr * weight_decay
};

// rows_by_columns: of the parameter as a matrix.
ZC_HOST_DEVICE inline MuonScalars muon_scalars(const MuonHyper& h, double rows_by_columns) {
  const double tall = rows_by_columns > 1 ? std::sqrt(rows_by_columns) : 1;
  return {static_cast<float>(h.momentum), static_cast<float>(1 - h.momentum), h.nesterov,
          static_cast<float>(h.lr * tall), static_cast<float>(1 - h.lr * h.weight_decay)};
}

// Muon (Jordan et al. 2024) in three parts. The first, on one element: the momentum, and the matrix to orthogonalise.
ZC_HOST_DEVICE inline void muon_momentum_element(const MuonScalars& s, float grad, float& momentum, float& direction) {
  momentum = s.momentum * momentum + s.one_minus_momentum * grad;
  direction = s.nesterov ? s.one_minus_momentum * grad + s.momentum * momentum : momentum;
}

// The second, on a whole matrix X, divided by its Frobenius norm + kNormEps: A = X X^T, B = kNewtonSchulz[1] A +
// kNewtonSchulz[2] A A, X = kNewtonSchulz[0] X + B X, a few times.
inline constexpr float kNewtonSchulz[] = {3.4445f, -4.7750f, 2.0315f};
inline constexpr double kNormEps = 1e-7;

// The third, on one element of what came out.
ZC_HOST_DEVICE inline void muon_element(const MuonScalars& s, float direction, float& param) {
  param = s.decay * param - s.step_size * direction;
}

// Somebody else's optimizer, which updates masters from gradients itself.
struct ForeignHyper {};

}  // namespace zc::math
