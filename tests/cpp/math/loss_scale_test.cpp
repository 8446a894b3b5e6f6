#include "zc/math/loss_scale.h"

#include <gtest/gtest.h>

#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace zc::math {
namespace {

// The rule once more, in the form of DeepSpeed's pseudo code, with its exception.
struct Transcription {
  LossScaleRule rule;
  double cur_scale = rule.initial_scale;
  long cur_iter = 0, last_overflow_iter = -1, cur_hysteresis = rule.hysteresis;

  void update_scale(bool overflow) {
    if (overflow) {
      if (rule.hysteresis == 1 || cur_hysteresis == 1) {
        if (cur_scale == rule.min_scale) throw std::runtime_error("loss scale already at minimum");
        cur_scale = std::max(cur_scale / 2, rule.min_scale);
      } else {
        cur_hysteresis -= 1;
      }
      last_overflow_iter = cur_iter;
    } else {
      if (rule.consecutive_hysteresis) cur_hysteresis = rule.hysteresis;
      const long stable_interval = (cur_iter - last_overflow_iter) - 1;
      if (stable_interval > 0 && stable_interval % rule.window == 0) {
        if (!rule.consecutive_hysteresis) cur_hysteresis = rule.hysteresis;
        cur_scale *= 2;
      }
    }
    cur_iter += 1;
  }
};

// Scales after each step of a script: 'x' overflows, '.' does not.
std::vector<double> scales(const LossScaleRule& rule, const std::string& script) {
  LossScaleState state = initial_loss_scale(rule);
  std::vector<double> out;
  for (char step : script) {
    EXPECT_TRUE(update(rule, state, step == 'x'));
    out.push_back(state.scale);
  }
  return out;
}

using Scales = std::vector<double>;

TEST(LossScale, InitialStateFollowsTheRule) {
  const LossScaleRule rule{.initial_scale = 256, .hysteresis = 3};
  EXPECT_EQ(initial_loss_scale(rule),
            (LossScaleState{.scale = 256, .iteration = 0, .last_overflow = -1, .hysteresis = 3}));
}

TEST(LossScale, HalvesOnOverflowAndDoublesAfterTheWindow) {
  const LossScaleRule rule{.initial_scale = 64, .window = 2, .hysteresis = 1};
  EXPECT_EQ(scales(rule, "x"), Scales({32}));
  EXPECT_EQ(scales(rule, "xx.."), Scales({32, 16, 16, 16}));
  EXPECT_EQ(scales(rule, "x....."), Scales({32, 32, 32, 64, 64, 128}));  // the step after 2 clean ones, then every 2nd
  EXPECT_EQ(scales(rule, "....."), Scales({64, 64, 128, 128, 256}));     // from the start as well
}

TEST(LossScale, HysteresisToleratesOverflowsUntilItIsUsedUp) {
  const LossScaleRule rule{.initial_scale = 64, .window = 3, .hysteresis = 3};
  EXPECT_EQ(scales(rule, "xxxx"), Scales({64, 64, 32, 16}));
  EXPECT_EQ(scales(rule, "x.x.x.x"), Scales({64, 64, 64, 64, 32, 32, 16}));  // not refilled by clean steps
}

TEST(LossScale, HysteresisIsRefilledWhenTheScaleGrows) {
  const LossScaleRule rule{.initial_scale = 64, .window = 2, .hysteresis = 2};
  EXPECT_EQ(scales(rule, "xx...xx"), Scales({64, 32, 32, 32, 64, 64, 32}));
}

TEST(LossScale, ConsecutiveHysteresisIsRefilledByEveryCleanStep) {
  const LossScaleRule rule{.initial_scale = 64, .window = 100, .hysteresis = 2, .consecutive_hysteresis = true};
  EXPECT_EQ(scales(rule, "x.x.x.xx"), Scales({64, 64, 64, 64, 64, 64, 64, 32}));
}

TEST(LossScale, StopsAtTheMinimum) {
  const LossScaleRule rule{.initial_scale = 6, .window = 10, .hysteresis = 1, .min_scale = 2};
  EXPECT_EQ(scales(rule, "xx"), Scales({3, 2}));  // 1.5 is below
  LossScaleState state = initial_loss_scale(rule);
  EXPECT_TRUE(update(rule, state, true));
  EXPECT_TRUE(update(rule, state, true));
  const LossScaleState at_minimum = state;
  EXPECT_FALSE(update(rule, state, true));
  EXPECT_EQ(state, at_minimum);
}

TEST(LossScale, HysteresisCountsAtTheMinimumToo) {
  const LossScaleRule rule{.initial_scale = 1, .hysteresis = 2, .min_scale = 1};
  LossScaleState state = initial_loss_scale(rule);
  EXPECT_TRUE(update(rule, state, true));
  EXPECT_FALSE(update(rule, state, true));
}

TEST(LossScale, StaticNeverMoves) {
  const LossScaleRule rule{.dynamic = false, .initial_scale = 1, .window = 1, .hysteresis = 1};
  EXPECT_EQ(scales(rule, "xxx...xxx"), Scales(9, 1));
}

TEST(LossScale, MatchesTheTranscriptionOnRandomSequences) {
  std::mt19937 random(1);
  int exhausted = 0;
  for (int round = 0; round < 3'000; ++round) {
    const LossScaleRule rule{.initial_scale = static_cast<double>(1 << random() % 8),
                             .window = 1 + static_cast<std::int64_t>(random() % 6),
                             .hysteresis = 1 + static_cast<std::int64_t>(random() % 4),
                             .consecutive_hysteresis = random() % 2 == 0,
                             .min_scale = random() % 2 == 0 ? 1.0 : 0.25};
    const unsigned overflows_in_10 = random() % 10;
    Transcription reference{rule};
    LossScaleState state = initial_loss_scale(rule);
    for (int step = 0; step < 60; ++step) {
      const bool overflow = random() % 10 < overflows_in_10;
      bool going_on = true;
      try {
        reference.update_scale(overflow);
      } catch (const std::runtime_error&) {
        going_on = false;
        ++exhausted;
      }
      ASSERT_EQ(update(rule, state, overflow), going_on);
      ASSERT_EQ(state, (LossScaleState{reference.cur_scale, reference.cur_iter, reference.last_overflow_iter,
                                       reference.cur_hysteresis}));
    }
  }
  EXPECT_GT(exhausted, 100);
}

}  // namespace
}  // namespace zc::math
