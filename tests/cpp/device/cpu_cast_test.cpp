#include <gtest/gtest.h>

#include <string>

#include "device/guarded.h"
#include "zc/base/error.h"
#include "zc/math/cast.h"

namespace zc::device {
namespace {

template <class From, class To>
void check_cast() {
  for (std::size_t numel : sizes()) {
    for (std::size_t shift : {0u, 1u}) {
      Guarded<From> in(numel, shift);
      Guarded<To> out(numel, shift);
      std::vector<float> values(numel);
      fill_random(values.data(), numel, static_cast<unsigned>(numel));
      std::vector<To> expected;
      for (std::size_t i = 0; i < numel; ++i) {
        in[i] = math::from_float<From>(values[i]);
        expected.push_back(math::cast_element<To>(in[i]));
      }
      cpu_kernels().cast(in.view(kDType<From>), out.view(kDType<To>), {});
      expect_same_bits(out.values(), expected, "out");
      EXPECT_TRUE(in.intact() && out.intact());
    }
  }
}

TEST(CpuCast, F32ToF16) { check_cast<float, F16>(); }
TEST(CpuCast, F32ToBF16) { check_cast<float, BF16>(); }
TEST(CpuCast, F16ToF32) { check_cast<F16, float>(); }
TEST(CpuCast, BF16ToF32) { check_cast<BF16, float>(); }
TEST(CpuCast, F16ToBF16) { check_cast<F16, BF16>(); }
TEST(CpuCast, BF16ToF16) { check_cast<BF16, F16>(); }

// The vector loop agrees with the scalar functions, which base/half_test.cpp checks, on all encodings.
template <class Half>
void check_all_encodings() {
  Guarded<Half> in(65536), back(65536);
  Guarded<float> wide(65536);
  std::vector<float> expected_wide;
  std::vector<Half> expected_back;
  for (std::uint32_t encoding = 0; encoding < 65536; ++encoding) {
    in[encoding] = {static_cast<std::uint16_t>(encoding)};
    expected_wide.push_back(to_float(in[encoding]));
    expected_back.push_back(math::from_float<Half>(expected_wide.back()));
  }
  cpu_kernels().cast(in.view(kDType<Half>), wide.view(DType::kF32), {});
  cpu_kernels().cast(wide.view(DType::kF32), back.view(kDType<Half>), {});
  expect_same_bits(wide.values(), expected_wide, "wide");
  expect_same_bits(back.values(), expected_back, "back");
}

TEST(CpuCast, AllF16Encodings) { check_all_encodings<F16>(); }
TEST(CpuCast, AllBF16Encodings) { check_all_encodings<BF16>(); }

TEST(CpuCast, EqualDtypesCopyTheBits) {
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kI64, DType::kU8}) {
    Guarded<unsigned char> in(80), out(80);
    for (std::size_t i = 0; i < 80; ++i) in[i] = static_cast<unsigned char>(255 - i);  // NaNs among them
    const std::int64_t numel = 80 / size_bytes(dtype);
    cpu_kernels().cast({in.data(), numel, dtype, {}}, {out.data(), numel, dtype, {}}, {});
    EXPECT_EQ(in.values(), out.values());
    EXPECT_TRUE(out.intact());
  }
}

TEST(CpuCast, NoSuchCast) {
  std::int64_t in = 1;
  float out = 2;
  try {
    cpu_kernels().cast({&in, 1, DType::kI64, {}}, {&out, 1, DType::kF32, {}}, {});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInternal);
    EXPECT_NE(std::string(error.what()).find("got int64 to fp32"), std::string::npos) << error.what();
  }
}

TEST(CpuZero, WritesZerosAndNothingElse) {
  for (std::size_t numel : sizes()) {
    Guarded<float> out(numel, 1);
    fill_random(out.data(), numel, 1);
    cpu_kernels().zero(out.view(DType::kF32), {});
    expect_same_bits(out.values(), std::vector<float>(numel, 0.0f), "out");
    EXPECT_TRUE(out.intact());
  }
}

}  // namespace
}  // namespace zc::device
