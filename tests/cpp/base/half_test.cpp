#include "zc/base/half.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace zc {
namespace {

// A slow reference: formats are described by their field widths, values are doubles.
struct Format {
  int exponent_bits, mantissa_bits;

  std::uint32_t infinity() const { return ((1u << exponent_bits) - 1) << mantissa_bits; }

  // The value of a non-negative encoding below infinity; of infinity: the power of two that would follow.
  double value(std::uint32_t bits) const {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = static_cast<int>(bits >> mantissa_bits);
    const double fraction = std::ldexp(static_cast<double>(bits & ((1u << mantissa_bits) - 1)), -mantissa_bits);
    return exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
  }

  std::vector<double> values() const {
    std::vector<double> out;
    for (std::uint32_t bits = 0; bits <= infinity(); ++bits) out.push_back(value(bits));
    return out;
  }
};

constexpr Format kF16{5, 10}, kBF16{8, 7};

// The encoding nearest to `x`, ties to the even one, by searching all of them.
std::uint16_t nearest(const Format& format, const std::vector<double>& values, float x) {
  const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(x));
  if (magnitude >= values.back()) return sign | static_cast<std::uint16_t>(format.infinity());
  const auto above = std::upper_bound(values.begin(), values.end(), magnitude);
  const auto high = static_cast<std::uint32_t>(above - values.begin()), low = high - 1;
  const double to_low = magnitude - values[low], to_high = values[high] - magnitude;
  const bool take_low = to_low < to_high || (to_low == to_high && low % 2 == 0);
  return sign | static_cast<std::uint16_t>(take_low ? low : high);
}

template <class Half>
Half convert(float value) {
  if constexpr (std::is_same_v<Half, F16>) {
    return to_f16(value);
  } else {
    return to_bf16(value);
  }
}

// Every value of the format, everything halfway between two neighbours, and the fp32 numbers next to those.
template <class Half>
void check_rounding(const Format& format) {
  const std::vector<double> values = format.values();
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> inputs{infinity, std::numeric_limits<float>::max(), std::numeric_limits<float>::denorm_min(),
                            std::numeric_limits<float>::min()};
  for (std::size_t i = 0; i + 1 < values.size(); ++i) {
    for (double point : {values[i], (values[i] + values[i + 1]) / 2}) {
      const auto exact = static_cast<float>(point);
      ASSERT_EQ(static_cast<double>(exact), point);
      inputs.insert(inputs.end(), {exact, std::nextafter(exact, infinity), std::nextafter(exact, -infinity)});
    }
  }
  std::mt19937 random(1);
  for (int i = 0; i < 200'000; ++i) {
    const float value = bits_float(static_cast<std::uint32_t>(random()));
    if (!std::isnan(value)) inputs.push_back(value);
  }
  for (float input : inputs) {
    for (float value : {input, -input}) {
      ASSERT_EQ(convert<Half>(value).bits, nearest(format, values, value)) << std::hexfloat << value;
    }
  }
}

// All 65536 encodings to fp32, and back.
template <class Half>
void check_widening(const Format& format) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const Half half{static_cast<std::uint16_t>(bits)};
    const float value = to_float(half);
    const std::uint32_t magnitude = bits & 0x7fff;
    ASSERT_EQ(std::signbit(value), bits >= 0x8000) << bits;
    if (magnitude > format.infinity()) {
      const std::uint32_t quiet_nan = format.infinity() | (1u << (format.mantissa_bits - 1));
      ASSERT_TRUE(std::isnan(value)) << bits;
      ASSERT_EQ(convert<Half>(value).bits & ((bits & 0x8000) | quiet_nan), (bits & 0x8000) | quiet_nan);
    } else if (magnitude == format.infinity()) {
      ASSERT_TRUE(std::isinf(value));
      ASSERT_EQ(convert<Half>(value).bits, bits);
    } else {
      ASSERT_EQ(std::fabs(static_cast<double>(value)), format.value(magnitude)) << bits;
      ASSERT_EQ(convert<Half>(value).bits, bits);
    }
  }
}

TEST(Half, F16WidensExactly) { check_widening<F16>(kF16); }
TEST(Half, BF16WidensExactly) { check_widening<BF16>(kBF16); }
TEST(Half, F16RoundsToNearestEven) { check_rounding<F16>(kF16); }
TEST(Half, BF16RoundsToNearestEven) { check_rounding<BF16>(kBF16); }

TEST(Half, OverflowStartsHalfwayPastTheLargest) {
  EXPECT_EQ(to_f16(65519.996f).bits, 0x7bff);  // below 65520, the middle of 65504 and 65536
  EXPECT_EQ(to_f16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(to_f16(-1e30f).bits, 0xfc00);
  EXPECT_EQ(to_bf16(bits_float(0x7f7f7fff)).bits, 0x7f7f);
  EXPECT_EQ(to_bf16(bits_float(0x7f7f8000)).bits, 0x7f80);
}

TEST(Half, EveryKindOfNanStaysNanAndBecomesQuiet) {
  for (std::uint32_t payload : {0x000001u, 0x002000u, 0x010000u, 0x400000u, 0x7fffffu}) {
    for (std::uint32_t sign : {0u, 0x80000000u}) {
      const float nan = bits_float(sign | 0x7f800000 | payload);
      EXPECT_EQ(to_f16(nan).bits & 0xfe00, (sign >> 16) | 0x7e00);
      EXPECT_EQ(to_bf16(nan).bits & 0xffc0, (sign >> 16) | 0x7fc0);
    }
  }
}

}  // namespace
}  // namespace zc
