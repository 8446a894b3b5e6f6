#include <algorithm>
#include <cmath>
#include <cstring>

#include "zc/base/error.h"
#include "zc/device/cpu_loops.h"
#include "zc/device/kernels.h"
#include "zc/math/norm.h"

namespace zc::device {
namespace {

// 16-bit accumulators are converted this many elements, one norm block, at a time: these stay in the first-level cache,
// and the loops need no instance for each accumulator dtype.
constexpr std::int64_t kWideNumel = math::kBlockNumel;

std::size_t bytes(DType dtype, std::int64_t numel) { return static_cast<std::size_t>(numel * size_bytes(dtype)); }

std::byte* grad_at(const OptimizerBuffers& buffers, std::int64_t offset) {
  return static_cast<std::byte*>(buffers.grad) + offset * size_bytes(buffers.grad_dtype);
}

// The flat buffers as seen from the element at offset.
OptimizerBuffers buffers_at(const OptimizerBuffers& buffers, std::int64_t offset) {
  OptimizerBuffers at = buffers;
  at.grad = grad_at(buffers, offset);
  at.param += offset;
  if (at.state1 != nullptr) at.state1 += offset;
  if (at.state2 != nullptr) at.state2 += offset;
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
    std::memset(at.grad, 0, bytes(at.grad_dtype, count));
    at.grad = wide;
    at.grad_dtype = DType::kF32;
    update(scalars, factor, at, count);
  }
}

template <class Scalars, class Update>
void for_each_piece(std::span<const Piece> pieces, const Scalars* scalars, const math::StepScalars& step,
                    const OptimizerBuffers& buffers, const Update& update) {
  for (const Piece& piece : pieces) {
    if (step.skip != 0) {
      std::memset(grad_at(buffers, piece.offset), 0, bytes(buffers.grad_dtype, piece.numel));
    } else if (buffers.grad_dtype == DType::kF32) {
      update(scalars[piece.slot], step.factor, buffers_at(buffers, piece.offset), piece.numel);
    } else {
      update_wide(piece, scalars[piece.slot], step.factor, buffers, update);
    }
  }
}

// out[b] = the square sum of the b-th block of in.
void square_sum_blocks(BufferView in, double* out) {
  if (in.dtype == DType::kF32) return cpu::square_sum_blocks(in.as<float>(), in.numel, out);
  float wide[kWideNumel];
  for (std::int64_t begin = 0; begin < in.numel; begin += kWideNumel, ++out) {
    const BufferView block = in.slice(begin, std::min(kWideNumel, in.numel - begin));
    cpu::cast(block.data, block.dtype, wide, DType::kF32, block.numel);
    cpu::square_sum_blocks(wide, block.numel, out);
  }
}

class CpuKernels final : public Kernels {
 public:
  void zero(BufferView out, Stream) override {
    if (out.numel > 0) std::memset(out.data, 0, static_cast<std::size_t>(out.bytes()));
  }

  void cast(BufferView in, BufferView out, Stream) override {
    if (in.numel == 0) return;
    if (in.dtype == out.dtype) {
      std::memmove(out.data, in.data, static_cast<std::size_t>(in.bytes()));
    } else {
      cpu::cast(in.data, in.dtype, out.data, out.dtype, in.numel);
    }
  }

  void fold(std::span<const void* const> in, DType dtype, BufferView acc, Stream) override {
    cpu::fold(in.data(), in.size(), dtype, acc.data, acc.dtype, acc.numel);
  }

  void square_sum(BufferView in, std::span<const Piece> pieces, math::ExactSum* sum, std::uint8_t* nonfinite,
                  Stream) override {
    constexpr std::int64_t kBlocks = 64;  // at a time
    double blocks[kBlocks];
    for (const Piece& piece : pieces) {
      for (std::int64_t begin = 0; begin < piece.numel; begin += kBlocks * math::kBlockNumel) {
        const std::int64_t count = std::min(kBlocks * math::kBlockNumel, piece.numel - begin);
        square_sum_blocks(in.slice(piece.offset + begin, count), blocks);
        for (std::int64_t b = 0; b * math::kBlockNumel < count; ++b) {
          if (std::isfinite(blocks[b])) {
            sum->add(blocks[b]);
          } else {
            nonfinite[piece.slot] = 1;
          }
        }
      }
    }
  }

  void adam(std::span<const Piece> pieces, const math::AdamScalars* scalars, const math::StepScalars* step,
            const OptimizerBuffers& buffers, Stream) override {
    for_each_piece(pieces, scalars, *step, buffers, cpu::adam);
  }

  void sgd(std::span<const Piece> pieces, const math::SgdScalars* scalars, const math::StepScalars* step,
           const OptimizerBuffers& buffers, Stream) override {
    for_each_piece(pieces, scalars, *step, buffers, cpu::sgd);
  }
};

}  // namespace

Kernels& cpu_kernels() {
  static CpuKernels kernels;
  return kernels;
}

}  // namespace zc::device
