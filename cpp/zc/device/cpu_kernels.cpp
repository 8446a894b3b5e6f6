#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <mutex>
#include <vector>

#include "zc/base/parallel.h"
#include "zc/device/cpu_loops.h"
#include "zc/device/cpu_stream.h"
#include "zc/device/kernels.h"
#include "zc/math/norm.h"

namespace zc::device {
namespace {

// What threads take at a time: long enough that taking it costs nothing, short enough to share out a bucket evenly.
constexpr std::int64_t kGrain = std::int64_t{64} * math::kBlockNumel;

// 16-bit accumulators are converted this many elements, one norm block, at a time: these stay in the first-level cache,
// and the loops need no instance for each accumulator dtype.
constexpr std::int64_t kWideNumel = math::kBlockNumel;

std::byte* at(const BufferView& view, std::int64_t offset) {
  return view.as<std::byte>() + offset * size_bytes(view.dtype);
}

// Calls body with lists of pieces that together make up `pieces`, on several threads. A piece is cut only at whole norm
// blocks from its start.
template <class Body>
void parallel_for_pieces(std::span<const Piece> pieces, const Body& body) {
  std::vector<std::int64_t> begins;  // of each piece among the elements of all
  std::int64_t numel = 0;
  for (const Piece& piece : pieces) {
    begins.push_back(numel);
    numel += piece.numel;
  }
  parallel_for(numel, kGrain, [&](std::int64_t begin, std::int64_t end) {
    std::vector<Piece> parts;
    auto k = static_cast<std::size_t>(std::upper_bound(begins.begin(), begins.end(), begin) - begins.begin() - 1);
    for (; k < pieces.size() && begins[k] < end; ++k) {
      const auto cut = [&](std::int64_t position) {  // a block goes with its first element
        const std::int64_t blocks =
            (std::max<std::int64_t>(position - begins[k], 0) + math::kBlockNumel - 1) / math::kBlockNumel;
        return std::min(blocks * math::kBlockNumel, pieces[k].numel);
      };
      const std::int64_t first = cut(begin), last = cut(end);
      if (first < last) parts.push_back({pieces[k].offset + first, last - first, pieces[k].slot});
    }
    body(parts);
  });
}

// The flat buffers as seen from the element at offset.
OptimizerBuffers buffers_at(const OptimizerBuffers& buffers, std::int64_t offset) {
  OptimizerBuffers at = buffers;
  at.grad = static_cast<const std::byte*>(buffers.grad) + offset * size_bytes(buffers.grad_dtype);
  at.param += offset;
  if (at.state1 != nullptr) at.state1 += offset;
  if (at.state2 != nullptr) at.state2 += offset;
  if (at.direction != nullptr) at.direction += offset;
  if (at.model != nullptr) at.model = static_cast<std::byte*>(at.model) + offset * size_bytes(at.model_dtype);
  return at;
}

// A piece with a 16-bit accumulator.
template <class Scalars, class Update>
void update_wide(const Piece& piece, const Scalars& scalars, float factor, const OptimizerBuffers& buffers,
                 const Update& update) {
  float wide[kWideNumel];
  for (std::int64_t begin = 0; begin < piece.numel; begin += kWideNumel) {
    const std::int64_t count = std::min(kWideNumel, piece.numel - begin);
    OptimizerBuffers at = buffers_at(buffers, piece.offset + begin);
    cpu::cast(at.grad, at.grad_dtype, wide, DType::kF32, count);
    at.grad = wide;
    at.grad_dtype = DType::kF32;
    update(scalars, factor, at, count);
  }
}

template <class Scalars, class Update>
void update_pieces(const Pieces& pieces, const Scalars* scalars, const std::uint8_t* used,
                   const math::StepScalars& step, const OptimizerBuffers& buffers, const Update& update) {
  if (step.skip != 0) return;
  parallel_for_pieces(pieces.list, [&](const std::vector<Piece>& parts) {
    for (const Piece& part : parts) {
      if (used[part.slot] == 0) continue;
      if (buffers.grad_dtype == DType::kF32) {
        update(scalars[part.slot], step.factor, buffers_at(buffers, part.offset), part.numel);
      } else {
        update_wide(part, scalars[part.slot], step.factor, buffers, update);
      }
    }
  });
}

// Adds the square sums of a piece's blocks to sum. Returns whether all are finite.
bool add_square_sums(BufferView piece, math::ExactSum& sum) {
  constexpr std::int64_t kBlocks = 64;  // at a time
  double blocks[kBlocks];
  bool finite = true;
  for (std::int64_t begin = 0; begin < piece.numel; begin += kBlocks * math::kBlockNumel) {
    const std::int64_t count = std::min(kBlocks * math::kBlockNumel, piece.numel - begin);
    cpu::square_sum_blocks(at(piece, begin), piece.dtype, count, blocks);
    for (std::int64_t b = 0; b * math::kBlockNumel < count; ++b) {
      if (std::isfinite(blocks[b])) {
        sum.add(blocks[b]);
      } else {
        finite = false;
      }
    }
  }
  return finite;
}

// What goes to a bucket is next read by peers, when much else has been written: past the cache.
void copy_past_cache(void* to, const void* from, std::int64_t bytes) {
  constexpr std::int64_t kStreamed = 1 << 17;
  if (bytes < kStreamed || !cpu::can_stream(to)) {
    std::memmove(to, from, static_cast<std::size_t>(bytes));
    return;
  }
  cpu::stream_bytes(from, to, bytes);
  cpu::end_stream();
}

class CpuKernels final : public Kernels {
 public:
  void zero(BufferView out, Stream) override {
    parallel_for(out.numel, kGrain, [&](std::int64_t begin, std::int64_t end) {
      std::memset(at(out, begin), 0, static_cast<std::size_t>((end - begin) * size_bytes(out.dtype)));
    });
  }

  void cast(BufferView in, BufferView out, Stream) override {
    parallel_for(in.numel, kGrain, [&](std::int64_t begin, std::int64_t end) {
      if (in.dtype == out.dtype) {
        copy_past_cache(at(out, begin), at(in, begin), (end - begin) * size_bytes(in.dtype));
      } else {
        cpu::cast(at(in, begin), in.dtype, at(out, begin), out.dtype, end - begin);
      }
    });
  }

  void pack(std::span<const Part> parts, BufferView out, Stream stream) override {
    for (const Part& part : parts) {
      const BufferView to = out.slice(part.offset, part.numel);
      if (part.data == nullptr) {
        zero(to, stream);
      } else {
        cast({const_cast<void*>(part.data), part.numel, part.dtype, {}}, to, stream);
      }
    }
  }

  void fold_parts(std::span<const Part> parts, DType dtype, BufferView acc, bool first, Stream stream) override {
    for (const Part& part : parts) {
      const BufferView to = acc.slice(part.offset, part.numel);
      if (part.data == nullptr) {
        if (first) zero(to, stream);  // else +0 changes nothing: what accumulators hold is never -0
      } else if (part.dtype == dtype) {
        fold_all({&part.data, 1}, dtype, to, first);
      } else {
        fold_rounded(part, dtype, to, first);
      }
    }
  }

  void fold(std::span<const void* const> in, DType dtype, BufferView acc, Stream) override {
    fold_all(in, dtype, acc, false);
  }

  void fold_first(std::span<const void* const> in, DType dtype, BufferView acc, Stream) override {
    fold_all(in, dtype, acc, true);
  }

  void scale(BufferView inout, float factor, Stream) override {
    parallel_for(inout.numel, kGrain, [&](std::int64_t begin, std::int64_t end) {
      float* values = inout.as<float>();
      for (std::int64_t i = begin; i < end; ++i) values[i] *= factor;
    });
  }

  void square_sum(BufferView in, const Pieces& pieces, math::ExactSum* sum, std::int64_t* nonfinite, Stream) override {
    std::mutex mutex;
    parallel_for_pieces(pieces.list, [&](const std::vector<Piece>& parts) {
      math::ExactSum part_sum;
      for (const Piece& part : parts) {
        if (add_square_sums(in.slice(part.offset, part.numel), part_sum)) continue;
        const std::lock_guard lock(mutex);
        nonfinite[part.slot] = 1;
      }
      const std::lock_guard lock(mutex);
      sum->add(part_sum);
    });
  }

  void finish_norm(const math::ExactSum* sum, const std::int64_t* nonfinite, std::int64_t num_slots,
                   const math::StepRule& rule, math::StepOutcome* outcome, Stream) override {
    const bool finite = std::all_of(nonfinite, nonfinite + num_slots, [](std::int64_t ranks) { return ranks == 0; });
    math::finish_step(sum->to_double(), finite, rule, *outcome);
  }

  void adam(const Pieces& pieces, const math::AdamScalars* scalars, const std::uint8_t* used,
            const math::StepScalars* step, const OptimizerBuffers& buffers, Stream) override {
    update_pieces(pieces, scalars, used, *step, buffers, cpu::adam);
  }

  void sgd(const Pieces& pieces, const math::SgdScalars* scalars, const std::uint8_t* used,
           const math::StepScalars* step, const OptimizerBuffers& buffers, Stream) override {
    update_pieces(pieces, scalars, used, *step, buffers, cpu::sgd);
  }

  void lion(const Pieces& pieces, const math::LionScalars* scalars, const std::uint8_t* used,
            const math::StepScalars* step, const OptimizerBuffers& buffers, Stream) override {
    update_pieces(pieces, scalars, used, *step, buffers, cpu::lion);
  }

  void adagrad(const Pieces& pieces, const math::AdagradScalars* scalars, const std::uint8_t* used,
               const math::StepScalars* step, const OptimizerBuffers& buffers, Stream) override {
    update_pieces(pieces, scalars, used, *step, buffers, cpu::adagrad);
  }

  void muon_momentum(const Pieces& pieces, const math::MuonScalars* scalars, const std::uint8_t* used,
                     const math::StepScalars* step, const OptimizerBuffers& buffers, Stream) override {
    update_pieces(pieces, scalars, used, *step, buffers, cpu::muon_momentum);
  }

  void muon(const Pieces& pieces, const math::MuonScalars* scalars, const std::uint8_t* used,
            const math::StepScalars* step, const OptimizerBuffers& buffers, Stream) override {
    update_pieces(pieces, scalars, used, *step, buffers, cpu::muon);
  }

  void orthogonalize(float* matrix, std::int64_t rows, std::int64_t columns, int iterations, float* workspace,
                     Stream) override {
    cpu::orthogonalize(matrix, rows, columns, iterations, workspace);
  }

 private:
  // A part whose elements are rounded to dtype on their way.
  static void fold_rounded(const Part& part, DType dtype, BufferView acc, bool first) {
    parallel_for(part.numel, kGrain, [&](std::int64_t begin, std::int64_t end) {
      std::array<float, kWideNumel> rounded;  // room for any dtype
      const void* const source = rounded.data();
      for (; begin < end; begin += kWideNumel) {
        const std::int64_t count = std::min(kWideNumel, end - begin);
        const auto* from = static_cast<const std::byte*>(part.data) + begin * size_bytes(part.dtype);
        cpu::cast(from, part.dtype, rounded.data(), dtype, count);
        cpu::fold(&source, 1, dtype, at(acc, begin), acc.dtype, count, first);
      }
    });
  }

  static void fold_all(std::span<const void* const> in, DType dtype, BufferView acc, bool first) {
    parallel_for(acc.numel, kGrain, [&](std::int64_t begin, std::int64_t end) {
      std::vector<const void*> sources;
      for (const void* source : in)
        sources.push_back(static_cast<const std::byte*>(source) + begin * size_bytes(dtype));
      cpu::fold(sources.data(), sources.size(), dtype, at(acc, begin), acc.dtype, end - begin, first);
    });
  }
};

}  // namespace

Kernels& cpu_kernels() {
  static CpuKernels kernels;
  return kernels;
}

}  // namespace zc::device
