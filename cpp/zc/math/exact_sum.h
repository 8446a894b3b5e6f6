// An exact, order-free sum of doubles: a fixed-point integer wide enough for any finite double.
//
// Integer addition is associative, so the sum has the same bits whatever the order, the number of ranks, or how
// the terms were split; ranks combine sums by adding limbs as int64 (any integer all-reduce does it).
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "zc/base/host_device.h"

namespace zc::math {

class ExactSum {
 public:
  // Limbs hold 32 bits of payload each, so that carries can wait: 2^31 terms or ranks fit before normalize(). The
  // largest double takes 66 limbs; the others leave room for 2^100 such terms and the sign.
  static constexpr int kNumLimbs = 70;

  // value must be finite, else kInternal. Normalizes by itself when 2^31 terms have come in.
  void add(double value);
  void add(const ExactSum& other);

  // Propagates carries. Do it before limbs travel to other ranks, and after writing limbs that came from them.
  void normalize();

  // The sum rounded once, to nearest even.
  double to_double() const;

  std::array<std::int64_t, kNumLimbs>& limbs() { return limbs_; }
  const std::array<std::int64_t, kNumLimbs>& limbs() const { return limbs_; }

  // The arithmetic on limbs, for kernels that keep them elsewhere.

  // A finite double as what it adds to limbs: parts[i] to limb first + i.
  struct Term {
    std::int32_t first;
    std::int64_t parts[3];
  };
  ZC_HOST_DEVICE static Term term(double value);

  // Brings every limb but the last into [0, 2^32); the last keeps the sign.
  ZC_HOST_DEVICE static void propagate(std::int64_t* limbs);

  // What to_double() returns. Overwrites the limbs.
  ZC_HOST_DEVICE static double round(std::int64_t* limbs);

 private:
  static constexpr int kLimbBits = 32;
  static constexpr std::uint64_t kLimbMask = 0xffffffff;
  static constexpr int kMantissaBits = 53;  // of a double, with the leading bit
  static constexpr std::uint64_t kLeadingBit = std::uint64_t{1} << (kMantissaBits - 1);
  static constexpr std::uint64_t kExponentMask = 0x7ff;

  std::array<std::int64_t, kNumLimbs> limbs_{};  // limb i weighs 2^(32 i - 1074)
  std::int64_t pending_ = 0;                     // terms added since the last normalize()
};

ZC_HOST_DEVICE inline ExactSum::Term ExactSum::term(double value) {
  std::uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const auto exponent = static_cast<int>((bits >> (kMantissaBits - 1)) & kExponentMask);
  const bool subnormal = exponent == 0;
  const std::uint64_t mantissa = (bits & (kLeadingBit - 1)) | (subnormal ? 0 : kLeadingBit);
  const int shift = subnormal ? 0 : exponent - 1;  // value = mantissa * 2^(shift - 1074)
  const int offset = shift % kLimbBits;

  // mantissa << offset has up to 84 bits: three limbs.
  const std::uint64_t low = (mantissa & kLimbMask) << offset;
  const std::uint64_t high = ((mantissa >> kLimbBits) << offset) + (low >> kLimbBits);
  const std::int64_t sign = (bits >> 63) != 0 ? -1 : 1;
  return {shift / kLimbBits,
          {sign * static_cast<std::int64_t>(low & kLimbMask), sign * static_cast<std::int64_t>(high & kLimbMask),
           sign * static_cast<std::int64_t>(high >> kLimbBits)}};
}

ZC_HOST_DEVICE inline void ExactSum::propagate(std::int64_t* limbs) {
  std::int64_t carry = 0;
  for (int i = 0; i + 1 < kNumLimbs; ++i) {
    const std::int64_t limb = limbs[i] + carry;
    carry = limb >> kLimbBits;  // rounds down, also below zero
    limbs[i] = static_cast<std::int64_t>(static_cast<std::uint64_t>(limb) & kLimbMask);
  }
  limbs[kNumLimbs - 1] += carry;
}

ZC_HOST_DEVICE inline double ExactSum::round(std::int64_t* limbs) {
  propagate(limbs);
  const bool negative = limbs[kNumLimbs - 1] < 0;
  if (negative) {
    for (int i = 0; i < kNumLimbs; ++i) limbs[i] = -limbs[i];
    propagate(limbs);
  }

  int top = kNumLimbs - 1;
  while (top > 0 && limbs[top] == 0) --top;
  const auto limb_at = [limbs](int i) { return i < kNumLimbs ? static_cast<std::uint64_t>(limbs[i]) : 0; };
  int top_bits = 0;
  while (top_bits < 64 && (limb_at(top) >> top_bits) != 0) ++top_bits;
  const int last_bit = top * kLimbBits + top_bits - kMantissaBits;  // of a 53-bit mantissa; weighs 2^(last_bit - 1074)

  std::uint64_t bits;
  if (last_bit <= 0) {
    // At most 53 bits: the sum is a subnormal or a small normal number, and exact.
    bits = (limb_at(1) << kLimbBits) | limb_at(0);
    // The encodings of mantissa * 2^-1074 with at most 53 bits are the mantissa itself.
  } else {
    const auto bit_range = [&](int begin) {  // the bits from `begin` up, as many as fit
      const int limb = begin / kLimbBits, offset = begin % kLimbBits;
      const std::uint64_t low = (limb_at(limb + 1) << kLimbBits) | limb_at(limb);
      return offset == 0 ? low : (low >> offset) | (limb_at(limb + 2) << (2 * kLimbBits - offset));
    };
    const std::uint64_t mantissa = bit_range(last_bit) & (2 * kLeadingBit - 1);
    const bool half = (bit_range(last_bit - 1) & 1) != 0;
    bool below_half = false;
    for (int i = 0; i < (last_bit - 1) / kLimbBits; ++i) below_half = below_half || limbs[i] != 0;
    const std::uint64_t rest_mask = (std::uint64_t{1} << ((last_bit - 1) % kLimbBits)) - 1;
    below_half = below_half || (limb_at((last_bit - 1) / kLimbBits) & rest_mask) != 0;
    const bool up = half && (below_half || (mantissa & 1) != 0);
    const std::uint64_t infinity = kExponentMask << (kMantissaBits - 1);
    bits = (static_cast<std::uint64_t>(last_bit) << (kMantissaBits - 1)) + mantissa + (up ? 1 : 0);
    if (bits > infinity) bits = infinity;
  }
  bits |= static_cast<std::uint64_t>(negative) << 63;
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace zc::math
