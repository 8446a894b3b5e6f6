#include "zc/cuda/cuda_kernels.h"

#include <algorithm>
#include <utility>

#include "zc/base/error.h"
#include "zc/cuda/cuda_device.h"
#include "zc/cuda/kernels.h"
#include "zc/cuda/launch.h"

namespace zc::cuda {
namespace {

using device::Chunk;
using device::OptimizerBuffers;
using device::Part;
using device::Pieces;
using device::Stream;

template <class T>
struct Type {
  using type = T;
};

// Calls body(Type<T>{}) with the element type of a dtype.
template <class Body>
void with_type(DType dtype, const char* what, const Body& body) {
  switch (dtype) {
    case DType::kF32:
      return body(Type<float>{});
    case DType::kF16:
      return body(Type<F16>{});
    case DType::kBF16:
      return body(Type<BF16>{});
    default:
      fail(ErrorKind::kInternal, "[cuda] no such ", what, ": got ", name(dtype), ", expected fp32, fp16 or bf16");
  }
}

class CudaKernels final : public device::Kernels {
 public:
  CudaKernels(Runtime& runtime, int device)
      : runtime_(runtime), device_(device), num_multiprocessors_(runtime.num_multiprocessors(device)) {}

  void zero(BufferView out, Stream stream) override {
    if (out.numel == 0) return;
    const OnDevice on(runtime_, device_);
    runtime_.zero(out.data, out.bytes(), stream.handle);
  }

  void cast(BufferView in, BufferView out, Stream stream) override {
    if (in.numel == 0) return;
    if (in.dtype == out.dtype) {
      copy(out.data, in.data, in.bytes(), stream);
      return;
    }
    with_type(in.dtype, "cast", [&]<class From>(Type<From>) {
      with_type(out.dtype, "cast", [&]<class To>(Type<To>) {
        if constexpr (!std::is_same_v<From, To>) {
          launch_over(in.numel, Cast<From, To>{in.as<const From>(), out.as<To>(), in.numel}, stream);
        }
      });
    });
  }

  void pack(std::span<const Part> parts, BufferView out, Stream stream) override {
    with_type(out.dtype, "pack", [&]<class To>(Type<To>) {
      Pack<To> kernel{{}, out.as<To>()};
      launch_parts(parts, out, kernel, stream);
    });
  }

  void fold_parts(std::span<const Part> parts, DType dtype, BufferView acc, bool first, Stream stream) override {
    with_type(acc.dtype, "fold", [&]<class Acc>(Type<Acc>) {
      FoldParts<Acc> kernel{{}, acc.as<Acc>(), dtype, first};
      launch_parts(parts, acc, kernel, stream, first);  // else +0 changes nothing: accumulators never hold -0
    });
  }

  void fold(std::span<const void* const> in, DType dtype, BufferView acc, Stream stream) override {
    fold_all(in, dtype, acc, false, stream);
  }

  void fold_first(std::span<const void* const> in, DType dtype, BufferView acc, Stream stream) override {
    fold_all(in, dtype, acc, true, stream);
  }

  void scale(BufferView inout, float factor, Stream stream) override {
    scale_by(inout.as<float>(), inout.numel, factor, nullptr, stream);
  }

  void square_sum(BufferView in, const Pieces& pieces, math::ExactSum* sum, std::int64_t* nonfinite,
                  Stream stream) override {
    check_prepared(pieces);
    with_type(in.dtype, "norm", [&]<class Source>(Type<Source>) {
      launch_blocks((pieces.num_chunks + SquareSum<Source>::kChunks - 1) / SquareSum<Source>::kChunks,
                    SquareSum<Source>{in.as<const Source>(), in.numel, pieces.chunks, pieces.num_chunks,
                                      sum->limbs().data(), nonfinite},
                    stream);
    });
  }

  void finish_norm(const math::ExactSum* sum, const std::int64_t* nonfinite, std::int64_t num_slots,
                   const math::StepRule& rule, math::StepOutcome* outcome, Stream stream) override {
    launch_blocks(1, FinishNorm{sum->limbs().data(), nonfinite, num_slots, rule, outcome}, stream);
  }

  void adam(const Pieces& pieces, const math::AdamScalars* scalars, const std::uint8_t* used,
            const math::StepScalars* step, const OptimizerBuffers& buffers, Stream stream) override {
    update<Adam>(pieces, scalars, used, step, buffers, stream);
  }

  void sgd(const Pieces& pieces, const math::SgdScalars* scalars, const std::uint8_t* used,
           const math::StepScalars* step, const OptimizerBuffers& buffers, Stream stream) override {
    update<Sgd>(pieces, scalars, used, step, buffers, stream);
  }

  void lion(const Pieces& pieces, const math::LionScalars* scalars, const std::uint8_t* used,
            const math::StepScalars* step, const OptimizerBuffers& buffers, Stream stream) override {
    update<Lion>(pieces, scalars, used, step, buffers, stream);
  }

  void adagrad(const Pieces& pieces, const math::AdagradScalars* scalars, const std::uint8_t* used,
               const math::StepScalars* step, const OptimizerBuffers& buffers, Stream stream) override {
    update<Adagrad>(pieces, scalars, used, step, buffers, stream);
  }

  void muon_momentum(const Pieces& pieces, const math::MuonScalars* scalars, const std::uint8_t* used,
                     const math::StepScalars* step, const OptimizerBuffers& buffers, Stream stream) override {
    check_prepared(pieces);
    with_type(buffers.grad_dtype, "gradient", [&]<class Grad>(Type<Grad>) {
      launch_blocks(pieces.num_chunks,
                    Update<MuonMomentum, Grad, void>{pieces.chunks, pieces.num_chunks, scalars, used, step, buffers},
                    stream);
    });
  }

  void muon(const Pieces& pieces, const math::MuonScalars* scalars, const std::uint8_t* used,
            const math::StepScalars* step, const OptimizerBuffers& buffers, Stream stream) override {
    update_model<Muon, float>(pieces, scalars, used, step, buffers, stream);  // takes no gradient
  }

  // As cpu::orthogonalize, step by step; but a matrix that is not finite becomes NaN.
  void orthogonalize(float* matrix, std::int64_t rows, std::int64_t columns, int iterations, float* workspace,
                     Stream stream) override {
    const std::int64_t numel = rows * columns, r = std::min(rows, columns), c = std::max(rows, columns);
    if (numel == 0) return;
    ZC_CHECK(reinterpret_cast<std::uintptr_t>(workspace) % alignof(std::int64_t) == 0, kInternal,
             "[cuda] a workspace that is not aligned to 8 bytes: got ", workspace);
    float* x = workspace;
    float* next = x + numel;
    float* gram = next + numel;
    float* polynomial = gram + r * r;
    auto* limbs = reinterpret_cast<std::int64_t*>(polynomial + r * r);
    std::int64_t* nonfinite = limbs + math::ExactSum::kNumLimbs;
    auto* factor = reinterpret_cast<float*>(nonfinite + 1);

    const OnDevice on(runtime_, device_);
    runtime_.zero(limbs, reinterpret_cast<std::byte*>(factor) - reinterpret_cast<std::byte*>(limbs), stream.handle);
    const std::int64_t num_chunks = (numel + math::kBlockNumel - 1) / math::kBlockNumel;
    launch_blocks((num_chunks + SquareSum<float>::kChunks - 1) / SquareSum<float>::kChunks,
                  SquareSum<float>{matrix, numel, nullptr, num_chunks, limbs, nonfinite}, stream);
    launch_blocks(1, NormFactor{limbs, nonfinite, factor}, stream);

    const bool tall = rows > columns;
    if (tall) {
      launch_tiles(Transpose{matrix, rows, columns, x}, stream);
    } else {
      copy(x, matrix, numel * 4, stream);
    }
    scale_by(x, numel, 1, factor, stream);
    const auto* polynomials = math::kNewtonSchulz;
    for (int iteration = 0; iteration < iterations; ++iteration) {
      launch_tiles(Product{{x, c, 1}, {x, c, 1}, r, r, c, 1, nullptr, 0, true, gram}, stream);
      launch_tiles(Product{{gram, r, 1}, {gram, r, 1}, r, r, r, polynomials[2], gram, polynomials[1], true, polynomial},
                   stream);
      launch_tiles(Product{{polynomial, r, 1}, {x, 1, c}, r, c, r, 1, x, polynomials[0], false, next}, stream);
      std::swap(x, next);
    }
    if (tall) {
      launch_tiles(Transpose{x, columns, rows, matrix}, stream);
    } else {
      copy(matrix, x, numel * 4, stream);
    }
  }

 private:
  static void check_prepared(const Pieces& pieces) {
    ZC_CHECK(pieces.list.empty() || pieces.num_chunks > 0, kInternal, "[cuda] got a list of ", pieces.list.size(),
             " pieces, expected a PieceTable with chunks on the device");
  }

  // A grid that fills the device a few times, so that the last blocks to end matter little, or less where there is less
  // to do. Blocks go on to further work themselves.
  template <class Kernel>
  void launch_blocks(std::int64_t blocks, const Kernel& kernel, Stream stream) {
    constexpr std::int64_t kThreads = 4096;  // for a multiprocessor, which runs 512 to 2048 at a time
    if (blocks == 0) return;
    const OnDevice on(runtime_, device_);
    launch(kernel, std::min(blocks, num_multiprocessors_ * (kThreads / Kernel::kThreads)), stream);
  }

  // For kernels over numel elements, of which a thread takes some 8 at a time.
  template <class Kernel>
  void launch_over(std::int64_t numel, const Kernel& kernel, Stream stream) {
    constexpr std::int64_t kBlockNumel = std::int64_t{8} * Kernel::kThreads;
    launch_blocks((numel + kBlockNumel - 1) / kBlockNumel, kernel, stream);
  }

  template <class Kernel>
  void launch_tiles(const Kernel& kernel, Stream stream) {
    launch_blocks(kernel.num_tiles(), kernel, stream);
  }

  // As many launches as the parts need to fit into kernel arguments. zeros: whether parts without data count.
  template <class Kernel>
  void launch_parts(std::span<const Part> parts, const BufferView& buffer, Kernel& kernel, Stream stream,
                    bool zeros = true) {
    Parts& list = kernel.parts;
    const auto flush = [&] {
      launch_blocks(list.num_tiles, kernel, stream);
      list.count = list.num_tiles = 0;
    };
    list.count = list.num_tiles = 0;
    for (const Part& part : parts) {
      buffer.slice(part.offset, part.numel);  // throws where it leaves the buffer
      if (part.numel == 0 || (part.data == nullptr && !zeros)) continue;
      ZC_CHECK(is_floating(part.dtype), kInternal, "[cuda] no such part: got ", name(part.dtype),
               ", expected fp32, fp16 or bf16");
      if (list.count == Parts::kMax) flush();
      list.parts[list.count++] = {part.data, part.offset, part.numel, list.num_tiles, part.dtype};
      list.num_tiles += static_cast<std::int32_t>((part.numel + Parts::kTileNumel - 1) / Parts::kTileNumel);
    }
    flush();
  }

  // In groups of as many sources as a launch takes; accumulators are rounded after each source anyway.
  void fold_all(std::span<const void* const> in, DType dtype, BufferView acc, bool first, Stream stream) {
    with_type(dtype, "fold", [&]<class Source>(Type<Source>) {
      with_type(acc.dtype, "fold", [&]<class Acc>(Type<Acc>) {
        for (std::size_t k = 0; k < in.size(); k += kMaxSources) {
          Fold<Source, Acc> kernel{{}, acc.as<Acc>(), acc.numel, first && k == 0};
          kernel.in.count = static_cast<int>(std::min<std::size_t>(kMaxSources, in.size() - k));
          for (int n = 0; n < kernel.in.count; ++n) {
            kernel.in.data[n] = static_cast<const Source*>(in[k + static_cast<std::size_t>(n)]);
          }
          launch_over(acc.numel, kernel, stream);
        }
      });
    });
  }

  void scale_by(float* values, std::int64_t numel, float factor, const float* factor_at, Stream stream) {
    launch_over(numel, Scale{values, numel, factor, factor_at}, stream);
  }

  void copy(void* to, const void* from, std::int64_t bytes, Stream stream) {
    const OnDevice on(runtime_, device_);
    runtime_.copy(to, from, bytes, stream.handle);
  }

  template <class Optimizer>
  void update(const Pieces& pieces, const typename Optimizer::Scalars* scalars, const std::uint8_t* used,
              const math::StepScalars* step, const OptimizerBuffers& buffers, Stream stream) {
    with_type(buffers.grad_dtype, "gradient", [&]<class Grad>(Type<Grad>) {
      update_model<Optimizer, Grad>(pieces, scalars, used, step, buffers, stream);
    });
  }

  template <class Optimizer, class Grad>
  void update_model(const Pieces& pieces, const typename Optimizer::Scalars* scalars, const std::uint8_t* used,
                    const math::StepScalars* step, const OptimizerBuffers& buffers, Stream stream) {
    check_prepared(pieces);
    const auto run = [&]<class Model>(Type<Model>) {
      launch_blocks(pieces.num_chunks,
                    Update<Optimizer, Grad, Model>{pieces.chunks, pieces.num_chunks, scalars, used, step, buffers},
                    stream);
    };
    if (buffers.model == nullptr) {
      run(Type<void>{});
    } else {
      with_type(buffers.model_dtype, "model", run);
    }
  }

  Runtime& runtime_;
  int device_;
  std::int64_t num_multiprocessors_;
};

}  // namespace

std::unique_ptr<device::Kernels> make_cuda_kernels(Runtime& runtime, int device) {
  return std::make_unique<CudaKernels>(runtime, device);
}

}  // namespace zc::cuda
