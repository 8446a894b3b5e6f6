#include <gtest/gtest.h>

#include <string>

#include "device/guarded.h"
#include "zc/base/error.h"
#include "zc/math/cast.h"

namespace zc::device {
namespace {

// One source after the other, as the definition says.
template <class T>
void check_fold(std::size_t numel, std::size_t num_sources, std::size_t shift) {
  std::vector<Guarded<T>> sources;
  std::vector<const void*> in;
  Guarded<float> acc(numel, shift);
  fill_random(acc.data(), numel, 99);
  std::vector<float> expected = acc.values();
  for (std::size_t k = 0; k < num_sources; ++k) {
    std::vector<float> values(numel);
    fill_random(values.data(), numel, static_cast<unsigned>(k));
    sources.emplace_back(numel, shift);
    for (std::size_t i = 0; i < numel; ++i) {
      sources.back()[i] = math::from_float<T>(values[i]);
      expected[i] = expected[i] + to_float(sources.back()[i]);
    }
  }
  for (Guarded<T>& source : sources) in.push_back(source.data());
  cpu_kernels().fold(in, kDType<T>, acc.view(DType::kF32), {});
  expect_same_bits(acc.values(), expected, "acc");
  EXPECT_TRUE(acc.intact());
  for (Guarded<T>& source : sources) EXPECT_TRUE(source.intact());
}

template <class T>
void check_folds() {
  for (std::size_t numel : sizes()) {
    for (std::size_t num_sources : {0u, 1u, 2u, 3u, 4u, 5u, 8u, 9u, 16u}) check_fold<T>(numel, num_sources, numel % 2);
  }
}

TEST(CpuFold, F32) { check_folds<float>(); }
TEST(CpuFold, F16) { check_folds<F16>(); }
TEST(CpuFold, BF16) { check_folds<BF16>(); }

TEST(CpuFold, IsALeftFold) {
  const float large = 0x1p24f, one = 1, minus_large = -0x1p24f;
  float acc = 0;
  cpu_kernels().fold(std::vector<const void*>{&large, &one, &minus_large}, DType::kF32, {&acc, 1, DType::kF32, {}}, {});
  EXPECT_EQ(acc, 0);  // (2^24 + 1) rounds to 2^24
  cpu_kernels().fold(std::vector<const void*>{&large, &minus_large, &one}, DType::kF32, {&acc, 1, DType::kF32, {}}, {});
  EXPECT_EQ(acc, 1);
}

TEST(CpuFold, CutsDoNotMatter) {
  constexpr std::size_t kNumel = 10'000;
  std::vector<float> first(kNumel), second(kNumel);
  fill_random(first.data(), kNumel, 1);
  fill_random(second.data(), kNumel, 2);
  std::vector<float> whole(kNumel), cut(kNumel);
  cpu_kernels().fold(std::vector<const void*>{first.data(), second.data()}, DType::kF32,
                     {whole.data(), kNumel, DType::kF32, {}}, {});
  for (std::size_t begin = 0; begin < kNumel; begin += 777) {
    const auto count = static_cast<std::int64_t>(std::min<std::size_t>(777, kNumel - begin));
    cpu_kernels().fold(std::vector<const void*>{first.data() + begin, second.data() + begin}, DType::kF32,
                       {cut.data() + begin, count, DType::kF32, {}}, {});
  }
  expect_same_bits(cut, whole, "acc");
}

TEST(CpuFold, OneSourceMayBeGivenTwice) {
  std::vector<float> source(100, 0.25f), acc(100, 1.0f);
  cpu_kernels().fold(std::vector<const void*>{source.data(), source.data()}, DType::kF32,
                     {acc.data(), 100, DType::kF32, {}}, {});
  EXPECT_EQ(acc, std::vector<float>(100, 1.5f));
}

TEST(CpuFold, NoSuchFold) {
  std::int64_t in = 1;
  float acc = 2;
  try {
    cpu_kernels().fold(std::vector<const void*>{&in}, DType::kI64, {&acc, 1, DType::kF32, {}}, {});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInternal);
    EXPECT_NE(std::string(error.what()).find("no such fold: got int64"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace zc::device
