#include "zc/math/step_scalars.h"

#include <gtest/gtest.h>

#include <limits>

namespace zc::math {
namespace {

TEST(StepScalars, UnscalesByTheDivisor) {
  const StepScalars step = step_scalars(25.0 * 16, true, 4.0, 0);
  EXPECT_EQ(step.grad_norm, 5);
  EXPECT_EQ(step.clip, 1);
  EXPECT_EQ(step.factor, 0.25f);
  EXPECT_EQ(step.skip, 0u);
}

TEST(StepScalars, ClipsTheMeanGradientAsTorchDoes) {
  const StepScalars step = step_scalars(25.0 * 16, true, 4.0, 1.0);
  EXPECT_EQ(step.grad_norm, 5);
  EXPECT_EQ(step.clip, 1.0 / (5 + 1e-6));
  EXPECT_EQ(step.factor, static_cast<float>(1.0 / (5 + 1e-6) / 4.0));
}

TEST(StepScalars, NeverScalesUp) {
  EXPECT_EQ(step_scalars(0.25, true, 1.0, 1.0).clip, 1);
  EXPECT_EQ(step_scalars(0.0, true, 1.0, 1.0).clip, 1);
  EXPECT_LT(step_scalars(1.0, true, 1.0, 1.0).clip, 1);  // at the bound the 1e-6 shows, as in torch
}

TEST(StepScalars, ThirdsAreRoundedOnce) {
  EXPECT_EQ(step_scalars(1.0, true, 3.0, 0).factor, 1.0f / 3.0f);
  EXPECT_EQ(step_scalars(1.0, true, 65536.0 * 3, 0).factor, static_cast<float>(1.0 / (65536.0 * 3)));
}

TEST(StepScalars, NotFiniteMeansSkip) {
  const StepScalars step = step_scalars(9.0, false, 1.0, 1.0);
  EXPECT_EQ(step.skip, 1u);
  EXPECT_EQ(step.grad_norm, std::numeric_limits<double>::infinity());
}

}  // namespace
}  // namespace zc::math
