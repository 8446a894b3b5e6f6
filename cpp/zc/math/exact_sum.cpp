#include "zc/math/exact_sum.h"

#include <bit>
#include <limits>

#include "zc/base/error.h"

namespace zc::math {
namespace {

constexpr int kLimbBits = 32;
constexpr std::uint64_t kLimbMask = 0xffffffff;
constexpr std::int64_t kMaxPending = (std::int64_t{1} << 31) - 1;
constexpr int kMantissaBits = std::numeric_limits<double>::digits;  // 53, with the leading bit
constexpr std::uint64_t kLeadingBit = std::uint64_t{1} << (kMantissaBits - 1);
constexpr std::uint64_t kExponentMask = 0x7ff;

using Limbs = std::array<std::int64_t, ExactSum::kNumLimbs>;

// Brings every limb but the last into [0, 2^32); the last keeps the sign.
void propagate(Limbs& limbs) {
  std::int64_t carry = 0;
  for (int i = 0; i + 1 < ExactSum::kNumLimbs; ++i) {
    const std::int64_t limb = limbs[i] + carry;
    carry = limb >> kLimbBits;  // rounds down, also below zero
    limbs[i] = static_cast<std::int64_t>(static_cast<std::uint64_t>(limb) & kLimbMask);
  }
  limbs.back() += carry;
}

}  // namespace

void ExactSum::add(double value) {
  const auto bits = std::bit_cast<std::uint64_t>(value);
  const auto exponent = static_cast<int>((bits >> (kMantissaBits - 1)) & kExponentMask);
  ZC_CHECK(exponent != static_cast<int>(kExponentMask), kInternal,
           "[math] exact sum of a value that is not finite: got ", value, ", expected the caller to leave it out");
  const bool subnormal = exponent == 0;
  const std::uint64_t mantissa = (bits & (kLeadingBit - 1)) | (subnormal ? 0 : kLeadingBit);
  const int shift = subnormal ? 0 : exponent - 1;  // value = mantissa * 2^(shift - 1074)
  const int limb = shift / kLimbBits;
  const int offset = shift % kLimbBits;

  // mantissa << offset has up to 84 bits: three limbs.
  const std::uint64_t low = (mantissa & kLimbMask) << offset;
  const std::uint64_t high = ((mantissa >> kLimbBits) << offset) + (low >> kLimbBits);
  const std::int64_t sign = (bits >> 63) != 0 ? -1 : 1;
  if (pending_ == kMaxPending) normalize();
  limbs_[limb] += sign * static_cast<std::int64_t>(low & kLimbMask);
  limbs_[limb + 1] += sign * static_cast<std::int64_t>(high & kLimbMask);
  limbs_[limb + 2] += sign * static_cast<std::int64_t>(high >> kLimbBits);
  ++pending_;
}

void ExactSum::add(const ExactSum& other) {
  ExactSum term = other;
  term.normalize();
  if (pending_ == kMaxPending) normalize();
  for (int i = 0; i < kNumLimbs; ++i) limbs_[i] += term.limbs_[i];
  ++pending_;
}

void ExactSum::normalize() {
  propagate(limbs_);
  pending_ = 0;
}

double ExactSum::to_double() const {
  Limbs limbs = limbs_;
  propagate(limbs);
  const bool negative = limbs.back() < 0;
  if (negative) {
    for (std::int64_t& limb : limbs) limb = -limb;
    propagate(limbs);
  }

  int top = kNumLimbs - 1;
  while (top > 0 && limbs[top] == 0) --top;
  const auto limb_at = [&](int i) { return i < kNumLimbs ? static_cast<std::uint64_t>(limbs[i]) : 0; };
  const int top_bits = std::bit_width(limb_at(top));
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
  return std::bit_cast<double>(bits | (static_cast<std::uint64_t>(negative) << 63));
}

}  // namespace zc::math
