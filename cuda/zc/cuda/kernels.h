// The kernels, as structs of their arguments. launch() runs one in all threads of a grid: on the device, or in tests on
// the host.
//
// A kernel is called with Thread; or, where the threads of a block work together, with a Block and the block's Shared
// memory. A Block has:
//   index, count                     of the block in the grid
//   each(f)                          f(t) in each thread t of the block; all have returned before it does
//   per_thread<T>()                  a T a thread, which lives from each() to each(): registers on the device
//   add(at, value), set(at, value)   atomically, an int64 in global or shared memory
// Everything outside of each() is the same for all threads of the block.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "zc/cuda/for_each.h"
#include "zc/device/kernels.h"
#include "zc/math/cast.h"
#include "zc/math/exact_sum.h"
#include "zc/math/fold.h"
#include "zc/math/norm.h"
#include "zc/math/optimizer.h"
#include "zc/math/step_outcome.h"

namespace zc::cuda {

struct Thread {
  std::int64_t block, num_blocks;
  int index, num_threads;  // in its block

  ZC_HOST_DEVICE std::int64_t in_grid() const { return block * num_threads + index; }
  ZC_HOST_DEVICE std::int64_t num_in_grid() const { return num_blocks * num_threads; }
};

// ---- cast, scale, fold

struct CastElement {
  template <class From, class To>
  ZC_HOST_DEVICE void operator()(const From& from, To& to) const {
    if constexpr (std::is_same_v<From, To>) {
      to = from;  // all bits, also of a NaN
    } else {
      to = math::cast_element<To>(from);
    }
  }
};

template <class From, class To>
struct Cast {
  static constexpr const char* kName = "cast";
  static constexpr int kThreads = 256;
  const From* in;
  To* out;
  std::int64_t numel;

  ZC_HOST_DEVICE void operator()(const Thread& thread) const {
    for_each(thread.in_grid(), thread.num_in_grid(), numel, CastElement{}, In<From>{in}, Out<To>{out});
  }
};

struct ScaleElement {
  float factor;
  ZC_HOST_DEVICE void operator()(float& value) const { value *= factor; }
};

struct Scale {
  static constexpr const char* kName = "scale";
  static constexpr int kThreads = 256;
  float* values;
  std::int64_t numel;
  float factor;
  const float* factor_at;  // in device memory; null: factor counts

  ZC_HOST_DEVICE void operator()(const Thread& thread) const {
    const ScaleElement scale{factor_at == nullptr ? factor : *factor_at};
    for_each(thread.in_grid(), thread.num_in_grid(), numel, scale, InOut<float>{values});
  }
};

struct FoldElement {
  bool first;
  template <class Acc, class Source>
  ZC_HOST_DEVICE void operator()(Acc& acc, const Each<Source>& in) const {
    Acc sum{};
    if (!first) sum = acc;
    ZC_UNROLL
    for (int k = 0; k < kMaxSources; ++k) {
      if (k < in.count) sum = math::add_element(sum, in.values[k]);
    }
    acc = sum;
  }
};

template <class Source, class Acc>
struct Fold {
  static constexpr const char* kName = "fold";
  static constexpr int kThreads = 128;
  InEach<Source> in;
  Acc* acc;
  std::int64_t numel;
  bool first;

  ZC_HOST_DEVICE void operator()(const Thread& thread) const {
    if (first) {
      for_each(thread.in_grid(), thread.num_in_grid(), numel, FoldElement{true}, Out<Acc>{acc}, in);
    } else {
      for_each(thread.in_grid(), thread.num_in_grid(), numel, FoldElement{false}, InOut<Acc>{acc}, in);
    }
  }
};

// ---- pack, fold_parts

// Parts as kernel arguments, cut into tiles that blocks take in turn. Tiles of a part are aligned alike.
struct Parts {
  static constexpr int kMax = 120;
  static constexpr std::int64_t kTileNumel = 4096;
  struct Part {
    const void* data;
    std::int64_t offset;
    std::int64_t numel;
    std::int32_t first_tile;
    DType dtype;
  };
  Part parts[kMax];
  std::int32_t count;
  std::int32_t num_tiles;

  // Calls body(data, to, numel) for each tile of the thread's block. data: of the part's element type, or null.
  template <class To, class Body>
  ZC_HOST_DEVICE void for_each_tile(const Thread& thread, To* out, const Body& body) const {
    for (std::int64_t tile = thread.block; tile < num_tiles; tile += thread.num_blocks) {
      int low = 0, high = count;  // the last part that does not begin after the tile
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (parts[middle].first_tile <= tile) {
          low = middle;
        } else {
          high = middle;
        }
      }
      const Part& part = parts[low];
      const std::int64_t begin = (tile - part.first_tile) * kTileNumel;
      const std::int64_t numel = part.numel - begin < kTileNumel ? part.numel - begin : kTileNumel;
      To* to = out + part.offset + begin;
      if (part.data == nullptr) {
        body(static_cast<const To*>(nullptr), to, numel);
      } else if (part.dtype == DType::kF32) {
        body(static_cast<const float*>(part.data) + begin, to, numel);
      } else if (part.dtype == DType::kF16) {
        body(static_cast<const F16*>(part.data) + begin, to, numel);
      } else {
        body(static_cast<const BF16*>(part.data) + begin, to, numel);
      }
    }
  }
};

struct ZeroElement {
  template <class T>
  ZC_HOST_DEVICE void operator()(T& out) const {
    out = T{};
  }
};

template <class To>
struct Pack {
  static constexpr const char* kName = "pack";
  static constexpr int kThreads = 256;
  Parts parts;
  To* out;

  ZC_HOST_DEVICE void operator()(const Thread& thread) const {
    parts.for_each_tile(thread, out, [&](const auto* data, To* to, std::int64_t numel) {
      if (data == nullptr) {
        for_each(thread.index, thread.num_threads, numel, ZeroElement{}, Out<To>{to});
      } else {
        using From = std::remove_cvref_t<decltype(*data)>;
        for_each(thread.index, thread.num_threads, numel, CastElement{}, In<From>{data}, Out<To>{to});
      }
    });
  }
};

// Folds one source, rounded to `dtype` on its way.
struct FoldRoundedElement {
  DType dtype;
  bool first;
  template <class Acc, class Source>
  ZC_HOST_DEVICE void operator()(Acc& acc, const Source& source) const {
    float value = to_float(source);
    if (dtype == DType::kBF16) {
      value = to_float(to_bf16(value));
    } else if (dtype == DType::kF16) {
      value = to_float(to_f16(value));
    }
    acc = math::add_element(first ? Acc{} : acc, value);
  }
};

template <class Acc>
struct FoldParts {
  static constexpr const char* kName = "fold_parts";
  static constexpr int kThreads = 256;
  Parts parts;
  Acc* acc;
  DType dtype;
  bool first;

  ZC_HOST_DEVICE void operator()(const Thread& thread) const {
    parts.for_each_tile(thread, acc, [&](const auto* data, Acc* to, std::int64_t numel) {
      using Source = std::remove_cvref_t<decltype(*data)>;
      if (data == nullptr) {
        for_each(thread.index, thread.num_threads, numel, ZeroElement{}, Out<Acc>{to});
      } else if (first) {
        for_each(thread.index, thread.num_threads, numel, FoldRoundedElement{dtype, true}, Out<Acc>{to},
                 In<Source>{data});
      } else {
        for_each(thread.index, thread.num_threads, numel, FoldRoundedElement{dtype, false}, InOut<Acc>{to},
                 In<Source>{data});
      }
    });
  }
};

// ---- optimizers

// One of math's functions with the scaled gradient, the parameter and its states; then the model's copy.
template <auto kElement, class Scalars>
struct UpdateElement {
  Scalars scalars;
  float factor;

  template <class Grad, class Model, class... States>
  ZC_HOST_DEVICE void operator()(const Grad& grad, float& param, Model&& model, States&... states) const {
    kElement(scalars, to_float(grad) * factor, param, states...);
    if constexpr (!std::is_same_v<std::remove_cvref_t<Model>, Nothing>) {
      model = math::from_float<std::remove_cvref_t<Model>>(param);
    }
  }
};

// The buffers of an optimizer as seen from the first element of a chunk. Model: void where there is no copy.
template <class Grad, class Model>
struct ChunkArrays {
  const device::OptimizerBuffers& buffers;
  std::int64_t offset;

  ZC_HOST_DEVICE In<Grad> grad() const { return {static_cast<const Grad*>(buffers.grad) + offset}; }
  ZC_HOST_DEVICE InOut<float> param() const { return {buffers.param + offset}; }
  ZC_HOST_DEVICE InOut<float> state1() const { return {buffers.state1 + offset}; }
  ZC_HOST_DEVICE InOut<float> state2() const { return {buffers.state2 + offset}; }
  ZC_HOST_DEVICE In<float> direction() const { return {buffers.direction + offset}; }
  ZC_HOST_DEVICE Out<float> new_direction() const { return {buffers.direction + offset}; }
  ZC_HOST_DEVICE auto model() const {
    if constexpr (std::is_void_v<Model>) {
      return None{};
    } else {
      return Out<Model>{static_cast<Model*>(buffers.model) + offset};
    }
  }
};

// What each optimizer does to a chunk: run(scalars, factor, arrays, loop), where loop(functor, arrays...) is for_each
// over the chunk's elements.

struct Adam {
  using Scalars = math::AdamScalars;
  static constexpr const char* kName = "adam";
  template <class Arrays, class Loop>
  ZC_HOST_DEVICE static void run(const Scalars& s, float factor, const Arrays& at, const Loop& loop) {
    loop(UpdateElement<math::adam_element, Scalars>{s, factor}, at.grad(), at.param(), at.model(), at.state1(),
         at.state2());
  }
};

struct Sgd {
  using Scalars = math::SgdScalars;
  static constexpr const char* kName = "sgd";
  template <class Arrays, class Loop>
  ZC_HOST_DEVICE static void run(const Scalars& s, float factor, const Arrays& at, const Loop& loop) {
    // One optimizer may have groups with and without momentum.
    if (at.buffers.state1 != nullptr && s.momentum != 0) {
      loop(UpdateElement<math::sgd_momentum_element, Scalars>{s, factor}, at.grad(), at.param(), at.model(),
           at.state1());
    } else {
      loop(UpdateElement<math::sgd_element, Scalars>{s, factor}, at.grad(), at.param(), at.model());
    }
  }
};

template <auto kElement, class Scalars_>
struct OneState {
  using Scalars = Scalars_;
  template <class Arrays, class Loop>
  ZC_HOST_DEVICE static void run(const Scalars& s, float factor, const Arrays& at, const Loop& loop) {
    loop(UpdateElement<kElement, Scalars>{s, factor}, at.grad(), at.param(), at.model(), at.state1());
  }
};
struct Lion : OneState<math::lion_element, math::LionScalars> {
  static constexpr const char* kName = "lion";
};
struct Adagrad : OneState<math::adagrad_element, math::AdagradScalars> {
  static constexpr const char* kName = "adagrad";
};

struct MuonMomentum {
  using Scalars = math::MuonScalars;
  static constexpr const char* kName = "muon_momentum";
  struct Element {
    Scalars scalars;
    float factor;
    template <class Grad>
    ZC_HOST_DEVICE void operator()(const Grad& grad, float& momentum, float& direction) const {
      math::muon_momentum_element(scalars, to_float(grad) * factor, momentum, direction);
    }
  };
  template <class Arrays, class Loop>
  ZC_HOST_DEVICE static void run(const Scalars& s, float factor, const Arrays& at, const Loop& loop) {
    loop(Element{s, factor}, at.grad(), at.state1(), at.new_direction());
  }
};

struct Muon {
  using Scalars = math::MuonScalars;
  static constexpr const char* kName = "muon";
  template <class Arrays, class Loop>
  ZC_HOST_DEVICE static void run(const Scalars& s, float, const Arrays& at, const Loop& loop) {
    loop(UpdateElement<math::muon_element, Scalars>{s, 1}, at.direction(), at.param(), at.model());
  }
};

// A predicated update: scalars, flags and step are read here, so that nobody waits for them.
template <class Optimizer, class Grad, class Model>
struct Update {
  static constexpr const char* kName = Optimizer::kName;
  static constexpr int kThreads = 128;
  const device::Chunk* chunks;
  std::int64_t num_chunks;
  const typename Optimizer::Scalars* scalars;
  const std::uint8_t* used;
  const math::StepScalars* step;
  device::OptimizerBuffers buffers;

  ZC_HOST_DEVICE void operator()(const Thread& thread) const {
    if (step->skip != 0) return;
    const float factor = step->factor;
    for (std::int64_t c = thread.block; c < num_chunks; c += thread.num_blocks) {
      const device::Chunk chunk = chunks[c];
      if (used[chunk.slot] == 0) continue;
      Optimizer::run(scalars[chunk.slot], factor, ChunkArrays<Grad, Model>{buffers, chunk.offset},
                     [&](const auto& functor, const auto&... arrays) {
                       for_each(thread.index, thread.num_threads, chunk.numel, functor, arrays...);
                     });
    }
  }
};

// ---- norm

// A team of threads takes a norm block (a chunk), each the lanes that one access of 16 bytes covers; a thread block
// has many teams. Block sums then go into limbs of which each thread owns one, so that no two ever meet in an addition.
template <class Source>
struct SquareSum {
  static constexpr const char* kName = "square_sum";
  static constexpr int kThreads = 128;
  static constexpr int kLanes = kAccessBytes / static_cast<int>(sizeof(Source));  // of a thread
  static constexpr int kTeam = math::kNormLanes / kLanes;
  static constexpr int kChunks = kThreads / kTeam;  // at a time
  static_assert(math::ExactSum::kNumLimbs <= kThreads);

  const Source* in;
  std::int64_t numel;
  const device::Chunk* chunks;  // null: all of `in` is one piece, of slot 0
  std::int64_t num_chunks;
  std::int64_t* limbs;
  std::int64_t* nonfinite;

  struct Shared {
    double lanes[kChunks][math::kNormLanes + 1];  // one more: consecutive chunks lie in different banks
    math::ExactSum::Term terms[kChunks];
    std::int64_t limbs[math::ExactSum::kNumLimbs];
  };

  template <class Block>
  ZC_DEVICE void operator()(const Block& block, Shared& shared) const {
    block.each([&](int t) {
      if (t < math::ExactSum::kNumLimbs) shared.limbs[t] = 0;
    });
    for (std::int64_t first = block.index * kChunks; first < num_chunks; first += block.count * kChunks) {
      const int count = num_chunks - first < kChunks ? static_cast<int>(num_chunks - first) : kChunks;
      block.each([&](int t) {
        if (t / kTeam < count) add_squares(first + t / kTeam, t % kTeam * kLanes, shared.lanes[t / kTeam]);
      });
      block.each([&](int t) {
        if (t < count) shared.terms[t] = finish(first + t, shared.lanes[t], block);
      });
      block.each([&](int t) {
        if (t >= math::ExactSum::kNumLimbs) return;
        std::int64_t limb = shared.limbs[t];
        for (int c = 0; c < count; ++c) {
          const int part = t - shared.terms[c].first;
          if (part >= 0 && part < 3) limb += shared.terms[c].parts[part];
        }
        shared.limbs[t] = limb;
      });
    }
    block.each([&](int t) {
      if (t < math::ExactSum::kNumLimbs && shared.limbs[t] != 0) block.add(&limbs[t], shared.limbs[t]);
    });
  }

 private:
  ZC_HOST_DEVICE device::Chunk chunk(std::int64_t c) const {
    if (chunks != nullptr) return chunks[c];
    const std::int64_t offset = c * math::kBlockNumel, left = numel - offset;
    return {offset, static_cast<std::int32_t>(left < math::kBlockNumel ? left : math::kBlockNumel), 0};
  }

  template <class Values>
  ZC_HOST_DEVICE static void add(double (&lanes)[kLanes], Values&& values) {
    ZC_UNROLL
    for (int l = 0; l < kLanes; ++l) {
      const double value = to_float(values[l]);
      lanes[l] += value * value;
    }
  }

  // The squares of lanes [first, first + kLanes) of a chunk, in order.
  ZC_HOST_DEVICE void add_squares(std::int64_t c, int first, double* out) const {
    const device::Chunk chunk = this->chunk(c);
    const Source* from = in + chunk.offset + first;
    const bool aligned = elements_ahead(from) == 0;
    double lanes[kLanes] = {};
    int i = 0;
    if (aligned) {
      ZC_UNROLL_BY(4)
      for (; i + math::kNormLanes <= chunk.numel; i += math::kNormLanes) {
        Lanes<Source, kLanes> values;
        values.load(from + i);
        add(lanes, values);
      }
    } else {
      ZC_UNROLL_BY(1)
      for (; i + math::kNormLanes <= chunk.numel; i += math::kNormLanes) add(lanes, from + i);
    }
    ZC_UNROLL
    for (int l = 0; l < kLanes; ++l) {
      if (i + first + l < chunk.numel) {
        const double value = to_float(from[i + l]);
        lanes[l] += value * value;
      }
      out[first + l] = lanes[l];
    }
  }

  template <class Block>
  ZC_DEVICE math::ExactSum::Term finish(std::int64_t c, double* lanes, const Block& block) const {
    double sum = math::add_lanes(lanes);
    if (!(sum < HUGE_VAL)) {  // a NaN, too; a sum of squares is not negative
      block.set(&nonfinite[chunk(c).slot], 1);
      sum = 0;
    }
    return math::ExactSum::term(sum);
  }
};

// The limbs of an ExactSum, and how many of `count` flags are set, brought to where a single thread is fast on them.
struct SumAndFlags {
  std::int64_t limbs[math::ExactSum::kNumLimbs];
  std::int64_t num_set;

  template <class Block>
  ZC_DEVICE void load(const Block& block, int num_threads, const std::int64_t* from, const std::int64_t* flags,
                      std::int64_t count) {
    block.each([&](int t) {
      if (t == 0) num_set = 0;
      if (t < math::ExactSum::kNumLimbs) limbs[t] = from[t];
    });
    block.each([&](int t) {
      for (std::int64_t i = t; i < count; i += num_threads) {
        if (flags[i] != 0) block.add(&num_set, 1);
      }
    });
  }
};

struct FinishNorm {
  static constexpr const char* kName = "finish_norm";
  static constexpr int kThreads = 128;
  using Shared = SumAndFlags;
  const std::int64_t* limbs;
  const std::int64_t* nonfinite;
  std::int64_t num_slots;
  math::StepRule rule;
  math::StepOutcome* outcome;

  template <class Block>
  ZC_DEVICE void operator()(const Block& block, Shared& shared) const {
    shared.load(block, kThreads, limbs, nonfinite, num_slots);
    block.each([&](int t) {
      if (t == 0) math::finish_step(math::ExactSum::round(shared.limbs), shared.num_set == 0, rule, *outcome);
    });
  }
};

// ---- Newton-Schulz

// What a matrix is multiplied by before the iterations. NaN where it is not finite.
struct NormFactor {
  static constexpr const char* kName = "norm_factor";
  static constexpr int kThreads = 128;
  using Shared = SumAndFlags;
  const std::int64_t* limbs;
  const std::int64_t* nonfinite;
  float* factor;

  template <class Block>
  ZC_DEVICE void operator()(const Block& block, Shared& shared) const {
    shared.load(block, kThreads, limbs, nonfinite, 1);
    block.each([&](int t) {
      if (t != 0) return;
      const double norm = std::sqrt(math::ExactSum::round(shared.limbs));
      *factor = shared.num_set == 0 ? static_cast<float>(1 / (norm + math::kNormEps)) : NAN;
    });
  }
};

// out = in^T. in: rows x columns.
struct Transpose {
  static constexpr const char* kName = "transpose";
  static constexpr int kThreads = 256;
  static constexpr int kTile = 32;
  const float* in;
  std::int64_t rows, columns;
  float* out;

  struct Shared {
    float tile[kTile][kTile + 1];
  };

  ZC_HOST_DEVICE std::int64_t num_tiles() const {
    return ((rows + kTile - 1) / kTile) * ((columns + kTile - 1) / kTile);
  }

  template <class Block>
  ZC_DEVICE void operator()(const Block& block, Shared& shared) const {
    const std::int64_t across = (columns + kTile - 1) / kTile;
    for (std::int64_t tile = block.index; tile < num_tiles(); tile += block.count) {
      const std::int64_t row = tile / across * kTile, column = tile % across * kTile;
      block.each([&](int t) {
        const int j = t % kTile;
        for (int i = t / kTile; i < kTile; i += kThreads / kTile) {
          if (row + i < rows && column + j < columns) shared.tile[i][j] = in[(row + i) * columns + column + j];
        }
      });
      block.each([&](int t) {
        const int i = t % kTile;
        for (int j = t / kTile; j < kTile; j += kThreads / kTile) {
          if (row + i < rows && column + j < columns) out[(column + j) * rows + row + i] = shared.tile[i][j];
        }
      });
    }
  }
};

// out = other_factor * other + sum_factor * (left right), as the CPU computes it: each element of the product is summed
// in ascending order of the inner index, from +0. other: as out, or null. symmetric: of a square out, so that tiles
// above the diagonal are copied from below.
struct Product {
  static constexpr const char* kName = "product";
  static constexpr int kThreads = 256;
  static constexpr int kTile = 64;   // rows and columns of a tile of the product
  static constexpr int kDepth = 16;  // of the inner dimension, in shared memory at a time
  static constexpr int kSide = 4;    // rows and columns of a thread's own part of a tile
  static constexpr int kAcross = kTile / kSide;
  static_assert(kAcross * kAcross == kThreads);

  struct Factor {  // seen as rows of the inner dimension: the right one is transposed
    const float* data;
    std::int64_t row_stride, inner_stride;  // one of them is 1
  };
  Factor left, right;
  std::int64_t rows, columns, depth;
  float sum_factor;
  const float* other;
  float other_factor;
  bool symmetric;
  float* out;

  struct Shared {
    alignas(kAccessBytes) float left[kDepth][kTile + 4];  // 4 more: rows stay aligned, and lie in different banks
    alignas(kAccessBytes) float right[kDepth][kTile + 4];
  };
  struct Sums {
    float at[kSide][kSide];
  };

  ZC_HOST_DEVICE std::int64_t num_tiles() const {
    return ((rows + kTile - 1) / kTile) * ((columns + kTile - 1) / kTile);
  }

  template <class Block>
  ZC_DEVICE void operator()(const Block& block, Shared& shared) const {
    auto sums = block.template per_thread<Sums>();
    const std::int64_t across = (columns + kTile - 1) / kTile;
    for (std::int64_t tile = block.index; tile < num_tiles(); tile += block.count) {
      const std::int64_t row = tile / across * kTile, column = tile % across * kTile;
      if (symmetric && column > row) continue;
      block.each([&](int t) { sums[t] = {}; });
      for (std::int64_t k = 0; k < depth; k += kDepth) {
        block.each([&](int t) {
          load(t, left, row, rows, k, shared.left);
          load(t, right, column, columns, k, shared.right);
        });
        block.each([&](int t) { add_products(t, shared, sums[t]); });
      }
      block.each([&](int t) { store(t, sums[t], row, column); });
    }
  }

 private:
  // kTile rows from `row` on, of the inner elements from k on; what is not there is 0. Consecutive threads read along
  // the dimension whose elements are neighbours.
  ZC_HOST_DEVICE void load(int t, const Factor& from, std::int64_t row, std::int64_t end, std::int64_t k,
                           float (&to)[kDepth][kTile + 4]) const {
    const bool along_inner = from.inner_stride == 1;
    ZC_UNROLL
    for (int n = 0; n < kTile * kDepth / kThreads; ++n) {
      const int element = n * kThreads + t;
      const int r = along_inner ? element / kDepth : element % kTile;
      const int d = along_inner ? element % kDepth : element / kTile;
      const bool there = row + r < end && k + d < depth;
      to[d][r] = there ? from.data[(row + r) * from.row_stride + (k + d) * from.inner_stride] : 0.0f;
    }
  }

  ZC_HOST_DEVICE static void add_products(int t, const Shared& shared, Sums& sums) {
    ZC_UNROLL_BY(4)
    for (int d = 0; d < kDepth; ++d) {
      Lanes<float, kSide> left, right;
      left.load(&shared.left[d][t / kAcross * kSide]);
      right.load(&shared.right[d][t % kAcross * kSide]);
      ZC_UNROLL
      for (int i = 0; i < kSide; ++i) {
        ZC_UNROLL
        for (int j = 0; j < kSide; ++j) sums.at[i][j] = sums.at[i][j] + left[i] * right[j];
      }
    }
  }

  ZC_HOST_DEVICE void store(int t, const Sums& sums, std::int64_t row, std::int64_t column) const {
    ZC_UNROLL
    for (int i = 0; i < kSide; ++i) {
      ZC_UNROLL
      for (int j = 0; j < kSide; ++j) {
        const std::int64_t r = row + t / kAcross * kSide + i, c = column + t % kAcross * kSide + j;
        if (r >= rows || c >= columns) continue;
        const float scaled = sum_factor * sums.at[i][j];
        const float value = other == nullptr ? scaled : other_factor * other[r * columns + c] + scaled;
        out[r * columns + c] = value;
        if (symmetric && column < row) out[c * columns + r] = value;
      }
    }
  }
};

// X(kernel) for every kernel that is launched.
#define ZC_KERNELS_OF_MODELS(X, Optimizer, Grad) \
  X(Update<Optimizer, Grad, void>)               \
  X(Update<Optimizer, Grad, float>)              \
  X(Update<Optimizer, Grad, F16>)                \
  X(Update<Optimizer, Grad, BF16>)
#define ZC_KERNELS_OF_OPTIMIZER(X, Optimizer) \
  ZC_KERNELS_OF_MODELS(X, Optimizer, float)   \
  ZC_KERNELS_OF_MODELS(X, Optimizer, F16)     \
  ZC_KERNELS_OF_MODELS(X, Optimizer, BF16)
#define ZC_KERNELS_OF_TYPE(X, T) \
  X(Fold<T, float>)              \
  X(Fold<T, F16>)                \
  X(Fold<T, BF16>)               \
  X(Pack<T>)                     \
  X(FoldParts<T>)                \
  X(SquareSum<T>)                \
  X(Update<MuonMomentum, T, void>)
#define ZC_KERNELS(X)                  \
  X(Cast<float, F16>)                  \
  X(Cast<float, BF16>)                 \
  X(Cast<F16, float>)                  \
  X(Cast<F16, BF16>)                   \
  X(Cast<BF16, float>)                 \
  X(Cast<BF16, F16>)                   \
  X(Scale)                             \
  ZC_KERNELS_OF_TYPE(X, float)         \
  ZC_KERNELS_OF_TYPE(X, F16)           \
  ZC_KERNELS_OF_TYPE(X, BF16)          \
  ZC_KERNELS_OF_OPTIMIZER(X, Adam)     \
  ZC_KERNELS_OF_OPTIMIZER(X, Sgd)      \
  ZC_KERNELS_OF_OPTIMIZER(X, Lion)     \
  ZC_KERNELS_OF_OPTIMIZER(X, Adagrad)  \
  ZC_KERNELS_OF_MODELS(X, Muon, float) \
  X(FinishNorm)                        \
  X(NormFactor)                        \
  X(Transpose)                         \
  X(Product)

}  // namespace zc::cuda
