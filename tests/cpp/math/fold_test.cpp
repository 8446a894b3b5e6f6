#include "zc/math/fold.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace zc::math {
namespace {

const BF16 kOneBF16{0x3f80};
const F16 kOneF16{0x3c00};

TEST(Fold, AddsInFp32) {
  EXPECT_EQ(add_element(1.0f, 0x1p-23f), 1 + 0x1p-23f);
  EXPECT_EQ(add_element(1.0f, BF16{0x3b80}), 1 + 0x1p-8f);
  EXPECT_EQ(add_element(1.0f, F16{0x0001}), 1.0f);  // 2^-24, a tie to even
}

TEST(Fold, RoundsEachSumToNearestEven) {
  EXPECT_EQ(add_element(kOneBF16, 0x1p-8f), kOneBF16);                 // a tie, down
  EXPECT_EQ(add_element(BF16{0x3f81}, 0x1p-8f), BF16{0x3f82});         // a tie, up
  EXPECT_EQ(add_element(kOneBF16, 0x1p-8f + 0x1p-20f), BF16{0x3f81});  // above it
  EXPECT_EQ(add_element(kOneF16, 0x1p-11f), kOneF16);
  EXPECT_EQ(add_element(F16{0x3c01}, 0x1p-11f), F16{0x3c02});
  EXPECT_EQ(add_element(kOneF16, BF16{0x3a80}), F16{0x3c01});     // 2^-10
  EXPECT_EQ(add_element(F16{0x7bff}, F16{0x4c00}), F16{0x7c00});  // 65504 + 16, a tie, to infinity
}

TEST(Fold, A16BitSumIsNeverMinusZero) {
  EXPECT_EQ(add_element(F16{}, -1e-10f), F16{});  // underflows
  EXPECT_EQ(add_element(F16{}, BF16{0x8001}), F16{});
  EXPECT_EQ(add_element(BF16{}, -0x1p-149f), BF16{});
  EXPECT_EQ(add_element(F16{}, -0x1p-24f), F16{0x8001});  // the least that does not
}

TEST(Fold, AddingZeroChangesNoBitOfWhatAnAccumulatorHolds) {
  for (std::uint32_t bits = 0; bits <= 0xffff; ++bits) {
    if (bits == 0x8000) continue;
    const F16 half{static_cast<std::uint16_t>(bits)};
    const BF16 brain{static_cast<std::uint16_t>(bits)};
    if (!std::isnan(to_float(half))) {
      ASSERT_EQ(add_element(half, 0.0f), half) << bits;
    }
    if (!std::isnan(to_float(brain))) {
      ASSERT_EQ(add_element(brain, F16{}), brain) << bits;
    }
  }
}

TEST(Fold, KeepsWhatIsNotFinite) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(add_element(kOneBF16, -inf), BF16{0xff80});
  EXPECT_EQ(add_element(kOneF16, -inf), F16{0xfc00});
  EXPECT_TRUE(std::isnan(to_float(add_element(kOneBF16, nan))));
  EXPECT_TRUE(std::isnan(to_float(add_element(F16{0x7c00}, -inf))));
}

}  // namespace
}  // namespace zc::math
