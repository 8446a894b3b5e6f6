#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "device/guarded.h"
#include "zc/base/error.h"
#include "zc/math/cast.h"

namespace zc::device {
namespace {

// One source after the other, as the definition says. (Only sums that round to zero lose a sign.)
template <class Acc>
Acc add(Acc acc, float in) {
  const Acc sum = math::from_float<Acc>(to_float(acc) + in);
  return !std::is_same_v<Acc, float> && to_float(sum) == 0 ? Acc{} : sum;
}

template <class T, class Acc>
void check_fold(std::size_t numel, std::size_t num_sources, std::size_t shift) {
  std::vector<Guarded<T>> sources;
  std::vector<const void*> in;
  Guarded<Acc> acc(numel, shift), one_by_one(numel, shift);
  std::vector<float> start(numel);
  fill_random(start.data(), numel, 99);
  for (std::size_t i = 0; i < numel; ++i) acc[i] = one_by_one[i] = math::from_float<Acc>(start[i]);
  std::vector<Acc> expected = acc.values();
  for (std::size_t k = 0; k < num_sources; ++k) {
    std::vector<float> values(numel);
    fill_random(values.data(), numel, static_cast<unsigned>(k));
    sources.emplace_back(numel, shift);
    for (std::size_t i = 0; i < numel; ++i) {
      sources.back()[i] = math::from_float<T>(values[i]);
      expected[i] = add(expected[i], to_float(sources.back()[i]));
    }
  }
  for (Guarded<T>& source : sources) in.push_back(source.data());
  cpu_kernels().fold(in, kDType<T>, acc.view(kDType<Acc>), {});
  expect_same_bits(acc.values(), expected, "acc");
  EXPECT_TRUE(acc.intact());
  for (const void* source : in) cpu_kernels().fold({&source, 1}, kDType<T>, one_by_one.view(kDType<Acc>), {});
  expect_same_bits(one_by_one.values(), expected, "acc, one by one");
  for (Guarded<T>& source : sources) EXPECT_TRUE(source.intact());
}

template <class T, class Acc>
void check_folds() {
  for (std::size_t numel : sizes()) {
    for (std::size_t num_sources : {0u, 1u, 2u, 3u, 4u, 5u, 8u, 9u, 16u}) {
      check_fold<T, Acc>(numel, num_sources, numel % 2);
    }
  }
}

TEST(CpuFold, F32) { check_folds<float, float>(); }
TEST(CpuFold, F16) { check_folds<F16, float>(); }
TEST(CpuFold, BF16) { check_folds<BF16, float>(); }
TEST(CpuFold, F32IntoF16) { check_folds<float, F16>(); }
TEST(CpuFold, F16IntoF16) { check_folds<F16, F16>(); }
TEST(CpuFold, BF16IntoF16) { check_folds<BF16, F16>(); }
TEST(CpuFold, F32IntoBF16) { check_folds<float, BF16>(); }
TEST(CpuFold, F16IntoBF16) { check_folds<F16, BF16>(); }
TEST(CpuFold, BF16IntoBF16) { check_folds<BF16, BF16>(); }

// A first fold is one into +0, whatever the accumulator holds.
template <class T, class Acc>
void check_fold_first(std::size_t numel, std::size_t num_sources) {
  std::vector<Guarded<T>> sources;
  std::vector<const void*> in;
  for (std::size_t k = 0; k < num_sources; ++k) {
    std::vector<float> values(numel);
    fill_random(values.data(), numel, static_cast<unsigned>(k));
    sources.emplace_back(numel);
    for (std::size_t i = 0; i < numel; ++i) sources.back()[i] = math::from_float<T>(i % 7 == 0 ? -0.0f : values[i]);
  }
  for (Guarded<T>& source : sources) in.push_back(source.data());
  Guarded<Acc> acc(numel), zeroed(numel);
  const float left_over[] = {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity(), 3};
  for (std::size_t i = 0; i < numel; ++i) acc[i] = math::from_float<Acc>(left_over[i % 3]);
  cpu_kernels().fold_first(in, kDType<T>, acc.view(kDType<Acc>), {});
  cpu_kernels().fold(in, kDType<T>, zeroed.view(kDType<Acc>), {});
  expect_same_bits(acc.values(), zeroed.values(), "acc");
  EXPECT_TRUE(acc.intact());
}

template <class T, class Acc>
void check_folds_first() {
  for (std::size_t numel : sizes()) {
    for (std::size_t num_sources : {1u, 2u, 3u, 4u, 5u}) check_fold_first<T, Acc>(numel, num_sources);
  }
}

TEST(CpuFold, AFirstFoldWritesOverWhatIsThere) {
  check_folds_first<float, float>();
  check_folds_first<F16, float>();
  check_folds_first<BF16, float>();
  check_folds_first<float, F16>();
  check_folds_first<BF16, BF16>();
}

TEST(CpuFold, A16BitAccumulatorRoundsAfterEachSource) {
  const float half_place = 0x1p-8f;  // of 1 in bf16
  BF16 acc{0x3f80};
  cpu_kernels().fold(std::vector<const void*>{&half_place, &half_place}, DType::kF32, {&acc, 1, DType::kBF16, {}}, {});
  EXPECT_EQ(acc, BF16{0x3f80});
}

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
  std::int64_t in = 1, acc = 2;
  const auto expect_error = [&](DType dtype, DType acc_dtype, const char* part) {
    try {
      cpu_kernels().fold(std::vector<const void*>{&in}, dtype, {&acc, 1, acc_dtype, {}}, {});
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInternal);
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  expect_error(DType::kI64, DType::kF32, "no such fold: got int64 into fp32");
  expect_error(DType::kI64, DType::kBF16, "no such fold: got int64 into bf16");
  expect_error(DType::kF32, DType::kI64, "no such fold: got fp32 into int64");
}

}  // namespace
}  // namespace zc::device
