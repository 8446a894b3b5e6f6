#include "zc/math/cast.h"

#include <gtest/gtest.h>

namespace zc::math {
namespace {

TEST(Cast, ConvertsBetweenAllTypes) {
  const float value = 1.0f + 0x1p-7f;  // exact in all three
  EXPECT_EQ(cast_element<float>(value), value);
  EXPECT_EQ(cast_element<F16>(value), to_f16(value));
  EXPECT_EQ(cast_element<BF16>(value), to_bf16(value));
  EXPECT_EQ(cast_element<float>(to_f16(value)), value);
  EXPECT_EQ(cast_element<BF16>(to_f16(value)), to_bf16(value));
  EXPECT_EQ(cast_element<F16>(to_bf16(value)), to_f16(value));
}

TEST(Cast, HalfToHalfRoundsOnce) {
  EXPECT_EQ(cast_element<BF16>(F16{0x3c01}), BF16{0x3f80});  // 1 + 2^-10 to 1
  EXPECT_EQ(cast_element<F16>(BF16{0x4780}), F16{0x7c00});   // 2^16 to infinity
  EXPECT_EQ(cast_element<F16>(BF16{0x3301}), F16{0x0001});   // just above 2^-25, half of the least subnormal
  EXPECT_EQ(cast_element<F16>(BF16{0x3300}), F16{0x0000});   // 2^-25, a tie
}

}  // namespace
}  // namespace zc::math
