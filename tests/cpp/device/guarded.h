// A buffer between two stretches of known bytes, to see writes outside it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <random>
#include <vector>

#include "zc/base/buffer_view.h"
#include "zc/base/half.h"
#include "zc/device/kernels.h"

namespace zc::device {

template <class T>
class Guarded {
 public:
  // shift: elements by which the buffer is off a 64-byte boundary's natural place, to vary alignment.
  explicit Guarded(std::size_t numel, std::size_t shift = 0) : front_(kGuard + shift), numel_(numel) {
    memory_.resize(front_ + numel + kGuard);
    std::memset(static_cast<void*>(memory_.data()), kByte, memory_.size() * sizeof(T));
    std::fill_n(begin(), numel, T{});
  }

  T* begin() { return memory_.data() + front_; }
  T* end() { return begin() + numel_; }
  T* data() { return begin(); }
  T& operator[](std::size_t i) { return begin()[i]; }
  std::vector<T> values() { return std::vector<T>(begin(), end()); }

  bool intact() const {
    const auto is_guard = [&](std::size_t first, std::size_t last) {
      const auto* bytes = reinterpret_cast<const unsigned char*>(memory_.data());
      return std::all_of(bytes + first * sizeof(T), bytes + last * sizeof(T),
                         [](unsigned char byte) { return byte == kByte; });
    };
    return is_guard(0, front_) && is_guard(front_ + numel_, memory_.size());
  }

  BufferView view(DType dtype) { return {data(), static_cast<std::int64_t>(numel_), dtype, {}}; }

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr unsigned char kByte = 0xa5;
  std::size_t front_, numel_;
  std::vector<T> memory_;
};

// Sizes around every vector width, loop chunk and block boundary.
inline const std::vector<std::size_t>& sizes() {
  static const std::vector<std::size_t> kSizes{0,  1,  2,   7,   8,    9,    15,   16,   17,   31,   32,   33,   63,
                                               64, 65, 127, 128, 1000, 1023, 1024, 1025, 4095, 4096, 4097, 10007};
  return kSizes;
}

// Normally distributed, with some zeros, fp32 subnormals, and magnitudes from 1e-6 to 1e4.
inline void fill_random(float* out, std::size_t numel, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (std::size_t i = 0; i < numel; ++i) {
    const unsigned kind = random() % 16;
    const float scale = kind == 0 ? 0.0f : kind == 1 ? 1e-40f : kind == 2 ? 1e-6f : kind == 3 ? 1e4f : 1.0f;
    out[i] = normal(random) * scale;
  }
}

inline std::uint32_t bits(float value) { return float_bits(value); }
inline std::uint32_t bits(F16 value) { return value.bits; }
inline std::uint32_t bits(BF16 value) { return value.bits; }

// Fails when two buffers differ in a bit.
template <class T>
void expect_same_bits(const std::vector<T>& got, const std::vector<T>& expected, const char* what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(bits(got[i]), bits(expected[i])) << what << "[" << i << "] of " << got.size();
  }
}

template <class T>
constexpr DType kDType = DType::kF32;
template <>
inline constexpr DType kDType<F16> = DType::kF16;
template <>
inline constexpr DType kDType<BF16> = DType::kBF16;

}  // namespace zc::device
