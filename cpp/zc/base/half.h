// fp16 and bf16 as bits, and their conversions to and from fp32.
//
// Conversions to fp32 are exact; conversions from fp32 round to nearest even and overflow to infinity, as hardware
// does. A NaN becomes a quiet NaN of the same sign. No branches, so that loops over these vectorise on any instruction
// set, with the same bits. (The compiler's _Float16 is a library call without F16C, and stays scalar with it.)
#pragma once

#include <cstdint>
#include <cstring>

#include "zc/base/host_device.h"

namespace zc {

struct F16 {
  std::uint16_t bits = 0;
  friend bool operator==(const F16&, const F16&) = default;  // of the bits
};

struct BF16 {
  std::uint16_t bits = 0;
  friend bool operator==(const BF16&, const BF16&) = default;  // of the bits
};

ZC_HOST_DEVICE inline std::uint32_t float_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

ZC_HOST_DEVICE inline float bits_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

ZC_HOST_DEVICE inline float to_float(float value) { return value; }

ZC_HOST_DEVICE inline float to_float(BF16 value) { return bits_float(static_cast<std::uint32_t>(value.bits) << 16); }

ZC_HOST_DEVICE inline float to_float(F16 value) {
  const std::uint32_t magnitude = value.bits & 0x7fff;
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits ^ magnitude) << 16;
  // The exponent goes to the top of fp32's range, where 31 becomes infinity's 255, and comes down by a multiplication,
  // which is exact and leaves infinity and NaN what they are.
  const float normal = bits_float((magnitude << 13) + (224u << 23)) * 0x1p-112f;
  // A subnormal's mantissa as the last places of 0.5, minus 0.5: exact.
  const float subnormal = bits_float(magnitude | float_bits(0.5f)) - 0.5f;
  return bits_float(sign | float_bits(magnitude < 0x0400 ? subnormal : normal));
}

ZC_HOST_DEVICE inline BF16 to_bf16(float value) {
  const std::uint32_t bits = float_bits(value);
  const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // carries into the exponent as it must
  const std::uint32_t quiet_nan = (bits >> 16) | 0x0040;
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return {static_cast<std::uint16_t>(is_nan ? quiet_nan : rounded)};
}

ZC_HOST_DEVICE inline F16 to_f16(float value) {
  const std::uint32_t bits = float_bits(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000;
  const std::uint32_t unbounded = bits & 0x7fffffff;
  const std::uint32_t overflow = float_bits(0x1p16f);  // encodes infinity after the shift below
  const std::uint32_t magnitude = unbounded < overflow ? unbounded : overflow;
  const std::uint32_t normal = (magnitude - (112u << 23) + 0x0fff + ((magnitude >> 13) & 1)) >> 13;
  // Added to 0.5, whose last place is fp16's least subnormal: the addition rounds.
  const std::uint32_t subnormal = float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f);
  const std::uint32_t quiet = unbounded > 0x7f800000 ? 0x0200 : 0;
  const std::uint32_t half = magnitude < float_bits(0x1p-14f) ? subnormal : normal;
  return {static_cast<std::uint16_t>(sign | half | quiet)};
}

}  // namespace zc
