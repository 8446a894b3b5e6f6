#include "zc/cuda/for_each.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "device/guarded.h"
#include "zc/math/cast.h"

namespace zc::cuda {

// An array that lies nowhere and only notes how it is read.
struct Recorded {
  std::uintptr_t address;
  std::vector<int>* scalars;  // how often element i is read alone
  std::vector<int>* vectors;  // and in an access of 16 bytes
};

template <>
struct Access<Recorded> {
  static constexpr int kElementBytes = 2;
  static int ahead(const Recorded& array) { return elements_ahead(reinterpret_cast<const BF16*>(array.address)); }
  static bool aligned(const Recorded& array, int numel) {
    return aligned_after(reinterpret_cast<const BF16*>(array.address), numel);
  }
  static Nothing element(const Recorded& array, std::int64_t i) {
    ++array.scalars->at(static_cast<std::size_t>(i));
    return {};
  }

  template <int kVector>
  struct Registers {
    Registers(const Recorded& array, std::int64_t first) {
      EXPECT_EQ((array.address + static_cast<std::uintptr_t>(first) * kElementBytes) % kAccessBytes, 0u);
      for (int i = 0; i < kVector; ++i) ++array.vectors->at(static_cast<std::size_t>(first + i));
    }
    Nothing operator[](int) { return {}; }
    void store() const {}
  };
};

namespace {

using device::Guarded;

struct Mix {
  void operator()(const BF16& in, float& acc, F16& out) const {
    acc = acc * 3 + to_float(in);
    out = to_f16(acc);
  }
};

struct Shifts {
  std::size_t in, acc, out;
};

void expect_plain_loop(std::size_t numel, Shifts shifts, std::int64_t num_threads) {
  Guarded<BF16> in(numel, shifts.in);
  Guarded<float> acc(numel, shifts.acc), expected_acc(numel);
  Guarded<F16> out(numel, shifts.out), expected_out(numel);
  device::fill_random(acc.data(), numel, 1);
  for (std::size_t i = 0; i < numel; ++i) {
    in[i] = to_bf16(acc[numel - 1 - i]);
    expected_acc[i] = acc[i];
  }
  for (std::size_t i = 0; i < numel; ++i) Mix{}(in[i], expected_acc[i], expected_out[i]);
  for (std::int64_t thread = 0; thread < num_threads; ++thread) {
    for_each(thread, num_threads, static_cast<std::int64_t>(numel), Mix{}, In<BF16>{in.data()},
             InOut<float>{acc.data()}, Out<F16>{out.data()});
  }
  ASSERT_TRUE(in.intact() && acc.intact() && out.intact()) << numel;
  device::expect_same_bits(acc.values(), expected_acc.values(), "acc");
  device::expect_same_bits(out.values(), expected_out.values(), "out");
}

TEST(ForEach, HasThePlainLoopsBitsAtEverySize) {
  for (std::size_t numel = 0; numel <= 2000; ++numel) {
    for (const Shifts& shifts : {Shifts{0, 0, 0}, Shifts{3, 3, 3}, Shifts{5, 1, 5}, Shifts{1, 0, 6}}) {
      expect_plain_loop(numel, shifts, 7);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(ForEach, HasThePlainLoopsBitsAtEveryAlignment) {
  for (std::size_t numel : {0u, 1u, 5u, 8u, 31u, 64u, 1027u}) {
    for (std::size_t in = 0; in < 8; ++in) {
      for (std::size_t acc = 0; acc < 4; ++acc) {
        for (std::size_t out = 0; out < 8; ++out) {
          for (std::int64_t num_threads : {1, 3, 256}) {
            expect_plain_loop(numel, {in, acc, out}, num_threads);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// Each element once; in whole accesses all but the head before the first aligned address and less than one at the end.
TEST(ForEach, ReadsWholeAccessesWhereArraysAreAlignedTogether) {
  for (std::uintptr_t shift = 0; shift < 8; ++shift) {
    for (std::size_t numel : {0u, 3u, 8u, 20u, 2000u}) {
      std::vector<int> scalars(numel), vectors(numel);
      const Recorded array{4096 + 2 * shift, &scalars, &vectors};
      for (std::int64_t thread = 0; thread < 5; ++thread) {
        for_each(thread, 5, static_cast<std::int64_t>(numel), [](Nothing, Nothing) {}, array, None{});
      }
      const std::size_t head = std::min<std::size_t>(numel, (8 - shift) % 8);
      const std::size_t body = (numel - head) / 8 * 8;
      for (std::size_t i = 0; i < numel; ++i) {
        const bool in_body = i >= head && i < head + body;
        ASSERT_EQ(vectors[i], in_body ? 1 : 0) << i << " of " << numel << ", shift " << shift;
        ASSERT_EQ(scalars[i], in_body ? 0 : 1) << i << " of " << numel << ", shift " << shift;
      }
    }
  }
}

TEST(ForEach, ReadsElementsWhereArraysAreNeverAlignedTogether) {
  std::vector<int> scalars(100), vectors(100);
  const Recorded one{4096, &scalars, &vectors}, other{4098, &scalars, &vectors};
  for_each(0, 1, 100, [](Nothing, Nothing) {}, one, other);
  EXPECT_EQ(scalars, std::vector<int>(100, 2));
  EXPECT_EQ(vectors, std::vector<int>(100, 0));
}

}  // namespace
}  // namespace zc::cuda
