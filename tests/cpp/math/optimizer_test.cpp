#include "zc/math/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace zc::math {
namespace {

TEST(IntegerPower, MatchesRepeatedMultiplication) {
  EXPECT_EQ(integer_power(0.9, 0), 1);
  EXPECT_EQ(integer_power(0.5, 30), 0x1p-30);
  EXPECT_EQ(integer_power(3.0, 30), 205891132094649.0);
  for (std::int64_t exponent : {1, 2, 7, 100, 12345}) {
    EXPECT_NEAR(integer_power(0.999, exponent) / std::pow(0.999, static_cast<double>(exponent)), 1, 1e-12) << exponent;
  }
  EXPECT_EQ(integer_power(0.9, 1'000'000), 0);
}

// torch.optim.Adam and AdamW in double.
struct AdamReference {
  AdamHyper h;
  double param, exp_avg = 0, exp_avg_sq = 0;
  int t = 0;

  void step(double grad) {
    ++t;
    if (h.decoupled_weight_decay) {
      param -= h.lr * h.weight_decay * param;
    } else {
      grad += h.weight_decay * param;
    }
    exp_avg = h.beta1 * exp_avg + (1 - h.beta1) * grad;
    exp_avg_sq = h.beta2 * exp_avg_sq + (1 - h.beta2) * grad * grad;
    const double bias1 = h.bias_correction ? 1 - std::pow(h.beta1, t) : 1;
    const double bias2 = h.bias_correction ? 1 - std::pow(h.beta2, t) : 1;
    param -= h.lr * (exp_avg / bias1) / (std::sqrt(exp_avg_sq / bias2) + h.eps);
  }
};

void check_adam(const AdamHyper& hyper) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  AdamReference reference{hyper, 0.75};
  float param = 0.75f, exp_avg = 0, exp_avg_sq = 0;
  for (int t = 1; t <= 200; ++t) {
    const float grad = normal(random);
    reference.step(static_cast<double>(grad));
    adam_element(adam_scalars(hyper, t), grad, param, exp_avg, exp_avg_sq);
    ASSERT_NEAR(param, reference.param, 1e-5) << t;
    ASSERT_NEAR(exp_avg, reference.exp_avg, 1e-6) << t;
    ASSERT_NEAR(exp_avg_sq, reference.exp_avg_sq, 1e-6) << t;
  }
  ASSERT_GT(std::fabs(param - 0.75f), 1e-3);
}

TEST(Adam, MatchesTorchsFormulas) { check_adam({.decoupled_weight_decay = false}); }
TEST(Adam, L2GoesIntoTheGradient) { check_adam({.weight_decay = 0.3, .decoupled_weight_decay = false}); }
TEST(Adam, WithoutBiasCorrection) { check_adam({.lr = 1e-4, .bias_correction = false}); }
TEST(AdamW, DecayIsDecoupled) { check_adam({.lr = 1e-2, .weight_decay = 0.3}); }
TEST(AdamW, OtherBetas) { check_adam({.beta1 = 0.8, .beta2 = 0.95, .eps = 1e-3, .weight_decay = 0.01}); }

// Bias correction makes the first update the sign of the gradient times lr, whatever the gradient's size.
TEST(Adam, FirstStepIsTheSign) {
  const AdamScalars scalars = adam_scalars({.lr = 0x1p-7, .beta1 = 0.5, .beta2 = 0.75, .eps = 0}, 1);
  for (float grad : {0x1p-20f, 1.0f, -3.0f, 1e8f}) {
    float param = 2, exp_avg = 0, exp_avg_sq = 0;
    adam_element(scalars, grad, param, exp_avg, exp_avg_sq);
    EXPECT_FLOAT_EQ(param, 2 - std::copysign(0x1p-7f, grad)) << grad;
    EXPECT_EQ(exp_avg, grad / 2);
    EXPECT_EQ(exp_avg_sq, grad / 4 * grad);
  }
}

TEST(Adam, NoGradientNoChange) {
  float param = 0.3f, exp_avg = 0, exp_avg_sq = 0;
  adam_element(adam_scalars({}, 1), 0, param, exp_avg, exp_avg_sq);
  EXPECT_EQ(param, 0.3f);
  EXPECT_EQ(exp_avg, 0);
  EXPECT_EQ(exp_avg_sq, 0);
}

TEST(AdamScalars, AreRoundedOnceFromDouble) {
  const AdamScalars scalars = adam_scalars({.lr = 1e-3, .beta1 = 0.9, .weight_decay = 0.1}, 3);
  EXPECT_EQ(scalars.one_minus_beta1, static_cast<float>(1 - 0.9));
  EXPECT_EQ(scalars.step_size, static_cast<float>(1e-3 / (1 - 0.9 * (0.9 * 0.9))));
  EXPECT_EQ(scalars.decay, static_cast<float>(1 - 1e-3 * 0.1));
  EXPECT_EQ(scalars.l2, 0);
}

// torch.optim.SGD in double.
struct SgdReference {
  SgdHyper h;
  double param, buffer = 0;
  int t = 0;

  void step(double grad) {
    ++t;
    grad += h.weight_decay * param;
    if (h.momentum != 0) {
      buffer = t == 1 ? grad : h.momentum * buffer + (1 - h.dampening) * grad;
      grad = h.nesterov ? grad + h.momentum * buffer : buffer;
    }
    param -= h.lr * grad;
  }
};

void check_sgd(const SgdHyper& hyper) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  SgdReference reference{hyper, 0.75};
  float param = 0.75f, buffer = 7;  // the first step must not read the buffer
  for (int t = 1; t <= 200; ++t) {
    const float grad = normal(random);
    reference.step(static_cast<double>(grad));
    if (hyper.momentum != 0) {
      sgd_momentum_element(sgd_scalars(hyper, t), grad, param, buffer);
      ASSERT_NEAR(buffer, reference.buffer, 1e-5) << t;
    } else {
      sgd_element(sgd_scalars(hyper, t), grad, param);
    }
    ASSERT_NEAR(param, reference.param, 1e-5) << t;
  }
  ASSERT_GT(std::fabs(param - 0.75f), 1e-3);
}

TEST(Sgd, Plain) { check_sgd({.lr = 1e-2}); }
TEST(Sgd, WeightDecay) { check_sgd({.lr = 1e-2, .weight_decay = 0.3}); }
TEST(Sgd, Momentum) { check_sgd({.lr = 1e-2, .momentum = 0.9, .weight_decay = 0.1}); }
TEST(Sgd, Dampening) { check_sgd({.lr = 1e-2, .momentum = 0.9, .dampening = 0.5}); }
TEST(Sgd, Nesterov) { check_sgd({.lr = 1e-2, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true}); }

TEST(Sgd, ClosedForm) {
  const SgdHyper hyper{.lr = 0.5, .momentum = 0.5, .dampening = 0.25, .weight_decay = 0.25, .nesterov = false};
  float param = 4, buffer = 100;
  sgd_momentum_element(sgd_scalars(hyper, 1), 3, param, buffer);
  EXPECT_EQ(buffer, 4);  // 3 + 0.25 * 4, undamped
  EXPECT_EQ(param, 2);
  sgd_momentum_element(sgd_scalars(hyper, 2), 1.5f, param, buffer);
  EXPECT_EQ(buffer, 3.5f);  // 0.5 * 4 + 0.75 * (1.5 + 0.25 * 2)
  EXPECT_EQ(param, 0.25f);
}

TEST(Sgd, NesterovLooksAheadFromTheFirstStep) {
  float param = 0, buffer = 0;
  sgd_momentum_element(sgd_scalars({.lr = 1, .momentum = 0.5, .nesterov = true}, 1), 2, param, buffer);
  EXPECT_EQ(buffer, 2);
  EXPECT_EQ(param, -3);  // 2 + 0.5 * 2
}

// Chen et al. 2023, algorithm 2, in double.
TEST(Lion, FollowsItsPaper) {
  const LionHyper h{.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.75, .weight_decay = 0.1};
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  double p = 0.75, m = 0;
  float param = 0.75f, exp_avg = 0;
  for (int t = 1; t <= 200; ++t) {
    const float grad = normal(random);
    const double direction = h.beta1 * m + (1 - h.beta1) * static_cast<double>(grad);
    p -= h.lr * (std::copysign(1.0, direction) + h.weight_decay * p);
    m = h.beta2 * m + (1 - h.beta2) * static_cast<double>(grad);
    lion_element(lion_scalars(h), grad, param, exp_avg);
    ASSERT_NEAR(param, p, 1e-5) << t;
    ASSERT_NEAR(exp_avg, m, 1e-6) << t;
  }
}

TEST(Lion, ZeroHasNoSign) {
  float param = 2, exp_avg = 0;
  lion_element(lion_scalars({.lr = 0.5}), 0, param, exp_avg);
  EXPECT_EQ(param, 2);
  lion_element(lion_scalars({.lr = 0.5}), -1e-30f, param, exp_avg);
  EXPECT_EQ(param, 2.5f);
}

TEST(Muon, MixesGradientAndMomentum) {
  const MuonScalars scalars = muon_scalars({.lr = 0.5, .momentum = 0.75, .weight_decay = 0.5}, 4);
  float momentum = 4, direction = 0, param = 8;
  muon_momentum_element(scalars, 8, momentum, direction);
  EXPECT_EQ(momentum, 5);       // 0.75 * 4 + 0.25 * 8
  EXPECT_EQ(direction, 5.75f);  // 0.25 * 8 + 0.75 * 5
  muon_element(scalars, 2, param);
  EXPECT_EQ(param, 4);  // (1 - 0.5 * 0.5) * 8 - 0.5 * sqrt(4) * 2
  const MuonScalars wide = muon_scalars({.lr = 0.5, .momentum = 0.75, .nesterov = false}, 0.25);
  EXPECT_EQ(wide.step_size, 0.5f);
  muon_momentum_element(wide, 8, momentum, direction);
  EXPECT_EQ(direction, momentum);
}

// torch.optim.Adagrad in double.
void check_adagrad(const AdagradHyper& h) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  double p = 0.75, sum_of_squares = h.initial_accumulator;
  float param = 0.75f, sum = 7;  // the first step must not read it
  for (int t = 1; t <= 200; ++t) {
    const float grad = normal(random);
    const double g = static_cast<double>(grad) + h.weight_decay * p;
    sum_of_squares += g * g;
    p -= h.lr / (1 + (t - 1) * h.lr_decay) * g / (std::sqrt(sum_of_squares) + h.eps);
    adagrad_element(adagrad_scalars(h, t), grad, param, sum);
    ASSERT_NEAR(param, p, 1e-5) << t;
    ASSERT_NEAR(sum / sum_of_squares, 1, 1e-5) << t;
  }
}

TEST(Adagrad, MatchesTorchsFormulas) {
  check_adagrad({});
  check_adagrad({.lr_decay = 0.1, .eps = 1e-3, .weight_decay = 0.3, .initial_accumulator = 0.5});
}

}  // namespace
}  // namespace zc::math
